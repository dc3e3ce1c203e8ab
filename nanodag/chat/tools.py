"""Tools of a chat: a calculator, and Python in the sandbox. No torch here.

Both are those of RL (`nanodag.rl.environments`), in its words, so a policy that learnt to call them finds them here.
"""

import json
from collections.abc import Callable, Mapping

from nanodag.rewards.sandbox import why_no_walls
from nanodag.rl.environments.tools import TOOLS as DEFINITIONS
from nanodag.rl.environments.tools import calculated, printed

MAX_ROUNDS = 8  # of calls, for one answer
MAX_RESULT_CHARACTERS = 4000
PYTHON_S = 5.0
FAILED = "error"  # what the result of a call begins with when it came to nothing

TOOLS: Mapping[str, Callable[[str], str]] = {
    "calculator": calculated,
    "python": lambda program: printed(program, seconds=PYTHON_S, longest=MAX_RESULT_CHARACTERS),
}
"""Tools by their names in DEFINITIONS: from the text of a call to the result's."""
DEFAULT_TOOLS = ("calculator",)  # a call of nanodag's own format does not name its tool, so one may be offered there


def why_not(name: str) -> str:
    """Why a tool cannot be used on this machine; empty where it can."""
    return f"Python of a chat is off: {why}" if name == "python" and (why := why_no_walls()) else ""


def call(name: str, arguments: str) -> str:
    """The result of one call, at most MAX_RESULT_CHARACTERS long, for the model to read. A call that cannot be carried
    out has a result that begins with FAILED and says why.

    arguments: JSON, an object with one text. Its name is not looked at: models write `code` for `program`.
    """
    if name not in TOOLS:
        return f"{FAILED}: there is no tool {name[:40]!r}; there are {', '.join(TOOLS)}"
    if why := why_not(name):
        return f"{FAILED}: {why}"
    try:
        fields, fault = json.loads(arguments), f"its arguments are {arguments[:80]}"
    except (ValueError, RecursionError):
        fields, fault = None, "its arguments are no JSON"
    values = list(fields.values()) if isinstance(fields, dict) else []
    if len(values) != 1 or not isinstance(values[0], str):
        (parameter,) = DEFINITIONS[name]["function"]["parameters"]["required"]
        return f'{FAILED}: {fault}; a call has the form {{"{parameter}": "..."}}'
    result = TOOLS[name](values[0])
    left = len(result) - MAX_RESULT_CHARACTERS
    return result if left <= 0 else f"{result[:MAX_RESULT_CHARACTERS]}\n... and {left} characters more"
