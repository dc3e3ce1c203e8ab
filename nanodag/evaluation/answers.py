"""Functions that the YAML files of benchmarks/ name: how an answer is scored, how an item is put.

What scores one answer returns the form's metrics, the main one first, and maybe two more things. `parsed`: the answer
in the text, in a form in which equal answers are equal strings, empty where none could be parsed; without it the whole
text is the answer. `details`: a table for the item's record.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanodag.registry import load
from nanodag.rewards.gsm8k import gsm8k as gsm8k_reward
from nanodag.rewards.reward import plain_number

log = logging.getLogger(__name__)

Returned = dict[str, Any]

_NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?")


def problem(doc: Mapping[str, Any], results: Sequence[str]) -> Returned:
    """exact_match: 1.0 where the problem's own verifier, the one that RL trains on, gives full marks; else 0.0. parsed:
    what the verifier found, where it says so."""
    prompt = json.loads(doc["record"])
    verify = load("reward", prompt["reward"])
    try:
        judged = verify(prompt, results[0])
    except Exception as error:  # noqa: BLE001 - verifiers of other packages raise on text that is no answer to them
        log.warning("Counted as wrong, the verifier %s raised %r on %.80r", prompt["reward"], error, results[0])
        return {"exact_match": 0.0, "parsed": ""}
    found: Returned = {"exact_match": float(getattr(judged, "value", judged) >= 1.0)}
    parsed = getattr(judged, "parsed", None)
    return found if parsed is None else {**found, "parsed": parsed}


def gsm8k(doc: Mapping[str, Any], results: Sequence[str]) -> Returned:
    """exact_match: the number behind the one `####` is right; parsed is that number. flexible: the last number of the
    text is right."""
    wanted = plain_number(doc["answer"].rpartition("####")[2])
    numbers = _NUMBER.findall(results[0])
    strict = gsm8k_reward({"answer": doc["answer"]}, results[0])
    return {
        "exact_match": strict.value,
        "parsed": strict.parsed,
        "flexible": float(bool(numbers) and plain_number(numbers[-1]) == wanted),
    }


def winogrande_right(doc: Mapping[str, Any]) -> int:
    """The number of the right name; lm-eval takes an int here for "each choice is a context"."""
    return int(doc["answer"]) - 1


def winogrande_beginnings(doc: Mapping[str, Any]) -> list[str]:
    """The sentence up to the blank, filled with each name."""
    beginning, _, _ = doc["sentence"].partition("_")
    return [beginning + doc["option1"], beginning + doc["option2"]]


def winogrande_rest(doc: Mapping[str, Any]) -> str:
    """The sentence behind the blank."""
    return doc["sentence"].partition("_")[2].strip()
