"""The commands that look after the store. Light: each imports what it needs when it runs."""

from typing import Annotated

import typer

from nanodag.cli.parameters import File, Key, ThisRun, argument, option
from nanodag.errors import StoreBusy
from nanodag.errors.words import counted, size

COLOURS = {"whole": "green", "damaged": "red", "newer": "yellow", "unfinished": "dim"}
SHOWN = 40


def verify(
    names: Annotated[list[str] | None, argument("verify.names")] = None,
    set_aside: Annotated[bool, option("verify.set_aside", "--set-aside")] = False,
    file: File = "",
) -> None:
    """Compare every byte of artifacts with what was published.

    Exit code 1 when something is damaged. What is set aside lies in the store's damaged/ and does not count: the next
    run builds it again.

    \b
    nanodag verify RUN --set-aside
    """
    from rich.text import Text

    from nanodag.cli.live_table import make_console
    from nanodag.run.record import served_store
    from nanodag.run.retention import check, targets

    console, store = make_console(), served_store(file)
    attempts = list(dict.fromkeys(t for name in (names or [""]) for t in targets(store, name)))
    findings = []
    for number, (key, attempt) in enumerate(attempts):
        finding = check(store, key, attempt)
        findings.append(finding)
        if finding.state != "whole" or names:
            place = f"{finding.key[:12]}/{finding.attempt}  {finding.stage:<12} "
            state = (f"{finding.state:<10} ", COLOURS[finding.state])
            console.print(Text.assemble(state, place, (finding.text, "dim")), soft_wrap=True)
        elif console.is_terminal and number % 20 == 19:
            console.print(f"{number + 1} of {len(attempts)} read", style="dim")
    damaged = [f for f in findings if f.state == "damaged"]
    for finding in damaged if set_aside else []:
        if finding.attempt not in store.attempts(finding.key):
            continue
        name = f"{finding.key[:12]}/{finding.attempt}"
        try:
            where = store.set_aside(finding.key, finding.attempt)
        except StoreBusy:
            console.print(f"{name} stays: somebody is building that key.", style="yellow")
        else:
            console.print(f"{name} is now {where}", soft_wrap=True)
    records = {} if names else store.unreadable_runs()
    for error in records.values():
        console.print(f"unreadable {error}", style="red", markup=False, soft_wrap=True)
    whole = [f for f in findings if f.state == "whole"]
    console.print(
        f"{len(whole)} whole ({size(sum(f.num_bytes for f in whole))}), {len(damaged)} damaged in {store.url}"
    )
    if damaged and not set_aside:
        console.print("Take it out of the way with: nanodag verify --set-aside; the next run builds it again.")
    raise typer.Exit(1 if damaged or records else 0)


def gc(
    keep_runs: Annotated[int, option("gc.keep_runs")] = 0,
    keep_days: Annotated[float, option("gc.keep_days")] = 0.0,
    keep_best: Annotated[list[str] | None, option("gc.keep_best")] = None,
    yes: Annotated[bool, option("gc.yes", "--yes", "-y")] = False,
    file: File = "",
) -> None:
    """Say what the store can do without; --yes removes it.

    An artifact stays while a run refers to it, or to something made from it. Without options every run stays, and
    only what no run refers to goes. With --keep-runs or --keep-days the records of other runs go too: a run stays
    when one of the two keeps it.

    \b
    nanodag gc --keep-runs 5 --keep-best eval_rl.sort --yes
    """
    from rich.table import Table

    from nanodag.cli.live_table import make_console
    from nanodag.run.record import served_store
    from nanodag.run.retention import best_of, free, plan

    console, store = make_console(), served_store(file)
    best = list(map(best_of, keep_best or []))
    removal = plan(store, keep_runs=keep_runs, keep_days=keep_days, keep_best=best)
    for note in removal.notes:
        console.print(note, style="yellow", soft_wrap=True)
    kept = f"{counted(removal.num_kept, 'artifact')}, {size(removal.kept_bytes)}"
    if not removal.items:
        console.print(f"Nothing can go: {kept}, all of use to a run.")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("what", "name", "size", "why"):
        table.add_column(title, justify="right" if title == "size" else "left", no_wrap=title != "why")
    for item in removal.items[:SHOWN]:
        table.add_row(item.what, item.name, size(item.num_bytes) if item.num_bytes else "", item.why)
    console.print(table)
    if len(removal.items) > SHOWN:
        console.print(f"and {len(removal.items) - SHOWN} more", style="dim")
    console.print(f"{size(removal.num_bytes)} can go, of {store.url}; left: {kept}")
    if not yes:
        console.print("Nothing was removed. Do it with --yes.")
        return
    freed, stayed = free(store, removal)
    for text in stayed:
        console.print(f"Stayed: {text}", style="yellow", soft_wrap=True)
    console.print(f"{size(freed)} freed.")


def lineage(key: Key, picture: Annotated[str, option("lineage.picture")] = "", file: File = "") -> None:
    """Show what an artifact was made from, up to the data.

    \b
    nanodag lineage RUN:sft --picture sft.svg
    """
    from nanodag.cli.lineage import show_lineage

    show_lineage(key, picture=picture, file=file)


def diff(
    run_a: ThisRun,
    run_b: Annotated[str, argument("diff.run_b")],
    show_all: Annotated[bool, option("diff.show_all", "--all")] = False,
    file: File = "",
) -> None:
    """Show two runs side by side: what is not the same.

    That is of config, data, code, metrics and cost.

    \b
    nanodag diff RUN OTHER
    """
    from nanodag.cli.lineage import show_diff

    show_diff(run_a, run_b, show_all=show_all, file=file)


def export(key: Key, folder: Annotated[str, argument("export.folder")], file: File = "") -> None:
    """Write a model, or a tokenizer, as a Hugging Face folder.

    It overwrites nothing.

    \b
    nanodag export RUN:rl my-model
    """
    from nanodag.cli.lineage import export_artifact

    export_artifact(key, folder, file=file)


def push(
    key: Key,
    name: Annotated[str, argument("push.name")],
    private: Annotated[bool, option("push.private", "--private")] = False,
    card: Annotated[bool, option("push.card", "--card")] = False,
    file: File = "",
) -> None:
    """Publish a model on the hub, with a card.

    The hub is Hugging Face's. The card has the run's scores of it, what it was made from, the data's identities, and
    how to use it.

    \b
    nanodag push RUN:rl me/my-model --card
    """
    from nanodag.cli.lineage import push_artifact

    push_artifact(key, name, private=private, card=card, file=file)


def reproduce(key: Key, file: File = "") -> None:
    """Run an artifact's stage again, and compare the bytes.

    It takes the recorded config, inputs and data. Exit code 0 when the bytes are the same, 1 when not. Nothing is
    published; what came out otherwise is left to look at.

    \b
    nanodag reproduce RUN:tokenizer
    """
    from nanodag.cli.lineage import reproduce_artifact

    raise typer.Exit(reproduce_artifact(key, file=file))
