"""The live table of a run's stages; plain lines where the output is no terminal."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanodag.progress import StageProgress, duration, progress_of
from nanodag.store import Store

STYLES = {
    "built": "green",
    "found": "cyan",
    "running": "yellow",
    "failed": "red",
    "stopped": "magenta",
    "stale": "dark_orange",
}
LINE_EVERY_S = 30.0


def make_console() -> Console:
    """The terminal; into a pipe or a file lines are long rather than broken."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


class Watch:
    """Shows a run while it goes on. Use as a context; `show` as often as there is time."""

    def __init__(self, console: Console, store: Store) -> None:
        self._console = console
        self._store = store
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._said: dict[str, tuple[str, float]] = {}
        self._state = ""

    def __enter__(self) -> "Watch":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, record: Mapping[str, Any], state: Mapping[str, str]) -> None:
        """Bring what is shown up to date. record: the run's, empty before the flow has begun. state: Prefect's."""
        stages = progress_of(self._store, record) if record else []
        if self._live is None:
            self._print_changes(stages, state)
        elif stages:
            self._live.update(table_of(stages))
        else:
            self._live.update(Text(f"{state['name']}: waiting for the flow's process", style="dim"))

    def _print_changes(self, stages: list[StageProgress], state: Mapping[str, str]) -> None:
        if not stages and state["name"] != self._state:
            self._state = state["name"]
            self._console.print(f"flow run {self._state}")
        for stage in stages:
            said, at = self._said.get(stage.name, ("waiting", time.monotonic()))
            is_due = stage.state == "running" and time.monotonic() - at > LINE_EVERY_S
            if stage.state != said or is_due:
                self._said[stage.name] = (stage.state, time.monotonic())
                self._console.print(_line(stage), markup=False, highlight=False, soft_wrap=True)


def _line(stage: StageProgress) -> str:
    parts = [f"{stage.name:<14} {stage.state:<8}"]
    if stage.state == "running" and stage.total:
        parts.append(f"{stage.step}/{stage.total}")
    if stage.left_s >= 0:
        parts.append(f"{duration(stage.left_s)} left")
    parts += [stage.speed, duration(stage.elapsed_s) if stage.state != "waiting" else "", stage.key[:12]]
    return "  ".join(p for p in parts if p)


def table_of(stages: list[StageProgress]) -> Table:
    """Stages with state, progress, speed, time left, time taken and key."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title, justify in (
        ("stage", "left"),
        ("state", "left"),
        ("progress", "left"),
        ("", "right"),
        ("speed", "right"),
        ("left", "right"),
        ("took", "right"),
        ("key", "left"),
    ):
        table.add_column(title, justify=justify, no_wrap=True)
    for stage in stages:
        is_shown = stage.state not in ("waiting", "not run")
        table.add_row(
            stage.name,
            Text(stage.state, style=STYLES.get(stage.state, "dim")),
            ProgressBar(total=1.0, completed=stage.done, width=24, complete_style="yellow", finished_style="green")
            if is_shown
            else "",
            f"{stage.step}/{stage.total}" if stage.total and stage.state == "running" else "",
            stage.speed,
            duration(stage.left_s),
            duration(stage.elapsed_s),
            Text(stage.key[:12], style="dim"),
        )
    return table
