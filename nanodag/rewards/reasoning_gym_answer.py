"""reasoning-gym: the generator's own verifier."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.reward import Reward

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@entry("reward", "reasoning_gym", reads_metadata=("entry",))
def reasoning_gym_answer(prompt: Mapping[str, Any], completion: str, *, strict: bool = True) -> Reward:
    """The verifier's score of the completion, or of what its one `<answer>` tag holds.

    strict: only a full score counts, as 1. Several verifiers give partial credit that can be collected without solving
    anything: `spell_backward` pays 0.9999999999999998 for the right answer with more text behind it. The score itself
    is the component `verifier`. The prompt's `metadata.entry` is the generator's row.
    """
    entry = prompt["metadata"]["entry"]
    tagged = _TAGGED.findall(completion)
    answer = tagged[0].strip() if len(tagged) == 1 else completion.strip()
    verify = _verifier(entry["metadata"]["source_dataset"])
    try:
        score = float(verify(answer=answer, entry=entry))
    except Exception as error:  # some verifiers raise on text that they cannot parse: that is a wrong answer
        if isinstance(error, MemoryError):
            raise
        score = 0.0
    return Reward(float(score >= 1.0) if strict else score, {"verifier": score})


@cache
def _verifier(dataset: str) -> Any:
    from reasoning_gym import get_score_answer_fn  # in here: importing it takes two seconds

    return get_score_answer_fn(dataset)
