"""Parameters that several commands share, each explained once, and where things lie.

Every command takes `store.url=URL`, wherever it stands. It is handed on as the environment variable that says the same,
so whatever resolves a pipeline looks there. Commands that are printed as a next step repeat it, with the pipeline file.
"""

import os
import re
import shlex
from collections.abc import Sequence
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME=VALUE",
        help="Values to change, as in rl.learning_rate=2e-6 or store.url=/data/store. nanodag config lists all.",
    ),
]
Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        "-p",
        metavar="PRESET",
        help="A preset of the pipeline file. auto: the file's default, on any machine.",
    ),
]
File = Annotated[
    str,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="The pipeline file. Default: the one that NANODAG_FILE names, else ./pipeline.yaml, else nanodag's own.",
    ),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or how it begins. Default: the newest run.")]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's name, or how it begins; a folder; a model of the hub. Default: the newest run."
    ),
]
ModelStage = Annotated[str, typer.Argument(metavar="STAGE", help="A stage that makes a model. Default: the last one.")]
ThisRun = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or how it begins.")]
Key = Annotated[
    str,
    typer.Argument(
        metavar="KEY", help="An artifact: its key, or how it begins; KEY/0002 for one attempt; RUN:STAGE for a run's."
    ),
]
On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="MACHINE",
        help="Another machine: 8xH100, 2x8xH100, 1x24GB, 8x96GB:500 (memory and TFLOPS), cpu:2:avx2:16GiB (cores, "
        "instruction set, memory). Default: this one.",
    ),
]
NewRun = Annotated[
    str, typer.Option("--name", "-n", metavar="RUN", help="A new run's, or one to resume. Default: preset and time.")
]
Detach = Annotated[bool, typer.Option("--detach", help="Return once it has begun; it goes on without the terminal.")]

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
