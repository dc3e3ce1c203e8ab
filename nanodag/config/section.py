"""Base class of every part of the config, kinds of numbers, and fields that do not change a result."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError

from nanodag.errors import ConfigError

# A constraint stands inside its branch: on the union it would be applied to "auto" too.
Auto = Literal["auto"]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0.01, le=366 * 24 * 3600)]
Share = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["fp32", "bf16"]


def _whole(value: Any) -> Any:
    if type(value) is not int:
        raise PydanticKnownError("int_type")
    return value


WHOLE = BeforeValidator(_whole)
"""Of a Literal of numbers, which would take `true` for 1."""


def checked(check: Callable[[Any], object]) -> AfterValidator:
    """Mark of a type whose values a function looks at. It raises ValueError for one that will not do."""

    def same(value: Any) -> Any:
        check(value)
        return value

    return AfterValidator(same)


def operational(default: Any, **constraints: Any) -> Any:
    """A field that does not change a stage's result."""
    return Field(default, json_schema_extra={"operational": True}, **constraints)


def later(default: Any, **constraints: Any) -> Any:
    """A field that is newer than its kind: at its default it is in no key, so that what stores have is found."""
    return Field(default, json_schema_extra={"later": True}, **constraints)


T = TypeVar("T")


def found_in(value: Any, wanted: type[T], where: str = "") -> Iterator[tuple[str, T]]:
    """Dotted name and value of everything of a class in a config, at any depth."""
    if isinstance(value, wanted):
        yield where, value
        return
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from found_in(inner, wanted, f"{where}.{key}" if where else str(key))


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a field's type, in their order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


class Section(BaseModel):
    """Base of every part of the config: frozen, keyword only, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _whose_settings_fit(self) -> Self:
        self.check_settings()
        return self

    def check_settings(self) -> None:
        """Raise ValueError for settings that do not fit together."""


Part = TypeVar("Part", bound=Section)


class Filler(Generic[Part]):
    """Gives a section's settings that are `auto` a value, and notes why. updates: the values."""

    def __init__(self, section: Part, name: str, origins: dict[str, str]) -> None:
        self.updates: dict[str, Any] = {}
        self._section, self.name, self._origins = section, name, origins

    def __call__(self, field: str, value: Any, why: str) -> Any:
        """The setting: what is given, else the value."""
        own = getattr(self._section, field)
        if own != "auto":
            return own
        self.updates[field] = value
        self._origins[f"{self.name}.{field}"] = f"derived: {why}"
        return value

    @property
    def filled(self) -> Part:
        """The section with the values."""
        return self._section.model_copy(update=self.updates)


class StageSection(Section):
    """A section of a stage. Its settings have short names: `pretrain.depth` is `pretrain.shape.depth`."""


def sections_of(stage: type[BaseModel]) -> dict[str, type[StageSection]]:
    """Sections of a stage's class by name."""
    annotations = {name: field.annotation for name, field in stage.model_fields.items()}
    return {name: a for name, a in annotations.items() if isinstance(a, type) and issubclass(a, StageSection)}


def full_name(stage: type[BaseModel], name: str) -> str:
    """`algorithm.clip_high` for `clip_high`; a name that is full already, or unknown, as it is."""
    first = name.partition(".")[0]
    if first in stage.model_fields:
        return name
    home = next((home for home, section in sections_of(stage).items() if first in section.model_fields), "")
    return f"{home}.{name}" if home else name


def in_sections(stage: type[BaseModel], table: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's table with each setting in its section. Raises ConfigError for one that stands in both places."""
    full: dict[str, Any] = {key: value for key, value in table.items() if full_name(stage, key) == key}
    for key, value in table.items():
        home, _, name = full_name(stage, key).rpartition(".")
        if not home:
            continue
        section = full.setdefault(home, {})
        if not isinstance(section, Mapping):
            raise ConfigError(f"{key} is a setting of the section {home}, which is no table here: {section!r:.80}.")
        if name in section:
            raise ConfigError(f"{name} stands twice: by its short name, and in the section {home}. Keep one.")
        full[home] = {**section, name: value}
    return full
