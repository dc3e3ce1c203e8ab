"""Benchmarks whose answer is a program: HumanEval, MBPP and their plus-tests. Programs run in the sandbox.

`exact_match` is 1.0 where every test passes: pass@1 of one answer. The record's `details` have the program, the verdict
and the first failure. An answer to an item whose tests cannot be judged is wrong, and the log says so.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from nanodag.evaluation.items import problems
from nanodag.rewards import sandbox
from nanodag.rewards.code import judge
from nanodag.rewards.programs import is_python, program_of
from nanodag.rewards.tested import Verdict

log = logging.getLogger(__name__)


def programs(**options: Any) -> Any:
    """As items.problems. Raises MissingTool where there is no sandbox: here, and not after all answers were written."""
    sandbox.walls()
    return problems(**options)


def signature(doc: Mapping[str, Any]) -> str:
    """What stands before the answer, which a base model goes on with."""
    return str(json.loads(doc["record"])["metadata"]["before"])


def continued(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """A base model's text goes on where the prompt ends and is taken as it is, as lm-eval does."""
    prompt = json.loads(doc["record"])
    program = prompt["metadata"].get("before", "") + results[0]
    return _judged(prompt, program if is_python(program) else "")


def answered(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """A chat model's program is found in its answer, as the reward `code` does."""
    prompt = json.loads(doc["record"])
    metadata = prompt["metadata"]
    before, entry_point = metadata.get("before", ""), metadata.get("entry_point", "")
    return _judged(prompt, program_of(results[0], before=before, entry_point=entry_point))


def _judged(prompt: Mapping[str, Any], program: str) -> dict[str, Any]:
    try:
        verdict = judge(prompt, program)
    except ValueError as error:
        log.warning("Counted as wrong: %s", error)
        verdict = Verdict(0, 1, str(error))
    said = {"program": program, "verdict": "passed" if verdict.passed else "failed", "error": verdict.error}
    return {"exact_match": float(verdict.passed), "parsed": program, "details": said}
