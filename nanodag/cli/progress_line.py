"""How far a long command is: one line that changes, in a terminal; elsewhere a line now and then."""

import time
from types import TracebackType

from rich.live import Live
from rich.text import Text

from nanodag.cli.live_table import LINE_EVERY_S, make_console


class Shown:
    """Use as a context; call it with the line as often as there is time."""

    def __init__(self) -> None:
        self._console = make_console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._said_at = time.monotonic()

    def __enter__(self) -> "Shown":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def __call__(self, text: str) -> None:
        """Show how far it is."""
        if self._console.is_terminal:
            self._live.update(Text(f"  {text}", style="dim", overflow="ellipsis", no_wrap=True))
        elif time.monotonic() - self._said_at > LINE_EVERY_S:
            self._said_at = time.monotonic()
            self.say(f"  {text}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
