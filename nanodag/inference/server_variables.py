"""Environment variables of a server's process: who started it, and the token that requests must bear.

SGLang's environment loads this file too: standard library only.
"""

import os

from nanodag.children.tree import end_with_parent

PARENT_VARIABLE = "NANODAG_SERVER_PARENT"
TOKEN_VARIABLE = "NANODAG_SAMPLER_TOKEN"  # a command line is seen by every user of the machine


def server_environment(token: str) -> dict[str, str]:
    """For a server that this process starts. token: "" for none."""
    return {PARENT_VARIABLE: str(os.getpid()), TOKEN_VARIABLE: token}


def end_with_starter() -> None:
    """Have this process end with the one that started it as a server, if one did; what it starts in turn, and calls
    this as well, ends with it."""
    if parent := os.environ.get(PARENT_VARIABLE):
        end_with_parent(int(parent))
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def take_token() -> str:
    """The token, "" for none. What this process starts does not find it."""
    return os.environ.pop(TOKEN_VARIABLE, "")
