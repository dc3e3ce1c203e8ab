"""Messages on what is wrong with a config: the field, the value found, what is allowed, the nearest right name."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from nanodag.config.kinds import known
from nanodag.config.pipeline import Pipeline
from nanodag.config.section import full_name, models_in
from nanodag.errors.words import counted, listed, nearest, said
from nanodag.host.beside import table_beside

# What pydantic adds to a location for the branches of a union such as `number | "auto"`: no part of a field's name.
_BRANCHES = ("literal[", "int", "float", "bool", "str", "constrained", "function-", "dict[", "tuple[", "nullable")
MAX_LINES = 8
MAX_NAMES = 20
_BY_TYPE: dict[str, str] = table_beside(__file__)


def explain(error: ValidationError, kinds: Mapping[str, str], where: str) -> str:
    """One line for each wrong field, after the file and the preset, `where`. kinds: stage -> the kind that it names."""
    problems = error.errors(include_url=False)
    # Of a value that a list lacks, the place of the list.
    lacks = [problem["type"] == "missing" and isinstance(problem["loc"][-1], int) for problem in problems]
    names = [_name_of(problem["loc"][: -1 if lack else None]) for problem, lack in zip(problems, lacks, strict=True)]
    tables = {".".join(parts[:end]) for parts in (name.split(".") for name in names) for end in range(1, len(parts))}
    lines = {name: [text] for name, text in _unknown_keys(problems, kinds).items()}
    suffixes: dict[str, str] = {}
    for name, problem in zip(names, problems, strict=True):
        if problem["type"] == "extra_forbidden" or name in tables:
            continue  # said above; or said of what is in it, and what that leaves of the whole is no second fault
        message = _message(problem)
        value = problem.get("input")
        if problem["type"] not in ("missing", "too_short", "too_long"):
            is_nested = isinstance(value, dict | list | BaseModel)
            is_said = problem["type"] == "value_error" and (is_nested or said(value) in message)
            hint = _hint(problem["type"], value)
            if hint or name not in suffixes:  # of a union any branch may know what was meant
                suffixes[name] = "" if is_said else f" (found {said(value)}){hint}"
        if message not in lines.setdefault(name, []):
            lines[name].append(message)
    texts = []
    for name, (first, *others) in lines.items():  # what is common to the branches of a union stands once
        text = " or ".join([first, *(other.removeprefix("must be ") for other in others)])
        texts.append(f"{name}: {text}{suffixes.get(name, '')}" if name else first)
    if len(texts) == 1:
        return f"{where}: {texts[0]}"
    more = [f"  and {counted(len(texts) - MAX_LINES, 'more fault')}"] if len(texts) > MAX_LINES else []
    return "\n".join([f"{where}, cannot be used:", *(f"  {text}" for text in texts[:MAX_LINES]), *more])


def _message(problem: Mapping[str, Any]) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _BY_TYPE:
        return _BY_TYPE[kind].format(**{k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()})
    if kind == "missing":
        return "has too few values" if isinstance(problem["loc"][-1], int) else "is missing"
    if kind in ("too_short", "too_long"):
        bound, words = ("min_length", "at least") if kind == "too_short" else ("max_length", "at most")
        return f"must have {words} {counted(context[bound], 'entry', 'entries')}"
    text = problem["msg"].removeprefix("Value error, ").removesuffix(".")
    return text.removeprefix("stages.") if not problem["loc"] else text


def _hint(kind: str, value: Any) -> str:
    if not isinstance(value, str):
        return ""
    if kind == "bool_type" and value.lower() in ("yes", "no", "on", "off"):
        return f"; write {str(value.lower() in ('yes', 'on')).lower()}"
    if kind in ("int_type", "float_type") and value.replace("_", "").replace(".", "").isdigit():
        return f"; write {value.replace('_', '')}, without {'underscores' if '_' in value else 'quotes'}"
    return ""


def _unknown_keys(problems: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> dict[str, str]:
    """Messages on unknown keys; one line where several of one stage are those of another kind."""
    by_owner: dict[tuple[int | str, ...], list[Mapping[str, Any]]] = {}
    for problem in problems:
        if problem["type"] == "extra_forbidden":
            by_owner.setdefault(tuple(problem["loc"][:-1]), []).append(problem)
    out = {}
    for owner, faults in by_owner.items():
        keys = [str(problem["loc"][-1]) for problem in faults]
        if len(owner) == 2 and owner[0] == "stages" and len(keys) > 1:
            others = [name for name, kind in known().items() if all(_has(kind.config, key) for key in keys)]
            shown = listed(keys[:4]) + (f" and {counted(len(keys) - 4, 'other')}" if len(keys) > 4 else "")
            is_whose = f"; they are keys of kind {' or '.join(others)}" if others else ""
            out[_name_of(owner)] = f"a stage of kind {kinds[str(owner[1])]} has no keys {shown}{is_whose}"
            continue
        names = _names_in(_model_at(faults[0]["loc"], kinds))
        for problem, key in zip(faults, keys, strict=True):
            heads = [name for name in names if "." not in name]
            all_of_them = f" Allowed: {listed(heads)}." if len(heads) <= MAX_NAMES else " `nanodag config` prints all."
            near = nearest(key, names) if len(out) < MAX_LINES else ""  # it is slow, and further lines are not shown
            out[_name_of(problem["loc"])] = f"there is no such key.{near or all_of_them}"
    return out


def _has(stage: type[BaseModel], key: str) -> bool:
    """True where a kind of stage has a setting of that name, short or not."""
    return key in stage.model_fields or full_name(stage, key) != key


def _name_of(location: Sequence[int | str]) -> str:
    parts = [str(part) for part in location]
    if parts and parts[0] == "stages":
        parts = parts[1:]
    return ".".join(p for i, p in enumerate(parts) if i == 0 or not p.startswith(_BRANCHES))


def _model_at(location: Sequence[int | str], kinds: Mapping[str, str]) -> type[BaseModel]:
    """The model in which an unknown key was found."""
    model: type[BaseModel] = Pipeline
    rest = list(location[:-1])
    if len(rest) >= 2 and rest[0] == "stages":
        model = known()[kinds[str(rest[1])]].config
        rest = rest[2:]
    for part in rest:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        model = next(models_in(field.annotation), model) if field else model
    return model


def _names_in(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Field names of a model and, dotted, of the models in it."""
    names = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        inner = next(models_in(field.annotation), model)
        names += _names_in(inner, f"{prefix}{name}.") if inner is not model else []
    return names
