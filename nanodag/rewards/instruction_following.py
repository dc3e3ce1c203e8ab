"""Following instructions that a program can check: the rules of IFEval."""

from collections.abc import Mapping
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.ifeval_rules import RULES
from nanodag.rewards.reward import Reward


@entry("reward", "instruction_following", reads_metadata=("instruction_id_list", "kwargs"))
def instruction_following(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when every instruction of the prompt is followed; the component `instructions` is the share that is.

    The prompt's `metadata` has `instruction_id_list` and `kwargs`, one entry an instruction, as in the dataset. An
    empty completion follows nothing: it would satisfy "no commas" and "fewer than 50 words". Strict: the completion is
    taken as it is. Raises ValueError for an instruction that is not known. Differs from the benchmark's program where
    that calls a library: sentences are split at . ! ? followed by a blank, `language:response_language` is refused, and
    the case rules look at case only, not at whether the text is English. Source: IFEval, arXiv:2311.07911.
    """
    names, arguments = prompt["metadata"]["instruction_id_list"], prompt["metadata"]["kwargs"]
    if not names or len(names) != len(arguments):
        raise ValueError(f"the prompt has {len(names)} instructions and arguments for {len(arguments)}")
    if unknown := [name for name in names if name not in RULES]:
        raise ValueError(f"there is no rule for the instruction {unknown[0]!r}; known are {', '.join(sorted(RULES))}")
    followed = [
        bool(completion.strip()) and RULES[name](completion, **{k: v for k, v in given.items() if v is not None})
        for name, given in zip(names, arguments, strict=True)
    ]
    return Reward(float(all(followed)), {"instructions": sum(followed) / len(followed)})
