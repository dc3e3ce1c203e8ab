"""The live table of a run's stages and the line of a long command; plain lines where the output is no terminal."""

import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanodag.errors.words import duration
from nanodag.run.progress import StageProgress, progress_of
from nanodag.store import Store
from nanodag.store.run_record import RunRecord

STYLES = {
    **{"built": "green", "found": "cyan", "queued": "yellow", "starting": "yellow", "running": "yellow"},
    **{"failed": "red", "stopped": "magenta", "stale": "dark_orange"},
}
BAR_WIDTH = 12
LINE_EVERY_S = 30.0


def make_console() -> Console:
    """The terminal; into a pipe or a file lines are long rather than broken."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


class _LiveIfTerminal(ExitStack):
    """A context in which a terminal has something that changes; `_live` is None where the output is no terminal."""

    def __init__(self, console: Console, *, transient: bool) -> None:
        super().__init__()
        self._console = console
        live = Live(console=console, refresh_per_second=4, transient=transient)
        self._live = self.enter_context(live) if console.is_terminal else None


class LiveTable(_LiveIfTerminal):
    """Shows a run while it goes on. Use as a context; `show` as often as there is time."""

    def __init__(self, console: Console, store: Store) -> None:
        super().__init__(console, transient=False)
        self._store = store
        self._said: dict[str, tuple[str, float]] = {}
        self._state = ""

    def show(self, record: RunRecord | None, state: Mapping[str, str]) -> None:
        """Bring what is shown up to date. record: the run's, None before the flow has begun. state: Prefect's."""
        stages = progress_of(self._store, record) if record is not None else []
        if self._live is None:
            self._print_changes(stages, state)
        elif stages:
            lines = [Text(f"{stage.name} {stage.reason}", style="dim") for stage in stages if stage.state == "queued"]
            self._live.update(Group(stage_table(stages, self._console), *lines))
        else:
            waits = f"Waiting for the run's process, which loads its packages (Prefect: {state['name']})"
            self._live.update(Text(waits, style="dim"))

    def _print_changes(self, stages: list[StageProgress], state: Mapping[str, str]) -> None:
        if not stages and state["name"] != self._state:
            self._state = state["name"]
            self._console.print(f"flow run {self._state}")
        for stage in stages:
            last_state, at = self._said.get(stage.name, ("waiting", time.monotonic()))
            is_due = stage.state == "running" and time.monotonic() - at > LINE_EVERY_S
            if stage.state != last_state or is_due:
                self._said[stage.name] = (stage.state, time.monotonic())
                self._console.print(_line(stage), markup=False, highlight=False, soft_wrap=True)


def _line(stage: StageProgress) -> str:
    parts = [f"{stage.name:<14} {stage.state:<8}"]
    if stage.state == "running":
        parts.append(stage.amount)
    parts += [stage.reached, stage.reason if stage.state == "queued" else ""]
    if stage.left_s >= 0:
        parts.append(f"{duration(stage.left_s)} left")
    parts += [stage.speed, duration(stage.elapsed_s) if stage.state != "waiting" else "", stage.key[:12]]
    return "  ".join(p for p in parts if p)


def stage_table(stages: Sequence[StageProgress], console: Console) -> Table:
    """Stages with state, a bar, progress, loss, reward or score, speed, time left, time taken and key."""
    narrow = (["key"], [""], ["speed"], ["left"], ["reached"])
    numbers = ("progress", "speed", "left", "took")
    return fitting(console, list(map(_cells, stages)), numbers=numbers, narrow=narrow, may_list=False)


def fitting(
    console: Console,
    rows: Sequence[Mapping[str, RenderableType]],
    *,
    numbers: Collection[str] = (),
    narrow: Sequence[Collection[str]] = (),
    may_list: bool = True,
) -> Table:
    """A table no wider than the terminal. rows: a cell by its column's title, the first column first. numbers: columns
    that are aligned to the right. narrow: groups of columns that are left out, in this order, until no line has to be
    broken. may_list: where that is not enough each row is a list of all its cells, a line or more each."""
    options, widths = console.options.update(max_width=1000), dict[str, int]()
    for title in rows[0] if rows else ():
        cells = [title, *(row[title] for row in rows)]
        widths[title] = 2 + max(Measurement.get(console, options, cell).maximum for cell in cells)  # and the gap
    every = list(widths)
    for titles in narrow:
        if sum(widths.values()) - 2 <= console.width:
            break
        widths = {title: width for title, width in widths.items() if title not in titles}
    if may_list and sum(widths.values()) - 2 > console.width:
        table = Table.grid(padding=(0, 2))
        for _ in range(2):
            table.add_column(overflow="fold")
        for row in rows:
            for title in every:
                table.add_row(Text(title, "dim"), row[title])
            table.add_row()
        return table
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in widths:
        table.add_column(title, justify="right" if title in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[title] for title in widths))
    return table


def print_markdown(console: Console, text: str) -> None:
    """Print a page of nanodag.report.page.to_markdown, its tables no wider than the terminal."""
    from rich.markdown import Markdown  # with a parser, which other commands do without

    for is_table, lines in groupby(text.splitlines(), lambda line: line.startswith("|")):
        if not is_table:
            console.print(Markdown("\n".join(lines)))
            continue
        cut = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
        headers, rules, *rows = ([re.sub(r"\\(.)", r"\1", cell.strip()) for cell in cells] for cells in cut)
        numbers = [title for title, rule in zip(headers, rules, strict=True) if rule.endswith(":")]
        shown = [dict(zip(headers, map(Text, row), strict=True)) for row in rows]
        console.print(fitting(console, shown, numbers=numbers))


def _cells(stage: StageProgress) -> dict[str, RenderableType]:
    is_shown = stage.state not in ("waiting", "queued", "not run")
    bar = ProgressBar(total=1.0, completed=stage.done, width=BAR_WIDTH, complete_style="yellow", finished_style="green")
    return {
        "stage": stage.name,
        "state": Text(stage.state, style=STYLES.get(stage.state, "dim")),
        "": bar if is_shown else "",
        "progress": stage.amount,
        "reached": stage.reached,
        "speed": stage.speed,
        "left": duration(stage.left_s),
        "took": duration(stage.elapsed_s) if is_shown else "",
        "key": Text(stage.key[:12], style="dim"),
    }


class Shown(_LiveIfTerminal):
    """Progress of a long command: one line that changes, in a terminal; elsewhere a line now and then. Use as a
    context; call it with the line as often as there is time."""

    def __init__(self) -> None:
        super().__init__(make_console(), transient=True)
        self._said_at = time.monotonic()

    def __call__(self, text: str) -> None:
        if self._live is not None:
            self._live.update(Text(f"  {text}", style="dim", overflow="ellipsis", no_wrap=True))
        elif time.monotonic() - self._said_at > LINE_EVERY_S:
            self._said_at = time.monotonic()
            self.say(f"  {text}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
