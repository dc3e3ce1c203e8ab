"""Tools of a chat: a calculator, and Python in the sandbox. No torch here.

Both are those of RL (`nanodag.rl.environments`), so a policy that learnt to call them finds the same ones here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanodag.rewards.sandbox import why_no_walls
from nanodag.rl.environments.tools import calculated, printed, text_tool

MAX_ROUNDS = 8  # of calls, for one answer
MAX_RESULT_CHARACTERS = 4000
PYTHON_S = 5.0
FAILED = "error"  # what the result of a call begins with when it came to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTool:
    """One tool. parameter: the name of its only argument, a text. run: from that text to the result's."""

    name: str
    description: str
    parameter: str
    meaning: str
    run: Callable[[str], str]
    needs_walls: bool = False

    def definition(self) -> dict[str, Any]:
        """As `tools` of a request to the OpenAI API has it."""
        return text_tool(self.name, self.description, self.parameter, self.meaning)

    def why_not(self) -> str:
        """Why it cannot be used on this machine; empty where it can."""
        return f"Python of a chat is off: {why}" if self.needs_walls and (why := why_no_walls()) else ""


TOOLS = {
    tool.name: tool
    for tool in (
        ChatTool(
            name="calculator",
            description="The exact value of an arithmetic expression of numbers, + - * / // % ** and brackets.",
            parameter="expression",
            meaning="such as 12*(3+4)",
            run=calculated,
        ),
        ChatTool(
            name="python",
            description=f"Runs a Python program for at most {PYTHON_S:g} seconds, with the standard library and "
            "without a network, and returns what it printed.",
            parameter="program",
            meaning="a whole program, which prints its result",
            run=lambda program: printed(program, seconds=PYTHON_S, longest=MAX_RESULT_CHARACTERS),
            needs_walls=True,
        ),
    )
}


DEFAULT_TOOLS = ("calculator",)  # a call of nanodag's own format does not name its tool, so one may be offered there


def call(name: str, arguments: str) -> str:
    """The result of one call, at most MAX_RESULT_CHARACTERS long, for the model to read. A call that cannot be carried
    out has a result that begins with FAILED and says why.

    arguments: JSON, an object with one text. Its name is not looked at: models write `code` for `program`.
    """
    tool = TOOLS.get(name)
    if tool is None:
        return f"{FAILED}: there is no tool {name[:40]!r}; there are {', '.join(TOOLS)}"
    if why := tool.why_not():
        return f"{FAILED}: {why}"
    try:
        fields, fault = json.loads(arguments), f"its arguments are {arguments[:80]}"
    except (ValueError, RecursionError):
        fields, fault = None, "its arguments are no JSON"
    values = list(fields.values()) if isinstance(fields, dict) else []
    if len(values) != 1 or not isinstance(values[0], str):
        return f'{FAILED}: {fault}; a call has the form {{"{tool.parameter}": "..."}}'
    result = tool.run(values[0])
    left = len(result) - MAX_RESULT_CHARACTERS
    return result if left <= 0 else f"{result[:MAX_RESULT_CHARACTERS]}\n... and {left} characters more"
