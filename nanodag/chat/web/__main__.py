"""`python -m nanodag.chat.web --model NAME=FOLDER ... [--open]`: the OpenAI API, and the chat page at `/`.

`nanodag serve` and `nanodag chat --web` start it. --open: show the page in a browser; --about: JSON, facts of models by
their names; --ratings: how the paths of files of ratings begin. The others are nanodag.api.command's.
"""

import argparse
import json
import os
import sys
import threading
import webbrowser
from functools import partial
from pathlib import Path

from nanodag.api.command import main as serve
from nanodag.chat.web.routes import routes


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--about", type=json.loads, default={})
    parser.add_argument("--ratings", type=Path)
    own, server_arguments = parser.parse_known_args()
    return serve(server_arguments, partial(routes, own.about, own.ratings), show if own.open else None)


def show(url: str) -> None:
    """Open the page where there is a screen. Without one, a browser would take the terminal."""
    has_screen = sys.platform == "darwin" or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if has_screen:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
