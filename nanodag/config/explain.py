"""Says what is wrong with a config: the field, the value found, what is allowed, the nearest right name."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from nanodag.config.schema import AnyStage, Pipeline

# What pydantic adds to a location for the branches of a union such as `number | "auto"`: no part of a field's name.
_BRANCHES = ("literal[", "int", "float", "bool", "str", "constrained", "function-")


def nearest(name: str, options: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the option whose last part is most like a name, the outermost of those, or nothing."""
    inmost_first = sorted(options, key=lambda option: option.count("."), reverse=True)
    by_last = {option.rpartition(".")[2]: option for option in inmost_first}
    near = difflib.get_close_matches(name, by_last, n=1)
    return f" Did you mean {by_last[near[0]]!r}?" if near else ""


def explain(error: ValidationError, file: Path, preset: str) -> str:
    """One line for each wrong field, under a line that names the file and the preset."""
    messages: dict[str, list[str]] = {}
    found: dict[str, str] = {}
    for problem in error.errors():
        name = _name_of(problem["loc"])
        if problem["type"] == "extra_forbidden":
            names = _names_in(_model_at(problem["loc"]))
            allowed = ", ".join(n for n in names if "." not in n)
            near = nearest(str(problem["loc"][-1]), names) or f" Allowed: {allowed}."
            message = f"no such key (nothing is built under that name).{near}"
        elif problem["type"] == "union_tag_invalid":
            tag = str(problem["ctx"]["tag"])
            message = f"kind {tag!r} is none of {', '.join(_models_by_kind())}.{nearest(tag, _models_by_kind())}"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            value = problem.get("input")
            if not isinstance(value, dict | BaseModel):
                found[name] = f" (found {value!r})"
        if message not in messages.setdefault(name, []):
            messages[name].append(message)
    lines = [f"  {name}: {', or '.join(texts)}{found.get(name, '')}" for name, texts in messages.items()]
    return "\n".join([f"{file}, preset {preset!r}, cannot be used:", *lines])


def _name_of(location: Sequence[int | str]) -> str:
    parts = [str(part) for part in location]
    if parts and parts[0] == "stages":
        parts = [p for i, p in enumerate(parts) if i > 0 and not (i == 2 and p in _models_by_kind())]
    return ".".join(p for p in parts if not p.startswith(_BRANCHES)) or "pipeline"


def _models_by_kind() -> dict[str, type[BaseModel]]:
    union = get_args(get_args(AnyStage)[0])
    return {get_args(model.model_fields["kind"].annotation)[0]: model for model in union}


def _model_at(location: Sequence[int | str]) -> type[BaseModel]:
    """The model in which an unknown key was found."""
    model: type[BaseModel] = Pipeline
    rest = list(location[:-1])
    if len(rest) >= 3 and rest[0] == "stages":
        model = _models_by_kind().get(str(rest[2]), Pipeline)
        rest = rest[3:]
    for part in rest:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        model = (_model_in(field.annotation) if field else None) or model
    return model


def _names_in(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Field names of a model and, dotted, of the models in it."""
    names = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        inner = _model_in(field.annotation)
        names += _names_in(inner, f"{prefix}{name}.") if inner is not None and inner is not model else []
    return names


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for a in get_args(annotation) if (found := _model_in(a)) is not None), None)
