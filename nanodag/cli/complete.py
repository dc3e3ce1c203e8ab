"""Names that a shell completes, from JSON and YAML alone: importing the config's classes takes half a second."""

import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import typer

from nanodag.host.folders import PROJECT, pipeline_file


def complete_names(*apps: typer.Typer) -> None:
    """Let parameters of the apps' commands be completed, by what their own names say that they are."""
    functions = {"stage": _stages, "begin_at": _stages, "preset": lambda ctx: list(_document(ctx)["presets"])}
    functions |= dict.fromkeys(("run", "run_a", "run_b", "name"), lambda ctx: list(_runs(ctx)))
    for command in (command for app in apps for command in app.registered_commands):
        annotations: dict[str, Any] = getattr(command.callback, "__annotations__", {})
        for name in annotations.keys() & {"overrides", *functions}:
            annotations[name].__metadata__[0].autocompletion = _quiet(functions.get(name, _settings))


def _quiet(complete: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The same with nothing to offer where the files it reads are damaged or not there: a shell is waiting."""

    @functools.wraps(complete)
    def offered(*args: Any, **kwargs: Any) -> list[str]:
        try:
            return complete(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, a traceback amid a command line helps nobody
            return []

    return offered


def _stages(context: typer.Context) -> list[str]:
    record = _runs(context).get(context.params.get("run"))
    return list(json.loads(record.read_bytes())["stages"] if record else _stage_tables(context))


def _settings(context: typer.Context, incomplete: str) -> list[str]:
    schema = json.loads((PROJECT / "docs/reference/pipeline.schema.json").read_bytes())
    every = _named(schema["$defs"], schema["properties"] | _stage_tables(context))
    found = [name for name in every if name.startswith(incomplete)]
    return found if len(found) > 1 else [*found, *(f"{name}VALUE" for name in found)]  # or the word would end at `=`


def _named(tables: Any, fields: Any, prefix: str = "") -> Iterator[str]:
    for name, field in fields.items():
        if inner := tables.get(field.get("$ref", "").rpartition("/")[2], {}).get("properties"):
            yield from _named(tables, inner, f"{prefix}{name}.")
        elif prefix or name not in ("default", "presets", "stages"):
            yield f"{prefix}{name}="


def _stage_tables(context: typer.Context) -> dict[str, Any]:
    bodies = [body for preset in _document(context)["presets"].values() for body in preset.get("stages", {}).items()]
    return {stage: {"$ref": f"/kind_{body['kind']}"} for stage, body in bodies if "kind" in body}


def _document(context: typer.Context) -> dict[str, Any]:
    import yaml

    return yaml.load(pipeline_file(context.params.get("file", "")).read_bytes(), Loader=yaml.CSafeLoader)


def _runs(context: typer.Context) -> dict[Any, Any]:
    url = os.environ.get("NANODAG_STORE") or _document(context).get("store", {}).get("url", "store")
    return {p.stem: p for p in (pipeline_file(context.params.get("file", "")).parent / url).glob("runs/*.json")}
