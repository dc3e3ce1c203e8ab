"""Resolution of pipeline.yaml, a preset and overrides into one pipeline, with the origin of every value."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from nanodag.config.derive import core_left_out, derive, unwise
from nanodag.config.derive_sampler import this_machine
from nanodag.config.document import parse_yaml, read_yaml
from nanodag.config.explain import explain
from nanodag.config.kinds import find_kind, vouch_for
from nanodag.config.pipeline import Pipeline, full_path
from nanodag.config.section import in_sections
from nanodag.config.trust import check_agents, check_trust
from nanodag.errors import ConfigError
from nanodag.errors.words import listed, nearest, said
from nanodag.host.folders import PROJECT
from nanodag.host.machine import Machine
from nanodag.own_code.trusted_modules import check_owner

KeyPath = tuple[str, ...]

# What may run code on this machine: an override may be a flow run's parameter, which others can send. The environment
# is that of whoever started the process.
FILE_ONLY: tuple[KeyPath, ...] = (
    *(("trusted_modules",), ("cluster", "ssh_command"), ("cluster", "hostfile")),
    ("server", "agents_of_file"),
)
MAX_STAGES = 1000
MAX_PARTS = 12  # of a dotted name
# Where things lie on this machine: setting -> environment variable.
ENVIRONMENT: Mapping[str, str] = read_yaml(Path(__file__).with_name("environment.yaml"))


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A pipeline in which nothing is left open.

    origins: dotted name -> `default`, `preset NAME`, `override`, `environment NAME` or `derived: why`; a name with `!`
    at its end has what the dial says beside a value that was given. warnings: what was given and is a bad idea there.
    """

    pipeline: Pipeline
    origins: Mapping[str, str]
    machine: Machine
    warnings: tuple[str, ...] = ()


def resolve(
    file: Path, preset: str = "auto", overrides: Sequence[str] = (), *, machine: Machine | None = None
) -> Resolved:
    """Read a pipeline file, choose a preset (`auto`: the file's default), apply `dotted.name=value` overrides.

    machine: what `auto` follows from; None: this one.

    Raises ConfigError naming the field, the value found, what is allowed and the nearest right name.
    """
    machine = machine or this_machine()
    document = read_document(file)
    check_owner(file)
    presets = document["presets"]
    tree: dict[str, Any] = {}
    origins = {"preset": "the command line"}
    if preset == "auto":  # the same on every machine: a GPU is no reason to begin a run of many hours unasked
        preset, origins["preset"] = document.get("default", "pocket"), "the file's default"
    where = f"{file}, preset {preset!r}"
    common = {key: value for key, value in document.items() if key not in ("default", "presets")}
    bodies = {"the file, for all presets": common}
    for name in _lineage(presets, preset, file):
        bodies[f"preset {name}"] = {k: v for k, v in presets[name].items() if k != "extends"}
    modules = next((b["trusted_modules"] for b in reversed(bodies.values()) if "trusted_modules" in b), None)
    modules = modules if isinstance(modules, list) else []  # what is wrong with it is told with all that is
    vouch_for(file.absolute(), [m for m in modules if isinstance(m, str)])  # before tables meet: sections are a kind's
    for origin, body in bodies.items():
        _merge(tree, body, origins, origin)
    tree["preset"] = preset
    _absolute_paths(tree, file.absolute().parent)
    unchanged = json.dumps(tree["stages"])
    for name, variable in ENVIRONMENT.items():
        if value := os.environ.get(variable):
            _override(tree, f"{name}={json.dumps(value, ensure_ascii=False)}", origins, f"environment {variable}")
    before = _what_may_run(tree)
    for text in overrides:
        _override(tree, text, origins, "override")
    for name, value in _what_may_run(tree).items():
        if before.get(name) != value:
            raise ConfigError(
                f"{name} says which code may run here, or who is sent keys: write it into {file}; an override "
                "cannot set it."
            )
    _absolute_paths(tree, Path.cwd())
    if len(tree["stages"]) > MAX_STAGES:
        count = f"{len(tree['stages']):,} are more than {MAX_STAGES:,}"
        raise ConfigError(f"{where}: stages: {count}, the most that a preset may have; split it.")
    try:
        # As JSON, so that types are strict (no number for true, no text for a number) and a list may stand for a tuple.
        pipeline = Pipeline.model_validate_json(json.dumps(tree), strict=True)
        if pipeline.server.agents_of_file:
            check_agents(pipeline, json.loads(unchanged))
    except ValidationError as error:
        kinds = {name: str(body.get("kind", "")) for name, body in tree["stages"].items() if isinstance(body, dict)}
        raise ConfigError(explain(error, kinds, where)) from None
    check_trust(pipeline, file.absolute())
    unchecked = tuple(full_path(pipeline.stages, name) for name in pipeline.unchecked)
    pipeline = pipeline.model_copy(update={"unchecked": unchecked})
    names = [name for name, _ in leaves(pipeline)] if unchecked else ()
    for name in set(unchecked).difference(names):
        near = nearest(name, names) or " Name it as messages do, as in rl.optimizer.micro_batch_tokens."
        raise ConfigError(f"{where}: unchecked: there is no setting {name!r:.100}.{near}")
    known = stages_in(document)
    for name in () if pipeline.nightly.stages == "all" else pipeline.nightly.stages:
        if name not in known:
            near = nearest(name, known) or f" Stages are {listed(known)}."
            raise ConfigError(f"{where}: nightly.stages: no preset of the file has a stage {name!r:.100}.{near}")
    pipeline, derived = derive(pipeline, machine)
    origins.update(derived)
    inner: dict[str, str] = {}  # of tables, what the first thing in them comes from
    for name, origin in origins.items():
        for end in (place for place, character in enumerate(name) if character == "."):
            inner.setdefault(name[:end], origin)
    shown = {name: _origin_of(name, origins, inner) for name, _ in leaves(pipeline)}
    shown |= {name: note for name, note in origins.items() if name.endswith("!")}
    # What somebody wrote; of our own file the overrides alone, as tests look after its presets.
    not_given = ("default", "derived", *["preset"] * (file.absolute() == PROJECT / "pipeline.yaml"))
    explicit_names = {name for name, origin in shown.items() if not origin.startswith(not_given)}
    warnings = (*unwise(pipeline, machine, explicit_names), *core_left_out(derived))
    return Resolved(pipeline=pipeline, origins=shown, machine=machine, warnings=warnings)


def _origin_of(name: str, origins: Mapping[str, str], inner: Mapping[str, str]) -> str:
    """Origin of a value, of what is in it, or of the short form written for its table."""
    if name in inner:
        return origins.get(name, inner[name])
    while name and name not in origins:
        name = name.rpartition(".")[0]
    return origins.get(name, "default")


def _what_may_run(tree: Any) -> dict[str, Any]:
    """Values of FILE_ONLY by dotted name, and of each stage's samplers the interpreter, the options, of which SGLang
    has some that import code, and the servers, which get prompts and keys."""
    fields = ("python", "options", "urls", "urls_file")
    of_samplers = [("stages", str(name), "sampler", field) for name in tree["stages"] for field in fields]
    values = {".".join(path).removeprefix("stages."): _at(tree, path) for path in (*FILE_ONLY, *of_samplers)}
    return {name: value for name, value in values.items() if value is not None}


def _at(tree: Any, path: KeyPath) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def portable(overrides: Sequence[str]) -> list[str]:
    """The same overrides for a process with another working directory: relative paths of `file:` made absolute."""
    out = []
    for text in overrides:
        name = text.partition("=")[0]
        value = value_of(text)
        absolute = _absolute_files(value, Path.cwd())
        out.append(text if absolute == value else f"{name}={json.dumps(absolute, ensure_ascii=False)}")
    return out


def result_config(stage: BaseModel) -> dict[str, Any]:
    """The part of a stage's config that changes its result, as plain JSON values: what goes into its key."""
    out: dict[str, Any] = {}
    for name, field in type(stage).model_fields.items():
        extra: Any = field.json_schema_extra or {}
        value = getattr(stage, name)
        if extra.get("operational") or (extra.get("later") and value == field.default):
            continue
        if isinstance(value, BaseModel):
            out[name] = result_config(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            out[name] = [result_config(v) for v in value]
        else:
            out[name] = stage.model_dump(mode="json", include={name})[name]
    return out


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in a resolved pipeline; a stage's fields are named `stage.field`. A list is
    one value, and so is an empty table in another."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            hidden = prefix == "" and key == "stages"
            yield from leaves(inner, prefix if hidden else f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def read_document(file: Path) -> dict[str, Any]:
    """Read a pipeline file: its presets, and beside them `default` and what is common to all of them.

    Raises ConfigError for what is no such table; what a preset's fields say is looked at when it is resolved.
    """
    document = read_yaml(file)
    if not isinstance(document, dict):
        raise ConfigError(f"{file} is empty, or no table; it needs a table `presets` (see nanodag's pipeline.yaml).")
    allowed = [name for name in Pipeline.model_fields if name != "preset"]
    _check_keys(document, ["default", "presets", *allowed], str(file), "beside `presets`, for all of them")
    presets = document.get("presets")
    if not isinstance(presets, dict) or not presets:
        raise ConfigError(f"{file} has no table `presets`; see the pipeline.yaml that comes with nanodag.")
    if not isinstance(document.get("default", ""), str):
        raise ConfigError(f"{file}: default must be the name of a preset; found {said(document['default'])}.")
    for name, body in presets.items():
        if not isinstance(body, dict):
            raise ConfigError(f"{file}: the preset {name!r} must be a table with `stages`; found {said(body)}.")
        _check_keys(body, ["extends", *allowed], f"{file}: the preset {name!r}", "in a preset")
        if not isinstance(body.get("extends", ""), str):
            raise ConfigError(
                f"{file}: `extends` of the preset {name!r} must be the name of another; found {said(body['extends'])}."
            )
    for where, body in [("beside the presets", document), *((f"in the preset {n!r}", b) for n, b in presets.items())]:
        _check_stages(body.get("stages", {}), f"{file}: `stages` {where}")
    return document


def stages_in(document: Mapping[str, Any]) -> list[str]:
    """Every stage name of a pipeline file's presets."""
    tables = [document, *document["presets"].values()]
    return list(dict.fromkeys(name for table in tables for name in table.get("stages", {})))


def _check_keys(table: Mapping[str, Any], allowed: Sequence[str], where: str, what: str) -> None:
    for key in table:
        if key not in allowed:
            near = nearest(key, allowed) or f" Allowed {what}: {', '.join(allowed)}."
            raise ConfigError(f"{where} has a key {key!r:.80} that means nothing.{near}")


def _check_stages(stages: Any, where: str) -> None:
    if not isinstance(stages, dict):
        raise ConfigError(f"{where} must be a table of stages; found {said(stages)}.")
    for name, body in stages.items():
        if not isinstance(body, dict) and body != "drop":
            raise ConfigError(f"{where}: the stage {name!r} must be a table, or `drop`; found {said(body)}.")


def _lineage(presets: Mapping[str, Any], name: str, file: Path) -> list[str]:
    chain: list[str] = []
    while name:
        if name not in presets:
            by = f", which {chain[0]!r} extends" if chain else ""
            hint = nearest(name, presets)
            raise ConfigError(f"{file} has no preset {name!r}{by}; it has {', '.join(presets)}.{hint}")
        if name in chain:
            raise ConfigError(f"{file}: the preset {name!r} extends itself: {' <- '.join([name, *chain])}.")
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
            _forget(origins, str(key), tree.pop(key, None))
        elif isinstance(value, Mapping) and not (here[0] == "stages" and here[-1] == "inputs"):
            if here[0] == "stages" and len(here) == 2:
                value = _in_sections(value, tree.get(key))
            if not isinstance(tree.get(key), dict):
                tree[key] = {}
                origins.pop(".".join(here[1:] if here[0] == "stages" else here), None)
            _merge(tree[key], value, origins, origin, here)
        else:
            if isinstance(value, list) and here[-1] == "inputs" and all(isinstance(name, str) for name in value):
                value = {name: name for name in value}
            name = ".".join(here[1:] if here[0] == "stages" else here)
            _forget(origins, name, tree.get(key))
            tree[key] = value
            for leaf, _ in leaves(value, name):
                origins[leaf] = origin


def _forget(origins: dict[str, str], name: str, value: Any) -> None:
    """Take the origins away of what a value that goes has in it."""
    for leaf, _ in leaves(value, name):
        origins.pop(leaf, None)


def _in_sections(table: Mapping[str, Any], below: Any) -> Mapping[str, Any]:
    """A stage's table by full names; its kind is its own, or that of the layers below it."""
    kind = table.get("kind") or (below.get("kind") if isinstance(below, Mapping) else None)
    try:
        stage_kind = find_kind(str(kind))
    except ConfigError:  # is told with all that is wrong
        return table
    return in_sections(stage_kind.config, table)


def _override(tree: dict[str, Any], text: str, origins: dict[str, str], origin: str) -> None:
    name, equals, _ = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts) or len(parts) > MAX_PARTS:
        raise ConfigError(f"Override {text!r:.80} is not of the form name=value, as in rl.learning_rate=2e-6.")
    value = value_of(text)
    stages = tree.get("stages", {})
    sections = ("stages", "store", "server", "cluster", "tracking", "nightly", "notify", "plan")
    if parts[0] in stages:
        parts = ["stages", *parts]
    elif parts[0] == "preset":
        raise ConfigError(f"Override {text!r:.80}: a preset is chosen with --preset.")
    elif parts[0] not in Pipeline.model_fields or (len(parts) > 1 and parts[0] not in sections):
        options = [*stages, *Pipeline.model_fields]
        hint = nearest(parts[0], options) or f" There are {', '.join(options)}."
        raise ConfigError(f"Override {text!r:.80}: there is no stage or setting {parts[0]!r}.{hint}")
    elif len(parts) == 1 and parts[0] == "stages":
        _check_stages(value, f"Override {text!r:.80}: `stages`")
    layer: dict[str, Any] = {parts[-1]: value}
    for part in reversed(parts[:-1]):
        layer = {part: layer}
    _merge(tree, layer, origins, origin)


def value_of(text: str) -> Any:
    """The value of an override, `name=value`. Raises ConfigError when it is not YAML."""
    raw = text.partition("=")[2]
    value = parse_yaml(raw, lambda line: f"Override {text!r:.80}")
    if isinstance(value, str) and " #" in raw and "#" not in value:
        raise ConfigError(f"Override {text!r:.80}: what follows ` #` is a comment in YAML; put the value in quotes.")
    return value


def _absolute_paths(tree: dict[str, Any], base: Path) -> None:
    """Make paths that are relative so far begin at a folder: the store's, the mirror's, those of `file:` sources."""
    tree["stages"] = _absolute_files(tree.get("stages", {}), base)
    if "nightly" in tree:
        tree["nightly"] = _absolute_files(tree["nightly"], base)  # its models
    store, stages = tree.setdefault("store", {}), tree["stages"].values() if isinstance(tree["stages"], dict) else ()
    places = [(tree, "mirror"), (tree, "core_bundle"), (store, "url"), (store, "local")]
    places += [(tree.get("cluster"), "hostfile"), *((tree.get("server"), name) for name in ("password_file", "folder"))]
    places += [(stage.get("sampler"), "urls_file") for stage in stages if isinstance(stage, dict)]
    for table, field in places:
        value = table.get(field, "store" if field == "url" else "none") if isinstance(table, dict) else "none"
        is_known = isinstance(value, str) and value not in ("", "none", "auto") and "://" not in value
        if is_known and not (field in ("hostfile", "urls_file") and value.startswith("$")):  # filled in where it runs
            try:
                table[field] = str(base / Path(value).expanduser())
            except RuntimeError:
                raise ConfigError(f"The path {value!r} names a user that there is not; write the folder out.") from None


def _absolute_files(value: Any, base: Path) -> Any:
    if isinstance(value, dict):
        return {k: _absolute_files(v, base) for k, v in value.items()}
    if isinstance(value, list):
        return [_absolute_files(v, base) for v in value]
    if isinstance(value, str) and value.startswith("file:") and not value.startswith(("file:/", "file:~")):
        return f"file:{base}/{value.removeprefix('file:').removeprefix('./')}"
    return value
