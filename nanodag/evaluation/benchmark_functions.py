"""Functions that the YAML files of benchmarks/ name: how an answer is scored, how an item is put.

What scores one answer returns the form's metrics, the main one first, and maybe two more things. `parsed`: the answer
in the text, in a form in which equal answers are equal strings, empty where none could be parsed; without it the whole
text is the answer. `details`: a table for the item's record.

HumanEval, MBPP and their plus-tests have programs as answers, which run in the sandbox. `exact_match` is 1.0 where
every test passes: pass@1 of one answer. The record's `details` have the program, the verdict and the first failure. An
answer to an item whose tests cannot be judged is wrong, and the log says so.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanodag.data.adapter_entries import gpqa_choice
from nanodag.evaluation.items import problems
from nanodag.registry import load
from nanodag.rewards import sandbox
from nanodag.rewards.code import is_python, judge, program_of
from nanodag.rewards.instruction_following import instruction_following
from nanodag.rewards.sandboxed_tests import Verdict
from nanodag.rewards.text_rewards import gsm8k as gsm8k_reward

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

Returned = dict[str, Any]

# Filters and what does not count, of lm-eval's gsm8k.yaml.
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = re.compile(r"[,$]|.*#### ", re.DOTALL)


def problem(doc: Mapping[str, Any], results: Sequence[str]) -> Returned:
    """exact_match: 1.0 where the problem's own verifier, RL's, gives full marks, else 0.0. parsed: what it says."""
    prompt = json.loads(doc["record"])
    verify = load("reward", prompt["reward"])
    try:
        judged = verify(prompt, results[0])
    except Exception as error:  # noqa: BLE001 - verifiers of other packages raise on text that is no answer to them
        log.warning("Counted as wrong, the verifier %s raised %r on %.80r", prompt["reward"], error, results[0])
        return {"exact_match": 0.0, "parsed": ""}
    scores: Returned = {"exact_match": float(getattr(judged, "value", judged) >= 1.0)}
    parsed = getattr(judged, "parsed", None)
    return scores if parsed is None else {**scores, "parsed": parsed}


def gsm8k(doc: Mapping[str, Any], results: Sequence[str]) -> Returned:
    """exact_match: the number behind the first `####` is right, as in lm-eval's strict-match; parsed is that number.
    flexible: the last number of the text is right, as in its flexible-extract. Numbers are compared as texts."""
    expected, strict = _bare(doc["answer"]), _STRICT.search(results[0])
    numbers = _FLEXIBLE.findall(results[0])
    parsed = _bare(strict[1]) if strict else ""
    flexible = float(bool(numbers) and _bare(numbers[-1]) == expected)
    return {"exact_match": float(parsed == expected), "parsed": parsed, "flexible": flexible}


def gsm8k_answered(doc: Mapping[str, Any], results: Sequence[str]) -> Returned:
    """exact_match: as RL's reward, the number behind the one `####`, by its value. flexible: as above."""
    strict = gsm8k_reward({"answer": doc["answer"]}, results[0])
    return {**gsm8k(doc, results), "exact_match": strict.value, "parsed": strict.parsed}


def _bare(text: str) -> str:
    return _IGNORED.sub("", text).removesuffix(".")


def gpqa_choices(rows: "Dataset") -> "Dataset":
    """GPQA's rows with choice1 to choice4 in a fixed order (lm-eval draws one), and `answer`, a letter in brackets."""

    def chosen(row: dict[str, Any]) -> dict[str, Any]:
        _, choices, right, _ = gpqa_choice(row)
        return {**{f"choice{n}": choice for n, choice in enumerate(choices, start=1)}, "answer": f"({'ABCD'[right]})"}

    return rows.map(chosen)


def programs(**options: Any) -> Any:
    """As items.problems. Raises MissingTool where there is no sandbox: here, and not after all answers were written."""
    sandbox.walls()
    return problems(**options)


def program_signature(doc: Mapping[str, Any]) -> str:
    """The prefix that a base model completes."""
    return str(json.loads(doc["record"])["metadata"]["before"])


def program_continued(doc: Mapping[str, Any], results: Sequence[str]) -> Returned:
    """A base model's text goes on where the prompt ends and is taken as it is, as lm-eval does."""
    prompt = json.loads(doc["record"])
    program = prompt["metadata"].get("before", "") + results[0]
    return _program_score(prompt, program if is_python(program) else "")


def program_answered(doc: Mapping[str, Any], results: Sequence[str]) -> Returned:
    """A chat model's program is found in its answer, as the reward `code` does."""
    prompt = json.loads(doc["record"])
    metadata = prompt["metadata"]
    before, entry_point = metadata.get("before", ""), metadata.get("entry_point", "")
    return _program_score(prompt, program_of(results[0], before=before, entry_point=entry_point))


def _program_score(prompt: Mapping[str, Any], program: str) -> Returned:
    try:
        verdict = judge(prompt, program)
    except ValueError as error:
        log.warning("Counted as wrong: %s", error)
        verdict = Verdict(0, 1, str(error))
    details = {"program": program, "verdict": "passed" if verdict.passed else "failed", "error": verdict.error}
    return {"exact_match": float(verdict.passed), "parsed": program, "details": details}


def instructions_followed(doc: Mapping[str, Any], results: Sequence[str]) -> Returned:
    """exact_match: every instruction is followed, strictly. loose: each is, by the answer or one of eight variants.

    instructions: the share that is strictly followed. Its mean is over prompts; lm-eval's inst_level is over
    instructions. An item with an instruction that no rule here can check is wrong, and unparsed.

    Source: IFEval, arXiv:2311.07911, section 2.2: variants without asterisks, first line or last line.
    """
    prompt = json.loads(doc["record"])
    try:
        strict = instruction_following(prompt, results[0])
    except ValueError:
        return {"exact_match": 0.0, "loose": 0.0, "instructions": 0.0, "parsed": ""}
    names, arguments = prompt["metadata"]["instruction_id_list"], prompt["metadata"]["kwargs"]
    each = [
        {**prompt, "metadata": {"instruction_id_list": [name], "kwargs": [kwargs]}}
        for name, kwargs in zip(names, arguments, strict=True)
    ]
    lines = results[0].split("\n")
    cut = [results[0], *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    variants = [*cut, *(text.replace("*", "") for text in cut)]
    is_loose = all(any(instruction_following(instruction, text).value for text in variants) for instruction in each)
    scores = {"exact_match": strict.value, "loose": float(is_loose), "instructions": strict.components["instructions"]}
    return {**scores, "parsed": results[0]}
