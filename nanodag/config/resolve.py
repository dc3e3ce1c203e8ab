"""From pipeline.yaml, a preset and overrides to one resolved pipeline, with the origin of every value."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from nanodag.config.derive import derive
from nanodag.config.explain import explain, nearest
from nanodag.config.schema import Pipeline
from nanodag.config.trust import check_trust
from nanodag.errors import ConfigError

KeyPath = tuple[str, ...]

# What may run code on this machine: an override may be a flow run's parameter, which others can send.
FILE_ONLY: tuple[KeyPath, ...] = (("trusted_modules",), ("cluster", "reach"))

# The safe loader in C reads the same six times as fast; a sweep reads the file once a point.
_SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A pipeline in which nothing is left open.

    origins: dotted name -> `default`, `preset NAME`, `override`, `environment NAME` or `derived: why`; a name with `!`
    at its end has what the dial says beside a value that was given.
    """

    pipeline: Pipeline
    origins: Mapping[str, str]


def resolve(file: Path, preset: str = "auto", overrides: Sequence[str] = ()) -> Resolved:
    """Read a pipeline file, choose a preset (`auto`: by hardware), apply `dotted.name=value` overrides.

    Raises ConfigError naming the field, the value found, what is allowed and the nearest right name.
    """
    document = _read_yaml(file)
    presets = document["presets"]
    if preset == "auto":
        has_gpu = shutil.which("nvidia-smi") is not None and "single-gpu" in presets
        preset = "single-gpu" if has_gpu else document.get("default", "pocket")
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name in _lineage(presets, preset, file):
        body = {k: v for k, v in presets[name].items() if k != "extends"}
        _merge(tree, body, origins, f"preset {name}")
    tree["preset"] = preset
    origins["preset"] = "the command line, or by hardware"
    _absolute_paths(tree, file.absolute().parent)
    from_file = [_at(tree, path) for path in FILE_ONLY]
    for text in environment_overrides():
        name = "NANODAG_MIRROR" if text.startswith("mirror=") else "NANODAG_STORE"
        name += "_LOCAL" if text.startswith("store.local=") else ""
        _override(tree, text, origins, f"environment {name}")
    for text in overrides:
        _override(tree, text, origins, "override")
    for path, value in zip(FILE_ONLY, from_file):
        if _at(tree, path) != value:
            name = ".".join(path)
            raise ConfigError(f"{name} says which code may run here: write it into {file}; an override cannot set it.")
    _absolute_paths(tree, Path.cwd())
    try:
        pipeline = Pipeline.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, file, preset)) from None
    check_trust(pipeline, file.absolute())
    pipeline, derived = derive(pipeline)
    origins.update(derived)
    shown = {name: origins.get(name, "default") for name, _ in leaves(pipeline)}
    shown |= {name: said for name, said in origins.items() if name.endswith("!")}
    return Resolved(pipeline=pipeline, origins=shown)


def _at(tree: Any, path: KeyPath) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def environment_overrides() -> list[str]:
    """What NANODAG_MIRROR, NANODAG_STORE and NANODAG_STORE_LOCAL say, as overrides."""
    pairs = (("mirror", "NANODAG_MIRROR"), ("store.url", "NANODAG_STORE"), ("store.local", "NANODAG_STORE_LOCAL"))
    return [f"{name}={os.environ[variable]}" for name, variable in pairs if os.environ.get(variable)]


def portable(overrides: Sequence[str]) -> list[str]:
    """The same overrides for a process with another working directory: relative paths of `file:` made absolute."""
    out = []
    for text in overrides:
        name, _, raw = text.partition("=")
        value = _number_or_yaml(raw)
        absolute = _absolute_files(value, Path.cwd())
        out.append(text if absolute == value else f"{name}={json.dumps(absolute)}")
    return out


def result_config(stage: BaseModel) -> dict[str, Any]:
    """The part of a stage's config that changes its result, as plain JSON values: what goes into its key."""
    out: dict[str, Any] = {}
    for name, field in type(stage).model_fields.items():
        if (field.json_schema_extra or {}).get("operational"):  # type: ignore[union-attr]
            continue
        value = getattr(stage, name)
        if (field.json_schema_extra or {}).get("later") and value == field.default:  # type: ignore[union-attr]
            continue
        if isinstance(value, BaseModel):
            out[name] = result_config(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            out[name] = [result_config(v) for v in value]
        else:
            out[name] = stage.model_dump(mode="json", include={name})[name]
    return out


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in a resolved pipeline; a stage's fields are named `stage.field`."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            hidden = prefix == "" and key == "stages"
            yield from leaves(inner, prefix if hidden else f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), Loader=_SAFE_LOADER)
    except FileNotFoundError:
        raise ConfigError(f"There is no pipeline file {file}. Name one with --file.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("presets"), dict):
        raise ConfigError(f"{file} has no table `presets`; see the pipeline.yaml that comes with nanodag.")
    return document


def _lineage(presets: Mapping[str, Any], name: str, file: Path) -> list[str]:
    chain: list[str] = []
    while name:
        if name not in presets:
            hint = nearest(name, presets)
            raise ConfigError(f"{file} has no preset {name!r}; it has {', '.join(presets)}.{hint}")
        if name in chain:
            raise ConfigError(f"{file}: preset {name!r} extends itself through {' -> '.join(chain)}.")
        chain.insert(0, name)
        name = presets[name].get("extends", "")
    return chain


def _merge(
    tree: dict[str, Any], layer: Mapping[str, Any], origins: dict[str, str], origin: str, path: KeyPath = ()
) -> None:
    """Put a layer over a tree. A table merges, anything else replaces; `stages.x: drop` takes a stage away."""
    for key, value in layer.items():
        here = (*path, str(key))
        if here[0] == "stages" and len(here) == 2 and value == "drop":
            tree.pop(key, None)
        elif isinstance(value, Mapping) and not (here[0] == "stages" and here[-1] == "inputs"):
            if not isinstance(tree.get(key), dict):
                tree[key] = {}
            _merge(tree[key], value, origins, origin, here)
        else:
            if isinstance(value, list) and here[-1] == "inputs":
                value = {name: name for name in value}
            tree[key] = value
            name = ".".join(here[1:] if here[0] == "stages" else here)
            for known in [o for o in origins if o == name or o.startswith(f"{name}.")]:
                del origins[known]
            for leaf, _ in leaves(value, name):
                origins[leaf] = origin


def _override(tree: dict[str, Any], text: str, origins: dict[str, str], origin: str) -> None:
    name, equals, raw = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"Override {text!r} is not of the form name=value, as in rl.learning_rate=2e-6.")
    try:
        value = _number_or_yaml(raw)
    except yaml.YAMLError as error:
        raise ConfigError(f"Override {text!r}: the value is not YAML ({error}).") from None
    stages = tree.get("stages", {})
    sections = ("stages", "store", "server", "cluster", "nightly")
    if parts[0] in stages:
        parts = ["stages", *parts]
    elif parts[0] not in Pipeline.model_fields or (len(parts) > 1 and parts[0] not in sections):
        options = [*stages, *Pipeline.model_fields]
        hint = nearest(parts[0], options)
        raise ConfigError(f"Override {text!r}: there is no stage or setting {parts[0]!r}; there are {options}.{hint}")
    layer: dict[str, Any] = {parts[-1]: value}
    for part in reversed(parts[:-1]):
        layer = {part: layer}
    _merge(tree, layer, origins, origin)


def _number_or_yaml(raw: str) -> Any:
    try:
        return float(raw) if "e" in raw.lower() and not raw.isalpha() else yaml.safe_load(raw)  # YAML 1.1 has no 2e-6
    except ValueError:
        return yaml.safe_load(raw)


def _absolute_paths(tree: dict[str, Any], base: Path) -> None:
    """Make paths that are relative so far begin at a folder: the store's, the mirror's, those of `file:` sources."""
    tree["stages"] = _absolute_files(tree.get("stages", {}), base)
    if "nightly" in tree:
        tree["nightly"] = _absolute_files(tree["nightly"], base)  # its models
    store = tree.setdefault("store", {})
    places = [(tree, "mirror", "none"), (store, "url", "store"), (store, "local", "auto")]
    for section, field in (("cluster", "hostfile"), ("server", "password_file")):
        if isinstance(table := tree.get(section), dict):
            places.append((table, field, "none"))
    for table, field, default in places if isinstance(store, dict) else places[:1]:
        value = table.get(field, default)
        if isinstance(value, str) and value not in ("none", "auto") and "://" not in value:
            table[field] = str(base / Path(value).expanduser())


def _absolute_files(value: Any, base: Path) -> Any:
    if isinstance(value, dict):
        return {k: _absolute_files(v, base) for k, v in value.items()}
    if isinstance(value, list):
        return [_absolute_files(v, base) for v in value]
    if isinstance(value, str) and value.startswith("file:") and not value.startswith(("file:/", "file:~")):
        return f"file:{base}/{value.removeprefix('file:').removeprefix('./')}"
    return value
