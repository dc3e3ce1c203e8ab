"""Prefect's server with a UI that talks to it alone: `python -m flows.server start ...`, as `prefect server start`.

The V2 UI of Prefect 3.8.8 loads its configuration of Amplitude, with the browser's address, whatever the server's
analytics setting says. It does so for one key; in the copy that this server serves (PREFECT_UI_STATIC_DIRECTORY) that
key is empty, for which the UI leaves analytics out altogether.
"""

import runpy
import sys
from pathlib import Path

from prefect.server.api import server

AMPLITUDE_KEY = "c97dd2acbf306ab7bf54aca0aeb7ffa1"


def without_key(folder: Path) -> int:
    """Empty the key in every script below a folder; how often it was there."""
    found = 0
    for path in folder.rglob("*.js"):
        text = path.read_text(encoding="utf-8")
        if AMPLITUDE_KEY in text:
            found += text.count(AMPLITUDE_KEY)
            path.write_text(text.replace(AMPLITUDE_KEY, ""), encoding="utf-8")
    return found


def main() -> None:
    copy = server.copy_directory

    def copied(directory: str, path: str) -> None:
        copy(directory, path)
        without_key(Path(path))

    server.copy_directory = copied
    sys.argv[:1] = ["prefect", "server"]
    runpy.run_module("prefect", run_name="__main__")


if __name__ == "__main__":
    main()
