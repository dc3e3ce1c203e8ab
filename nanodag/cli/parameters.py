"""Parameters that several commands share, each explained once, and where things lie.

Every command takes `store.url=URL`, wherever it stands. It is handed on as the environment variable that says the same,
so whatever resolves a pipeline looks there. Commands that are printed as a next step repeat it, with the pipeline file.
"""

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

_TEXTS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
Overrides = Annotated[list[str] | None, typer.Argument(**_TEXTS["overrides"])]
Preset = Annotated[str, typer.Option("--preset", "-p", **_TEXTS["preset"])]
File = Annotated[str, typer.Option("--file", "-f", **_TEXTS["file"])]
RunName = Annotated[str, typer.Argument(**_TEXTS["run_name"])]
ModelName = Annotated[str, typer.Argument(**_TEXTS["model_name"])]
ModelStage = Annotated[str, typer.Argument(**_TEXTS["model_stage"])]
ThisRun = Annotated[str, typer.Argument(**_TEXTS["this_run"])]
Key = Annotated[str, typer.Argument(**_TEXTS["key"])]
On = Annotated[str, typer.Option("--on", **_TEXTS["on"])]
NewRun = Annotated[str, typer.Option("--name", "-n", **_TEXTS["new_run"])]
Detach = Annotated[bool, typer.Option("--detach", **_TEXTS["detach"])]

_SETTING = re.compile(r"store\.(url|local)=(.+)", re.DOTALL)
_VARIABLES = {"url": "NANODAG_STORE", "local": "NANODAG_STORE_LOCAL"}
# What else they are told goes on to the flow's process, so they keep it.
TAKE_OVERRIDES = ("run", "slurm", "sweep", "scale", "config", "notify", "nightly run", "nightly on")
_TYPED: list[str] = []


def take(arguments: Sequence[str]) -> list[str]:
    """The arguments without what is handed on by the environment."""
    keeps = any(" ".join(arguments[: command.count(" ") + 1]) == command for command in TAKE_OVERRIDES)
    left = []
    for number, text in enumerate(arguments):
        if match := _SETTING.fullmatch(text):
            os.environ[_VARIABLES[match[1]]] = match[2]
            _TYPED.append(shlex.quote(text))
        elif text in ("--file", "-f"):
            _TYPED.append(f"--file {' '.join(map(shlex.quote, arguments[number + 1 : number + 2]))}")
        elif text.startswith("--file="):
            _TYPED.append(shlex.quote(text))
        if match is None or keeps:
            left.append(text)
    return left


def command(text: str) -> str:
    """A command as it has to be typed to mean the same store and pipeline file."""
    return " ".join(["nanodag", text, *_TYPED])
