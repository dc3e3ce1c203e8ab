"""Code: the program passes the prompt's tests, run in a sandbox."""

import time
from collections.abc import Mapping
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.programs import program_of
from nanodag.rewards.reward import Reward
from nanodag.rewards.sandbox import run_python
from nanodag.rewards.tested import Verdict, run_tests

BUDGET_S = 6.0  # for all tests of a sample, below the default of reward_timeout_s: a program that hangs is wrong


@entry("reward", "code", needs_sandbox=True, least_timeout_s=7.0, reads_metadata=("tests",))
def code(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when every test passes; the component `tests` is the share of the assertions that hold.

    The program is what the completion gives (nanodag.rewards.programs). The prompt's `metadata.tests` is a list, of
    `{"input": text, "output": text}` for programs that read and print (blanks at the ends of lines aside), or of Python
    text with assertions of any form. `metadata.entry_point` names the function that `check(candidate)` tests.
    `metadata.before` is what stands before the answer, as in HumanEval. Tests run apart from the program
    (nanodag.rewards.inside): it gets the calls and never what is wanted, and a verdict of its own means nothing. All
    tests together have BUDGET_S seconds. Raises ValueError for a prompt without tests, or with some that cannot be
    judged.
    """
    metadata = prompt["metadata"]
    program = program_of(completion, before=metadata.get("before", ""), entry_point=metadata.get("entry_point", ""))
    verdict = judge(prompt, program)
    return Reward(float(verdict.passed), {"tests": verdict.share}, parsed=program)


def judge(prompt: Mapping[str, Any], program: str) -> Verdict:
    """What becomes of a program, empty for none, in the prompt's tests. Raises ValueError as `code` does."""
    metadata = prompt["metadata"]
    tests = metadata.get("tests")
    if not tests:
        raise ValueError("the prompt has no metadata.tests, a list of {input, output} or of assertions")
    deadline = time.monotonic() + BUDGET_S
    asserted = [test for test in tests if isinstance(test, str)]
    verdicts = [_prints(program, test, deadline) for test in tests if not isinstance(test, str)]
    if asserted:
        verdicts.append(
            run_tests(
                program,
                asserted,
                before=metadata.get("before", ""),
                entry_point=metadata.get("entry_point", ""),
                timeout_s=deadline - time.monotonic(),
            )
        )
    return Verdict(
        num_passed=sum(verdict.num_passed for verdict in verdicts),
        num_checks=sum(verdict.num_checks for verdict in verdicts),
        error=next((verdict.error for verdict in verdicts if verdict.error), ""),
    )


def _prints(program: str, test: Mapping[str, str], deadline: float) -> Verdict:
    """Whether a program that gets the input prints the output."""
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
