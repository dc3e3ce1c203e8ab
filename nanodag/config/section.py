"""What every part of the config shares: its base class, kinds of numbers, and fields that do not change a result."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

# A constraint stands inside its branch: on the union it would be applied to "auto" too.
Auto = Literal["auto"]


Natural = Annotated[int, Field(ge=0)]


Positive = Annotated[int, Field(ge=1)]


Rate = Annotated[float, Field(gt=0)]


Share = Annotated[float, Field(ge=0, lt=1)]


Precision = Literal["fp32", "bf16"]


def operational(default: Any, **constraints: Any) -> Any:
    """A field that does not change a stage's result."""
    return Field(default, json_schema_extra={"operational": True}, **constraints)


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


class Section(BaseModel):
    """Base of every part of the config: frozen, keyword only, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
