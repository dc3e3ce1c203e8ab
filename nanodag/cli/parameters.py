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


def option(name: str, *flags: str) -> Any:
    """An option as `parameters.json` describes it, `COMMAND.PARAMETER` where one command has it. flags: `--NAME` unless
    given."""
    return typer.Option(*flags, **_TEXTS[name])


def argument(name: str) -> Any:
    """An argument, as `option`."""
    return typer.Argument(**_TEXTS[name])


Overrides = Annotated[list[str] | None, argument("overrides")]
Preset = Annotated[str, option("preset", "--preset", "-p")]
File = Annotated[str, option("file", "--file", "-f")]
RunName = Annotated[str, argument("run_name")]
ModelName = Annotated[str, argument("model_name")]
ModelStage = Annotated[str, argument("model_stage")]
ThisRun = Annotated[str, argument("this_run")]
Key = Annotated[str, argument("key")]
On = Annotated[str, option("on", "--on")]
NewRun = Annotated[str, option("new_run", "--name", "-n")]
Detach = Annotated[bool, option("detach", "--detach")]

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
