"""The commands that look after the store. Light: each imports what it needs when it runs."""

from typing import Annotated

import typer

File = Annotated[str, typer.Option("--file", "-f", help="The pipeline file; else ./pipeline.yaml, else nanodag's own.")]
Key = Annotated[str, typer.Argument(help="A key, or how it begins; KEY/0002 for one attempt; RUN:STAGE for a run's.")]


def add_to(app: typer.Typer) -> None:
    """Make the commands part of `nanodag`."""
    for command in (verify, gc, lineage, diff, export, reproduce):
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
    keep_runs: Annotated[
        int, typer.Option("--keep-runs", min=0, help="Keep the newest so many, completed ones first; 0: all.")
    ] = 0,
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


def lineage(
    key: Key,
    picture: Annotated[str, typer.Option("--picture", help="Draw it into that SVG file, too.")] = "",
    file: File = "",
) -> None:
    """Show what an artifact was made from, all the way up to the data."""
    from nanodag.cli.look import show_lineage

    show_lineage(key, picture=picture, file=file)


def diff(
    run_a: Annotated[str, typer.Argument(help="A run's name, or how it begins.")],
    run_b: Annotated[str, typer.Argument(help="Another.")],
    show_all: Annotated[bool, typer.Option("--all", help="What is the same, too.")] = False,
    file: File = "",
) -> None:
    """Show two runs side by side: what of config, data, code, metrics and cost is not the same."""
    from nanodag.cli.look import show_diff

    show_diff(run_a, run_b, show_all=show_all, file=file)


def export(
    key: Key,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder that is not there yet.")],
    file: File = "",
) -> None:
    """Write a model, or a tokenizer, as a plain Hugging Face folder. Overwrites nothing."""
    from nanodag.cli.look import export_artifact

    export_artifact(key, folder, file=file)


def reproduce(key: Key, file: File = "") -> None:
    """Carry out an artifact's stage again, from its recorded config, inputs and data, and compare the bytes.

    Exit code 0 when they are the same, 1 when not. Nothing is published; what came out otherwise is left to look at.
    """
    from nanodag.cli.look import reproduce_artifact

    raise typer.Exit(reproduce_artifact(key, file=file))
