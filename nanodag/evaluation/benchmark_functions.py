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

log = logging.getLogger(__name__)

Returned = dict[str, Any]

# Filters and what does not count, of lm-eval's gsm8k.yaml.
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = re.compile(r"[,$]|.*#### ", re.DOTALL)


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
    """exact_match: the number behind the first `####` is right, as in lm-eval's strict-match; parsed is that number.
    flexible: the last number of the text is right, as in its flexible-extract. Numbers are compared as texts."""
    wanted, strict = _bare(doc["answer"]), _STRICT.search(results[0])
    numbers = _FLEXIBLE.findall(results[0])
    parsed = _bare(strict[1]) if strict else ""
    flexible = float(bool(numbers) and _bare(numbers[-1]) == wanted)
    return {"exact_match": float(parsed == wanted), "parsed": parsed, "flexible": flexible}


def gsm8k_answered(doc: Mapping[str, Any], results: Sequence[str]) -> Returned:
    """exact_match: as the reward that RL trains on, the number behind the one `####`, by its value. flexible: as
    above."""
    strict = gsm8k_reward({"answer": doc["answer"]}, results[0])
    return {**gsm8k(doc, results), "exact_match": strict.value, "parsed": strict.parsed}


def _bare(text: str) -> str:
    return _IGNORED.sub("", text).removesuffix(".")


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
