"""Code: the program in an answer passes the prompt's tests, run in a sandbox.

An answer's program is a function or a whole program, fenced or not, with prose around it or none.
"""

import ast
import re
import time
import warnings
from collections.abc import Mapping
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.reward import Reward
from nanodag.rewards.sandbox import run_python
from nanodag.rewards.sandboxed_tests import Verdict, run_tests

BUDGET_S = 6.0  # for all tests of a sample, below the default of reward_timeout_s: a program that hangs is wrong
_FENCED = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.I
)
_BEGINS = re.compile(r"(?:async[ \t]+def|def|class|import|from)\b|@")
MAX_CUTS = 400  # lines that may stand behind a program without a fence


@entry("reward", "code", needs_sandbox=True, least_timeout_s=7.0, reads_metadata=("tests",))
def code(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when every test passes; the component `tests` is the share of the assertions that hold.

    The program is what the completion gives (`program_of`). docs/how-to/reward.md has the forms of `metadata.tests`,
    and what `entry_point` and `before` are; blanks at the ends of lines that a program prints do not count. All tests
    together have BUDGET_S seconds. Raises ValueError for a prompt without tests, or with some that cannot be judged.
    """
    program = program_of(completion, **_context(prompt))
    verdict = judge(prompt, program)
    return Reward(float(verdict.passed), {"tests": verdict.share}, parsed=program)


def _context(prompt: Mapping[str, Any]) -> dict[str, str]:
    """The prefix of an answer to a prompt, and the function that its tests call."""
    return {name: prompt["metadata"].get(name, "") for name in ("before", "entry_point")}


def judge(prompt: Mapping[str, Any], program: str) -> Verdict:
    """Test a program, empty for none, by the prompt's tests. Raises ValueError as `code` does."""
    tests = prompt["metadata"].get("tests")
    if not tests:
        raise ValueError("the prompt has no metadata.tests, a list of {input, output} or of assertions")
    deadline = time.monotonic() + BUDGET_S
    asserted = [test for test in tests if isinstance(test, str)]
    verdicts = [_prints(program, test, deadline) for test in tests if not isinstance(test, str)]
    if asserted:
        timeout_s = deadline - time.monotonic()
        verdicts.append(run_tests(program, asserted, **_context(prompt), timeout_s=timeout_s))
    return Verdict(
        num_passed=sum(verdict.num_passed for verdict in verdicts),
        num_checks=sum(verdict.num_checks for verdict in verdicts),
        error=next((verdict.error for verdict in verdicts if verdict.error), ""),
    )


def _prints(program: str, test: Mapping[str, str], deadline: float) -> Verdict:
    """Run a program on the input, and compare what it prints with the output."""
    left_s = deadline - time.monotonic()
    if not program or left_s <= 0:
        return Verdict(0, 1, "TimeoutError: no time was left" if program else "the answer has no program")
    done = run_python(program, stdin=test["input"], timeout_s=left_s)
    if done.timed_out:
        return Verdict(0, 1, f"TimeoutError: the tests took more than {BUDGET_S:.0f} seconds")
    if done.returncode:
        return Verdict(0, 1, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:500])
    if _lines(done.stdout) != _lines(test["output"]):
        return Verdict(0, 1, f"for the input {test['input']!r:.100} it printed {done.stdout!r:.200}")
    return Verdict(1, 1, "")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def program_of(answer: str, *, before: str = "", entry_point: str = "") -> str:
    """The program that an answer gives; empty where there is none that is Python.

    Of several fenced blocks it is the last that makes entry_point, else the last. A block that is not closed, as in an
    answer that was cut off, goes to the end. Without a fence the answer is taken whole, else from its first line of
    code to the last one with which it is Python. before: what stands in front of it, as in HumanEval. An answer that
    makes entry_point itself goes below it, any other one goes on where it ends.
    """
    blocks = _FENCED.findall(answer)
    if blocks:
        making = [block for block in blocks if _makes(block, entry_point)]
        return _joined(before, (making or blocks)[-1], entry_point)
    return _joined(before, answer, entry_point) or _joined(before, _code_in_prose(answer), entry_point)


def is_python(text: str) -> bool:
    """True when a text is a program, and not an empty one."""
    tree = _tree(text)
    return tree is not None and bool(tree.body)


def _joined(before: str, text: str, entry_point: str) -> str:
    """One program, empty where it is not Python. An empty text is no program."""
    joined = f"{before}\n{text}" if before and _makes(text, entry_point) else before + text
    return joined if text.strip() and is_python(joined) else ""


def _makes(text: str, name: str) -> bool:
    """True when a program makes a function, class or variable of that name."""
    tree = _tree(text) if name else None
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return True
    return False


def _code_in_prose(answer: str) -> str:
    lines = answer.splitlines(keepends=True)
    start = next((number for number, line in enumerate(lines) if _BEGINS.match(line)), None)
    if start is None:
        return ""
    for end in range(len(lines), max(start, len(lines) - MAX_CUTS), -1):
        # A program does not end in a line of prose, and most ends are found without parsing.
        if lines[end - 1].strip() and _tree(text := "".join(lines[start:end])):
            return text
    return ""


def _tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes
            compile(text, "<answer>", "exec", dont_inherit=True)  # finds a `return` outside of a function, too
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # ValueError: a null byte
        return None
