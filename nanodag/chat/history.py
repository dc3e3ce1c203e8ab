"""Lines typed at a terminal: edited, and kept from one chat to the next, as far as Python has readline."""

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType

from nanodag.host.folders import state_folder

MAX_LINES = 1000
# An editor must know which characters have no width.
BLUE, PLAIN = "\x01\x1b[1;34m\x02", "\x01\x1b[0m\x02"


def typed_lines(who: str) -> Iterator[str]:
    """Lines as they are typed, each asked for with a name, until the end of input or Ctrl-C."""
    editor = _editor()
    prompt = f"{who}    " if editor is None or "NO_COLOR" in os.environ else f"{BLUE}{who}{PLAIN}    "
    with _kept(editor):
        while True:
            try:
                yield input(prompt)
            except (EOFError, KeyboardInterrupt):
                print()
                return


def _editor() -> ModuleType | None:
    try:
        import readline
    except ImportError:
        return None
    return readline


@contextlib.contextmanager
def _kept(editor: ModuleType | None) -> Iterator[None]:
    """The lines of earlier chats are there, and those of this one will be. A folder that cannot be written to keeps
    none."""
    if editor is None:
        yield
        return
    path = state_folder() / "chat-history"
    with contextlib.suppress(OSError):
        editor.read_history_file(path)
    editor.set_history_length(MAX_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            editor.write_history_file(path)
