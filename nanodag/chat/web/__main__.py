"""`python -m nanodag.chat.web --model NAME=FOLDER ... [--open]`: the OpenAI API, and the chat page at `/`.

`nanodag serve` and `nanodag chat --web` start it. --open: show the page in a browser; the other options are those of
`python -m nanodag.api`.
"""

import os
import sys
import threading
import webbrowser

from nanodag.api.command import main as serve
from nanodag.chat.web.routes import routes

OPEN = "--open"


def main() -> int:
    arguments = sys.argv[1:]
    server_arguments = [argument for argument in arguments if argument != OPEN]
    return serve(server_arguments, extra_routes=routes, ready=show if OPEN in arguments else None)


def show(url: str) -> None:
    """Open the page where there is a screen. Without one, a browser would take the terminal."""
    has_screen = sys.platform == "darwin" or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if has_screen:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
