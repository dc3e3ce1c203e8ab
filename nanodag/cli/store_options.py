"""What the command line says of where things lie: every command takes `store.url=URL`, wherever it stands.

It is handed on as the environment variable that says the same, so whatever resolves a pipeline looks there. Commands
that are printed as a next step repeat it, with the pipeline file.
"""

import os
import re
import shlex
from collections.abc import Sequence

_SETTING = re.compile(r"store\.(url|local)=(.+)", re.DOTALL)
_VARIABLES = {"url": "NANODAG_STORE", "local": "NANODAG_STORE_LOCAL"}
# What else they are told goes on to the flow's process, so they keep it.
TAKE_OVERRIDES = (("run",), ("sweep",), ("config",), ("notify",), ("nightly", "run"), ("nightly", "on"))
_said: list[str] = []


def take(arguments: Sequence[str]) -> list[str]:
    """The arguments without what is handed on by the environment."""
    keeps = any(tuple(arguments[: len(command)]) == command for command in TAKE_OVERRIDES)
    left = []
    for number, text in enumerate(arguments):
        if match := _SETTING.fullmatch(text):
            os.environ[_VARIABLES[match[1]]] = match[2]
            _said.append(shlex.quote(text))
        elif text in ("--file", "-f"):
            _said.append(f"--file {' '.join(map(shlex.quote, arguments[number + 1 : number + 2]))}")
        elif text.startswith("--file="):
            _said.append(shlex.quote(text))
        if match is None or keeps:
            left.append(text)
    return left


def command(text: str) -> str:
    """A command as it has to be typed to mean the same store and pipeline file."""
    return " ".join(["nanodag", text, *_said])
