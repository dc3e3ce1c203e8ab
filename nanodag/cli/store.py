"""The commands that look after the store. Light: each imports what it needs when it runs."""

from typing import Annotated

import typer

from nanodag.cli.parameters import File, Key, ThisRun


def add_to(app: typer.Typer) -> None:
    """Make the commands part of `nanodag`."""
    for command in (verify, gc, lineage, diff, export, reproduce):
        app.command()(command)


def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN|KEY", help="Runs, or keys as they begin. Default: all of the store."),
    ] = None,
    set_aside: Annotated[bool, typer.Option("--set-aside", help="Move what is damaged out of the way.")] = False,
    file: File = "",
) -> None:
    """Compare every byte of artifacts with what was published.

    Exit code 1 when something is damaged. What is set aside lies in the store's damaged/ and does not count: the next
    run builds it again.

    \b
    nanodag verify RUN --set-aside
    """
    from nanodag.cli.gc import verify_store

    raise typer.Exit(verify_store(names or [], set_aside=set_aside, file=file))


def gc(
    keep_runs: Annotated[
        int,
        typer.Option("--keep-runs", metavar="N", min=0, help="Keep the newest N runs, completed ones first; 0: all."),
    ] = 0,
    keep_days: Annotated[
        float, typer.Option("--keep-days", metavar="DAYS", min=0, help="Keep runs that are younger; 0: of any age.")
    ] = 0.0,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-best",
            metavar="STAGE.METRIC[:min]",
            help="Keep a stage's best by a metric, the highest unless :min is there; may be repeated.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove it. Without this it is only said.")] = False,
    file: File = "",
) -> None:
    """Say what the store can do without; --yes removes it.

    An artifact stays while a run refers to it, or to something made from it. Without options every run stays, and
    only what no run refers to goes. With --keep-runs or --keep-days the records of other runs go too: a run stays
    when one of the two keeps it.

    \b
    nanodag gc --keep-runs 5 --keep-best eval_rl.sort --yes
    """
    from nanodag.cli.gc import collect

    collect(keep_runs=keep_runs, keep_days=keep_days, keep_best=keep_best or [], yes=yes, file=file)


def lineage(
    key: Key,
    picture: Annotated[str, typer.Option("--picture", metavar="FILE.svg", help="Draw it into that file, too.")] = "",
    file: File = "",
) -> None:
    """Show what an artifact was made from, up to the data.

    \b
    nanodag lineage RUN:sft --picture sft.svg
    """
    from nanodag.cli.lineage import show_lineage

    show_lineage(key, picture=picture, file=file)


def diff(
    run_a: ThisRun,
    run_b: Annotated[str, typer.Argument(metavar="OTHER", help="Another run's.")],
    show_all: Annotated[bool, typer.Option("--all", help="Show what is the same, too.")] = False,
    file: File = "",
) -> None:
    """Show two runs side by side: what is not the same.

    That is of config, data, code, metrics and cost.

    \b
    nanodag diff RUN OTHER
    """
    from nanodag.cli.lineage import show_diff

    show_diff(run_a, run_b, show_all=show_all, file=file)


def export(
    key: Key,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder that is not there yet.")],
    file: File = "",
) -> None:
    """Write a model, or a tokenizer, as a Hugging Face folder.

    It overwrites nothing.

    \b
    nanodag export RUN:rl my-model
    """
    from nanodag.cli.lineage import export_artifact

    export_artifact(key, folder, file=file)


def reproduce(key: Key, file: File = "") -> None:
    """Run an artifact's stage again, and compare the bytes.

    It takes the recorded config, inputs and data. Exit code 0 when the bytes are the same, 1 when not. Nothing is
    published; what came out otherwise is left to look at.

    \b
    nanodag reproduce RUN:tokenizer
    """
    from nanodag.cli.lineage import reproduce_artifact

    raise typer.Exit(reproduce_artifact(key, file=file))
