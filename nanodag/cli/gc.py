"""`nanodag verify` and `gc`: is everything what it was, and what can go."""

import shutil
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanodag.cli.live_table import make_console
from nanodag.config import resolve
from nanodag.errors import StoreBusy
from nanodag.errors.words import counted, size
from nanodag.run.record import pipeline_file, store_of
from nanodag.run.retention import Finding, RetentionPolicy, best_of, check, free, plan, targets
from nanodag.store import Store

COLOURS = {"whole": "green", "damaged": "red", "newer": "yellow", "unfinished": "dim"}
SHOWN = 40


def open_store(file: str) -> Store:
    """The store that the pipeline file names."""
    return store_of(resolve(pipeline_file(file)).pipeline)


def verify_store(names: Sequence[str], *, set_aside: bool, file: str) -> int:
    """Check what is named, print it, and return the exit code: 1 when something is damaged."""
    console, store = make_console(), open_store(file)
    wanted = list(dict.fromkeys(t for name in (names or [""]) for t in targets(store, name)))
    findings = []
    for number, (key, attempt) in enumerate(wanted):
        finding = check(store, key, attempt)
        findings.append(finding)
        if finding.state != "whole" or names:
            _print_finding(console, finding)
        elif console.is_terminal and number % 20 == 19:
            console.print(f"{number + 1} of {len(wanted)} read", style="dim")
    damaged = [f for f in findings if f.state == "damaged"]
    for finding in damaged if set_aside else []:
        _set_aside(console, store, finding)
    records = {} if names else store.unreadable_runs()
    for error in records.values():
        console.print(f"unreadable {error}", style="red", markup=False, soft_wrap=True)
    whole = [f for f in findings if f.state == "whole"]
    console.print(
        f"{len(whole)} whole ({size(sum(f.num_bytes for f in whole))}), {len(damaged)} damaged in {store.url}"
    )
    if damaged and not set_aside:
        console.print("Take it out of the way with: nanodag verify --set-aside; the next run builds it again.")
    return 1 if damaged or records else 0


def _print_finding(console: Console, finding: Finding) -> None:
    line = Text.assemble(
        (f"{finding.state:<10} ", COLOURS[finding.state]),
        f"{finding.key[:12]}/{finding.attempt}  {finding.stage:<12} ",
        (finding.text, "dim"),
    )
    console.print(line, soft_wrap=True)


def _set_aside(console: Console, store: Store, finding: Finding) -> None:
    if finding.attempt not in store.attempts(finding.key):
        return
    try:
        where = store.set_aside(finding.key, finding.attempt)
    except StoreBusy:
        console.print(f"{finding.key[:12]}/{finding.attempt} stays: somebody is building that key.", style="yellow")
        return
    shutil.rmtree(store.local / "cache" / finding.key / finding.attempt, ignore_errors=True)
    console.print(f"{finding.key[:12]}/{finding.attempt} is now {where}", soft_wrap=True)


def collect(*, keep_runs: int, keep_days: float, keep_best: Sequence[str], yes: bool, file: str) -> None:
    """Print what can go, and with `yes` let it go."""
    console, store = make_console(), open_store(file)
    policy = RetentionPolicy(keep_runs=keep_runs, keep_days=keep_days, best=tuple(best_of(text) for text in keep_best))
    removal = plan(store, policy)
    for note in removal.notes:
        console.print(note, style="yellow", soft_wrap=True)
    kept = f"{counted(removal.num_kept, 'artifact')}, {size(removal.kept_bytes)}"
    if not removal.items:
        console.print(f"Nothing can go: {kept}, all of use to a run.")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("what", "name", "size", "why"):
        table.add_column(title, justify="right" if title == "size" else "left", no_wrap=True)
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
