"""What several commands take, each explained once."""

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
        metavar="NAME",
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
        help="Another machine: 8xH100, 1x24GB, 2x8xH100, cpu:2:avx2:16GiB (cores, instruction set, memory). "
        "Default: this one.",
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="Return once it has begun; it goes on without the terminal.")]
