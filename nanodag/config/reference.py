"""Words, type, range and default of every setting, from its class. `python -m nanodag.config.reference`
prints all of them as docs/reference/config.md has them."""

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nanodag import registry
from nanodag.config.derive import RULES
from nanodag.config.kinds import shipped
from nanodag.config.pipeline import AnyStage, Pipeline, full_path
from nanodag.config.resolve import Resolved
from nanodag.config.rl_parts import EngineConfig, EntryConfig, SampledStage
from nanodag.config.section import models_in
from nanodag.config.stage_base import StageBase
from nanodag.config.supervised import ChatStage, SupervisedStage
from nanodag.errors import ConfigError
from nanodag.errors.words import listed, nearest

_PLAIN = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "nothing"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "pattern": "of the form"}
_LINK = re.compile(r"\[(\w+)\]\(#\w+\)")
COMMAND = "python -m nanodag.config.reference > docs/reference/config.md"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a resolved pipeline. origin: where its value came from; empty for a table, whose settings are in
    `holds`. choices: the shipped functions that it may name."""

    name: str
    words: str
    type: str
    default: str
    value: Any
    origin: str
    holds: tuple[str, ...]
    choices: tuple[str, ...]


def setting(resolved: Resolved, name: str) -> Setting:
    """A setting of a pipeline by its name, `rl.clip_high` being short for `rl.algorithm.clip_high`.

    Raises ConfigError with the nearest name.
    """
    stages = resolved.pipeline.stages
    full = full_path(stages, name)
    first, _, rest = full.partition(".")
    owner: Any = resolved.pipeline
    parts = full.split(".")
    if first in stages:
        owner, parts = stages[first], rest.split(".") if rest else []
    if not parts:
        fields = listed(type(owner).model_fields)
        raise ConfigError(f"{name} is a stage of kind {owner.kind}; name a setting of it: {fields}.")
    field: FieldInfo | None = None
    for part in parts:
        field = type(owner).model_fields.get(part, field) if isinstance(owner, BaseModel) else field
        owner = _inner(owner, part)
        if field is None or owner is _NOTHING:
            names = [key for key in resolved.origins if key.startswith(f"{first}.")] or list(resolved.origins)
            near = nearest(name.rpartition(".")[2], names) or " `nanodag config` prints all."
            raise ConfigError(f"There is no setting {name!r:.100}.{near}")
    assert field is not None
    is_table = isinstance(owner, BaseModel)
    return Setting(
        name=full,
        words=words_of(field),
        type=_LINK.sub(r"\1", _typed(field.annotation, field.metadata)),
        default=_written(field.default),
        value=owner,
        origin=resolved.origins.get(full, resolved.origins.get(f"{full}.name", "")),
        holds=tuple(type(owner).model_fields) if is_table and not isinstance(owner, EntryConfig) else (),
        choices=registry.names(owner.kind) if isinstance(owner, EntryConfig) else (),
    )


_NOTHING = object()


def _inner(owner: Any, part: str) -> Any:
    if isinstance(owner, BaseModel):
        return getattr(owner, part) if part in type(owner).model_fields else _NOTHING
    if isinstance(owner, Mapping):
        return owner.get(part, _NOTHING)
    if isinstance(owner, tuple) and part.isdecimal() and int(part) < len(owner):
        return owner[int(part)]
    return _NOTHING


def words_of(field: FieldInfo) -> str:
    """The words under a field, in one line."""
    return " ".join((field.description or "").split())


def _written(value: Any) -> str:
    """A default as a pipeline file would say it; empty for a table."""
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, EntryConfig):
        return value.name
    if isinstance(value, BaseModel) or value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_written(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value).replace("\n", r"\n")


def _typed(annotation: Any, metadata: Any = ()) -> str:
    """Type and range, in words."""
    pairs = [(words, getattr(item, key, None)) for item in metadata for key, words in _BOUNDS.items()]
    bounds = [
        f"{words} {f'`{bound}`' if isinstance(bound, str) else bound}" for words, bound in pairs if bound is not None
    ]
    bounds += ["not empty" for item in metadata if getattr(item, "min_length", None)]
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation == AnyStage:
        text = "stages, each of a kind below"
    elif origin is Annotated:
        fields = [item.metadata if isinstance(item, FieldInfo) else [item] for item in inner[1:]]
        text = _typed(inner[0], [item for of_field in fields for item in of_field])
    elif origin is Literal:
        text = ", ".join(f"`{item}`" for item in inner)
    elif set(inner) == {bool, int, float, str}:
        text = "plain values"
    elif origin in (Union, types.UnionType):
        text = " or ".join(_typed(item) for item in inner if item is not type(None))
    elif origin is tuple:
        is_open = inner[-1] is Ellipsis
        text = f"list of {_typed(inner[0])}" if is_open else f"list of {len(inner)}: {_typed(inner[0])}"
    elif origin is dict:
        text = f"table of {_typed(inner[1])}"
    else:
        text = _PLAIN.get(annotation) or f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return ", ".join([text, *bounds])


def reference() -> str:
    """docs/reference/config.md: a table for each class of the config, and the named entries."""
    lines = [
        "# Every setting of a pipeline",
        "",
        f"Generated by `{COMMAND}`.",
        "",
        "In a stage of any kind a setting may do without its section: `pretrain.depth` is `pretrain.shape.depth`,",
        "`rl.clip_high` is `rl.algorithm.clip_high`. [Sections](pipeline-file.md#sections-and-short-names) lists them.",
        "`nanodag config --explain rl.clip_high` says what a setting is in your pipeline.",
    ]
    shown: list[type[BaseModel]] = []
    models: list[type[BaseModel]] = [Pipeline, StageBase, SupervisedStage, ChatStage, EngineConfig, SampledStage]
    models += [EntryConfig, *(kind.config for kind in shipped().values())]
    for model in models:
        lines += _class_lines(model, shown)
    for kind in registry.KINDS:
        lines += ["", f"## Shipped: {kind.replace('_', ' ')}", ""]
        lines += ["| name | what it does | options | traits |", "|-|-|-|-|"]
        lines += [_row(*_entry_cells(kind, name, entry)) for name, entry in registry.entries_of(kind).items()]
    lines += [
        "",
        "## What `auto` of training follows from",
        "",
        "[Machines](../how-to/machines.md#how-auto-follows-from-a-machine) says more.",
        "",
        *("| setting | rule | why |", "|-|-|-|"),
        *(_row(f"`{r.setting}`", r.rule.format(limit=r.limit), r.reason) for r in RULES.values()),
    ]
    return "\n".join(lines) + "\n"


def _class_lines(model: type[BaseModel], shown: list[type[BaseModel]]) -> Iterator[str]:
    """A class's heading, what it is and its own fields; then the classes that its fields hold."""
    if model in shown:
        return
    shown.append(model)
    fields = {
        name: field for name, field in model.model_fields.items() if name in model.__annotations__ and name != "kind"
    }
    kind = next((kind for kind, shipped_kind in shipped().items() if shipped_kind.config is model), "")
    yield from ("", f"## {model.__name__}", "")
    yield (f"Kind `{kind}`. " if kind else "") + " ".join((model.__doc__ or "").split())
    bases = [base for base in model.__mro__[1:] if base in shown]
    if bases and bases[0] is not model:
        yield f"It has the settings of [{bases[0].__name__}](#{bases[0].__name__.lower()}), too."
    if fields:
        yield from ("", "| setting | type and range | default | what it is |", "|-|-|-|-|")
    for name, field in fields.items():
        yield _row(f"`{name}`", _typed(field.annotation, field.metadata), _written(field.default), words_of(field))
    for field in fields.values():
        for inner in models_in(field.annotation):
            if not issubclass(inner, StageBase):
                yield from _class_lines(inner, shown)


def _entry_cells(kind: str, name: str, entry: registry.Entry) -> tuple[str, str, str, str]:
    settings = next((model.settings for model in EntryConfig.__subclasses__() if model.kind == kind), {})
    options = [
        f"`{key}`: the setting `{settings[key]}`" if key in settings else f"`{key}`: {option.type}, {option.default}"
        for key, option in entry.options.items()
    ]
    flags = ("compares_groups", "takes_steps", "scores_steps", "needs_critic", "needs_sandbox", "takes_all", "offloads")
    traits = [flag.replace("_", " ") for flag in flags if getattr(entry, flag, False)]
    shown = f"`{name}` and a {entry.argument}" if entry.argument else f"`{name}`"
    return shown, entry.words, "; ".join(options), ", ".join(traits)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(reference(), end="")
