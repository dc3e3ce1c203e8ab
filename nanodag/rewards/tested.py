"""Whether a program passes its tests: both run in the sandbox, apart (nanodag.rewards.inside)."""

import ast
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from nanodag.rewards.inside import source
from nanodag.rewards.sandbox import run_beside

MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Verdict:
    """num_passed: assertions that hold, of num_checks that were reached, at least one. error: of the first failure,
    empty without one."""

    num_passed: int
    num_checks: int
    error: str

    @property
    def share(self) -> float:
        """Of the assertions, those that hold."""
        return self.num_passed / self.num_checks

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return self.num_passed == self.num_checks


def run_tests(program: str, tests: Sequence[str], *, before: str, entry_point: str, timeout_s: float) -> Verdict:
    """What becomes of a program's tests: Python text with assertions, loops, helpers, classes and exceptions.

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
        source("tests_side"),
        source("program_side"),
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
