"""`python -m nanodag.chat FOLDER [--message TEXT] [--tools NAME ...]`: talk to a checkpoint in the terminal."""

import argparse
import os
import sys
from pathlib import Path

from nanodag.chat.terminal_chat import chat
from nanodag.chat.tools import DEFAULT_TOOLS, TOOLS
from nanodag.errors import NanodagError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m nanodag.chat", description="Talk to a checkpoint in the terminal.")
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    parser.add_argument("--message", metavar="TEXT", help="the only one; - for the whole of standard input")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    tools = f"what the model may call: {', '.join(TOOLS)}"
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=DEFAULT_TOOLS, metavar="NAME", help=tools)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token every time")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="the longest answer")
    device = "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"
    parser.add_argument("--device", default=device, help=f"cpu or cuda; here {device}")
    try:
        return chat(parser.parse_args())
    except NanodagError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
