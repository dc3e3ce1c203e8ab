"""`python -m nanodag.chat FOLDER [--message TEXT]`: talk to a checkpoint in the terminal."""

import argparse
import sys
from pathlib import Path

from nanodag.chat.terminal_chat import chat
from nanodag.errors import NanodagError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m nanodag.chat", description="Talk to a checkpoint in the terminal.")
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    parser.add_argument("--message", metavar="TEXT", help="the only one; - for the whole of standard input")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="the longest answer")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    try:
        return chat(parser.parse_args())
    except NanodagError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
