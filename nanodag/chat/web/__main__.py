"""`python -m nanodag.chat.web --model NAME=FOLDER ... [--open]`: the OpenAI API, and the chat page at `/`.

`nanodag serve` and `nanodag chat --web` start it. The options are nanodag.api.command's.
"""

import json
import os
import sys
import threading
import webbrowser

from nanodag.api.command import parse_arguments, serve
from nanodag.chat.web.routes import routes


def main() -> int:
    args = parse_arguments()
    about = json.loads(args.about.read_bytes() or b"{}")
    return serve(args, lambda: routes(about, args.ratings), show if args.open else None)


def show(url: str) -> None:
    """Open the page where there is a screen, else say where it is: a browser would take the terminal."""
    has_screen = sys.platform == "darwin" or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if has_screen:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    else:
        print(f"Open {url} in a browser.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
