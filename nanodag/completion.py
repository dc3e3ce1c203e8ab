"""The `nanodag` command's begin, and the words that a shell completes: from the page of commands, JSON and YAML alone,
for a shell is waiting. To import typer, and pydantic with it, takes three times as long."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanodag.host.folders import PROJECT, pipeline_file

_RUNS = ("RUN", "[RUN]", "[RUN]...", r"RUN\|KEY", "OTHER", "NIGHT", "SWEEP")
_REPEATED = ("NAME=VALUE", r"RUN\|KEY")
_SAFE = re.compile(r"[\w.+-]+=?\w*")  # zsh evaluates what it is told, and others may name files of the store


def main() -> None:
    """Answer a shell, as the script of typer's --install-completion asks; else run the command."""
    mode, _, shell = os.environ.get("_NANODAG_COMPLETE", "").partition("_")
    if mode != "complete":
        from nanodag.cli import main as run

        return run()
    try:
        line = os.environ.get("_TYPER_COMPLETE_ARGS", "")
        typed = shlex.split(line) + [""] * line.endswith(" ")
        if shell == "bash":
            typed = os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]
        *words, incomplete = typed[1:]
        names = _offered(words, incomplete)
    except Exception:  # noqa: BLE001 - of a damaged file, an open quote: a traceback amid a command line helps nobody
        names, incomplete = {}, ""
    fit = {name: text for name, text in names.items() if name.startswith(incomplete) and _SAFE.fullmatch(name)}
    says = {name: re.sub(r"[^\w ,./’-]", "", text.replace("'", "’")) for name, text in fit.items()}
    if shell == "zsh":
        shown = " ".join(f'"{name}"' + f':"{text}"' * bool(text) for name, text in says.items())
        print(f"_arguments '*: :(({shown}))'" if shown else "_files")
    else:
        print(*(name + f"\t{text}" * (shell == "fish" and bool(text)) for name, text in says.items()), sep="\n")
    sys.exit(not says)  # fish offers files then


def _offered(words: list[str], incomplete: str) -> dict[str, str]:
    """Words that may stand behind these, each with its meaning or ""."""
    text = (PROJECT / "docs/reference/commands.md").read_text(encoding="utf-8")
    pages = {tuple(page[: page.index("\n")].split()): page for page in text.split("\n## nanodag ")[1:]}
    command = next((path for path in pages if [*path] == words[: len(path)]), ())
    if not command:  # yet
        rest = {path[len(words) :]: page for path, page in pages.items() if [*path[: len(words)]] == words}
        found = {path[0]: page.split("\n")[2] if len(path) == 1 else "" for path, page in rest.items()}
        return dict.fromkeys(("--help", "--version"), "") if incomplete.startswith("-") else found
    options: dict[str, tuple[str, str]] = {}  # by name: what it takes, "" for a flag; its meaning
    arguments: list[str] = []
    for cell, meaning in re.findall(r"^\| (`.+?`) \| (.+) \|$", pages[command], re.MULTILINE):
        *names, value = re.findall("`(.+?)`", cell)
        if value.startswith("-"):
            names, value = [*names, value], ""
        options |= dict.fromkeys(names, (value, meaning))
        arguments += [] if names else [value]
    words = [part for word in words[len(command) :] for part in word.split("=", word.startswith("--"))]
    takes = {word: options.get(word, ("",))[0] for word in ("", *words)}
    typed = [word for word, last in zip(words, ["", *words]) if not word.startswith("-") and not takes[last]]
    if not (kind := takes[words[-1]] if words else ""):
        if incomplete.startswith("-"):
            return {name: meaning for name, (_, meaning) in options.items()} | {"--help": ""}
        kind = [*arguments, *(a for a in arguments[-1:] if a in _REPEATED), ""][min(len(typed), len(arguments))]
    given = dict(pairwise(words)) | dict(zip(arguments, typed))
    return dict.fromkeys(_values(kind, given, incomplete), "")


def _values(kind: str, given: Mapping[str, str], incomplete: str) -> Iterable[str]:
    """Values of that kind. given: those typed before, by option or argument."""
    file = pipeline_file(given.get("--file", given.get("-f", "")))
    if kind in _RUNS:
        return _runs(file)
    if kind == "STAGE":
        record = _runs(file).get(given.get("RUN"))
        return json.loads(record.read_bytes())["stages"] if record else _stage_tables(file)
    if kind == "PRESET":
        return _document(file)["presets"]
    return _settings(file, incomplete) if kind == "NAME=VALUE" else ()


def _settings(file: Path, incomplete: str) -> list[str]:
    schema = json.loads((PROJECT / "docs/reference/pipeline.schema.json").read_bytes())
    every = _named(schema["$defs"], schema["properties"] | _stage_tables(file))
    found = [name for name in every if name.startswith(incomplete)]
    return found if len(found) > 1 else [*found, *(f"{name}VALUE" for name in found)]  # or the word would end at `=`


def _named(tables: Any, fields: Any, prefix: str = "") -> Iterator[str]:
    for name, field in fields.items():
        if inner := tables.get(field.get("$ref", "").rpartition("/")[2], {}).get("properties"):
            yield from _named(tables, inner, f"{prefix}{name}.")
        elif prefix or name not in ("default", "presets", "stages"):
            yield f"{prefix}{name}="


def _stage_tables(file: Path) -> dict[str, Any]:
    bodies = [body for preset in _document(file)["presets"].values() for body in preset.get("stages", {}).items()]
    return {stage: {"$ref": f"/kind_{body['kind']}"} for stage, body in bodies if "kind" in body}


def _document(file: Path) -> dict[str, Any]:
    import yaml

    return yaml.load(file.read_bytes(), Loader=yaml.CSafeLoader)


def _runs(file: Path) -> dict[Any, Path]:
    url = os.environ.get("NANODAG_STORE") or _document(file).get("store", {}).get("url", "store")
    return {path.stem: path for path in (file.parent / url).glob("runs/*.json")}
