"""Functions that the YAML files of benchmarks/ name: how an answer is scored, how an item is put."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanodag.registry import load
from nanodag.rewards.gsm8k import gsm8k as gsm8k_reward
from nanodag.rewards.reward import plain_number

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?")


def problem(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """exact_match: 1.0 where the problem's own verifier, the one that RL trains on, gives full marks; else 0.0."""
    prompt = json.loads(doc["record"])
    verify = load("reward", prompt["reward"])
    try:
        judged = verify(prompt, results[0])
    except Exception as error:  # noqa: BLE001 - verifiers of other packages raise on text that is no answer to them
        log.warning("Counted as wrong, the verifier %s raised %r on %.80r", prompt["reward"], error, results[0])
        return {"exact_match": 0.0}
    return {"exact_match": float(getattr(judged, "value", judged) >= 1.0)}


def gsm8k(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """exact_match: the number behind the one `####` is right. flexible: the last number of the text is."""
    wanted = plain_number(doc["answer"].rpartition("####")[2])
    numbers = _NUMBER.findall(results[0])
    return {
        "exact_match": gsm8k_reward({"answer": doc["answer"]}, results[0]).value,
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
