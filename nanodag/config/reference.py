"""Words, type, range and default of a setting, from its class."""

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nanodag import registry
from nanodag.config.pipeline import AnyStage, full_path
from nanodag.config.resolve import Resolved
from nanodag.config.rl_parts import EntryConfig
from nanodag.errors import ConfigError
from nanodag.errors.words import listed, nearest

_PLAIN = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "nothing"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "pattern": "of the form"}
_LINK = re.compile(r"\[(\w+)\]\(#\w+\)")


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
        type=_LINK.sub(r"\1", typed(field.annotation, field.metadata)),
        default=written(field.default),
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


def written(value: Any) -> str:
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
        return f"[{', '.join(written(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value).replace("\n", r"\n")


def typed(annotation: Any, metadata: Any = ()) -> str:
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
        text = typed(inner[0], [item for of_field in fields for item in of_field])
    elif origin is Literal:
        text = ", ".join(f"`{item}`" for item in inner)
    elif set(inner) == {bool, int, float, str}:
        text = "plain values"
    elif origin in (Union, types.UnionType):
        text = " or ".join(typed(item) for item in inner if item is not type(None))
    elif origin is tuple:
        is_open = inner[-1] is Ellipsis
        text = f"list of {typed(inner[0])}" if is_open else f"list of {len(inner)}: {typed(inner[0])}"
    elif origin is dict:
        text = f"table of {typed(inner[1])}"
    else:
        text = _PLAIN.get(annotation) or f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return ", ".join([text, *bounds])
