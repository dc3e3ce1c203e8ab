"""One other node of a stage: `python -m nanodag.worker.node`, started over there by what nanodag.worker.nodes reaches
it with.

The first line of stdin says what to run; the watchdog then runs it, and ends it when stdin ends.
"""

import json
import os
import sys
from pathlib import Path

from nanodag.host.ports import network_environment
from nanodag.worker.nodes import ADDRESS, NOT_SHARED_EXIT_CODE, address_towards


def main() -> int:
    message = json.loads(_first_line())
    up = Path(message["up"])
    if not up.parent.is_dir():
        return NOT_SHARED_EXIT_CODE
    os.environ.update(message["environment"])
    own = address_towards(message["address"])
    os.environ.update(network_environment(own))
    channel = os.dup(0)
    os.set_inheritable(channel, True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what runs here has nothing to read
    up.write_text(f"{message['token']} {own}")
    command = [part.replace(ADDRESS, own) for part in message["command"]]
    os.execv(
        sys.executable,
        [sys.executable, "-m", "nanodag.worker.watchdog", str(channel), message["usage"], "0", *command],
    )


def _first_line() -> bytes:
    """Up to the end of line and no further: what follows, the end of stdin, is for the watchdog."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            raise SystemExit("nanodag.worker.node: stdin ended before it said what to run")
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
