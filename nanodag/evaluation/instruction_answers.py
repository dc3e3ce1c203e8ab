"""IFEval's two ways of scoring: an answer as it is, and the best of eight variants of it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanodag.rewards.instruction_following import instruction_following


def followed(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """exact_match: every instruction is followed, strictly. loose: each is, by the answer or a variant of it.

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
        {**prompt, "metadata": {"instruction_id_list": [name], "kwargs": [given]}}
        for name, given in zip(names, arguments, strict=True)
    ]
    variants = _variants(results[0])
    is_loose = all(any(instruction_following(one, text).value for text in variants) for one in each)
    scores = {"exact_match": strict.value, "loose": float(is_loose), "instructions": strict.components["instructions"]}
    return {**scores, "parsed": results[0]}


def _variants(answer: str) -> list[str]:
    lines = answer.split("\n")
    cut = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(text.replace("*", "") for text in cut)]
