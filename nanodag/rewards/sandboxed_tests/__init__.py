"""Run a program against its tests, each in a sandbox of its own; two pipes connect them.

The tests' side holds what is wanted. The program's side applies what it is asked to and answers with values. So a
program that ends early, returns what equals everything or writes a verdict gains nothing. Plain values (wire.py) go by
value. Anything else stays where it was made, and the other side holds a stand-in: `ProgramObject` for an object of the
program, `Callback` for a function of the tests.

A stand-in never meets a wanted value: compared or computed with anything but another stand-in it is unequal, or a
TypeError. Lists, dicts and sets that a call changed are changed on the tests' side too.

The modules of both sides are passed as text, so they import the standard library and one another only.
"""

import ast
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from nanodag.rewards.sandbox import run_beside

MAX_ERROR_CHARACTERS = 500
_BEGIN = """
import sys, types
for name, text in {modules!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules[name].main()
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """num_passed: assertions that hold, of num_checks that were reached, at least one. error: of the first failure,
    empty without one."""

    num_passed: int
    num_checks: int
    error: str

    @property
    def share(self) -> float:
        """Share of the assertions that hold."""
        return self.num_passed / self.num_checks

    @property
    def passed(self) -> bool:
        """True when every test passed."""
        return self.num_passed == self.num_checks


def run_tests(program: str, tests: Sequence[str], *, before: str, entry_point: str, timeout_s: float) -> Verdict:
    """Run a program's tests: Python text with assertions, loops, helpers, classes and exceptions.

    Functions called `check` are called with the function entry_point. Names that the tests use and do not make are the
    program's. before: what stands in front of the program and is part of it; the tests have helpers of it too, their
    own copies. timeout_s: for all tests together. Raises ValueError for tests that are no Python, or that cannot be
    judged: without an entry_point for `candidate`, or giving the program an object of a class of theirs.
    """
    if not entry_point and any(map(_names_candidate, tests)):
        raise ValueError("a test calls `candidate`, and the prompt has no metadata.entry_point")
    if not program:
        return Verdict(0, 1, "the answer has no program")
    if timeout_s <= 0:
        return Verdict(0, 1, "TimeoutError: no time was left")
    job = {"program": program, "tests": list(tests), "before": before, "entry_point": entry_point}
    done = run_beside(
        _source("tests_side"),
        _source("program_side"),
        stdin=lambda channel: json.dumps({**job, "channel": channel}),
        timeout_s=timeout_s,
    )
    if done.timed_out:
        return Verdict(0, 1, f"TimeoutError: the tests took more than {timeout_s:.1f} seconds")
    try:
        verdict = json.loads(done.stdout)
    except ValueError:  # the tests themselves met a limit of the sandbox
        return Verdict(0, 1, (done.stderr.strip().splitlines() or ["the tests were ended"])[-1][:MAX_ERROR_CHARACTERS])
    if verdict["broken"]:
        raise ValueError(f"the tests of {entry_point or 'the prompt'} cannot be judged: {verdict['broken']}")
    checks = verdict["checks"] or [True]  # all assertions stand inside `try`
    return Verdict(sum(checks), len(checks), "" if all(checks) else verdict["error"])


def _names_candidate(test: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes
            nodes = list(ast.walk(ast.parse(test)))
    except SyntaxError as error:
        raise ValueError(f"the test {test!r:.80} is no Python: {error}") from error
    return any(isinstance(node, ast.Name) and node.id == "candidate" for node in nodes)


@cache
def _source(side: Literal["program_side", "tests_side"]) -> str:
    texts = {name: Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in ("wire", side)}
    return _BEGIN.format(modules={f"{__name__}.{name}": text for name, text in texts.items()})
