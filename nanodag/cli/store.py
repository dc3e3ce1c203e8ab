"""The commands that look after the store. Light: each imports what it needs when it runs."""

from typing import Annotated

import typer

File = Annotated[str, typer.Option("--file", "-f", help="The pipeline file; else ./pipeline.yaml, else nanodag's own.")]
Key = Annotated[str, typer.Argument(help="A key, or how it begins; KEY/0002 for one attempt; RUN:STAGE for a run's.")]


def add_to(app: typer.Typer) -> None:
    """Make the commands part of `nanodag`."""
    for command in (verify, gc):
        app.command()(command)


def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="Runs, or keys as they begin; all of the store else.")
    ] = None,
    set_aside: Annotated[bool, typer.Option("--set-aside", help="Move what is damaged out of the way.")] = False,
    file: File = "",
) -> None:
    """Read every byte of artifacts and compare it with what was published. Exit code 1 when something is damaged.

    What is set aside lies in the store's damaged/ and does not count: the next run builds it again.
    """
    from nanodag.cli.keep import verify_store

    raise typer.Exit(verify_store(names or [], set_aside=set_aside, file=file))


def gc(
    keep_runs: Annotated[int, typer.Option("--keep-runs", min=0, help="Keep the newest so many runs; 0: all.")] = 0,
    keep_days: Annotated[float, typer.Option("--keep-days", min=0, help="Keep what is younger; 0: any age.")] = 0.0,
    keep_best: Annotated[
        list[str] | None,
        typer.Option("--keep-best", help="STAGE.METRIC[:min] keeps the best of a stage; may be repeated."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it. Without this it is only said.")] = False,
    file: File = "",
) -> None:
    """Say what the store can do without; with --yes remove it.

    An artifact stays while a run refers to it, or to something made from it. Without options every run stays, and
    only what no run refers to goes. With --keep-runs or --keep-days the records of other runs go too: a run stays
    when one of the two keeps it.
    """
    from nanodag.cli.keep import collect

    collect(keep_runs=keep_runs, keep_days=keep_days, keep_best=keep_best or [], yes=yes, file=file)
