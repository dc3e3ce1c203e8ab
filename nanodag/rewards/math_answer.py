"""Mathematics: the boxed answer, compared as an expression by math-verify."""

from collections.abc import Mapping
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.reward import Reward, right_or_wrong

MAX_ANSWER_CHARACTERS = 400


@entry("reward", "math")
def math_answer(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when the completion's answer equals the prompt's as a mathematical expression.

    The answer is what the one `\\boxed{}` holds. Several boxes that say different things are wrong, and so is a box
    that lists several values where one is asked for: both would be guessing twice. Without a box the last line counts,
    when it is short enough to be an answer. The prompt's answer may come with or without a box or dollar signs.
    """
    from math_verify import parse, verify  # in here: importing sympy takes half a second

    given = _answer_of(completion)
    if given is None:
        return right_or_wrong(False, "")
    gold = _parsed(parse, _answer_of(prompt["answer"]) or prompt["answer"])
    if not gold:
        raise ValueError(f"math-verify cannot read the prompt's answer {prompt['answer']!r:.80}")
    # Time limits of math-verify need the alarm signal; the pool's own limit covers all of this.
    found = _parsed(parse, given)
    # The text, not the expression: writing out what an expression comes to may take for ever.
    return right_or_wrong(verify(gold, found, timeout_seconds=None), "".join(given.split()) if found else "")


@entry("reward", "boxed_math")
def boxed_math(prompt: Mapping[str, Any], completion: str) -> Reward:
    """As `math`, and 0 without a `\\boxed{}`: for prompts that ask for one. slime's `--rm-type math` needs one too."""
    return math_answer(prompt, completion) if _boxes(completion) else right_or_wrong(False, "")


def _parsed(parse: Any, answer: str) -> Any:
    bare = answer.strip().strip("$").strip()
    return parse(f"${bare}$", parsing_timeout=None)


def _answer_of(text: str) -> str | None:
    boxes = {box.strip() for box in _boxes(text)}
    if len(boxes) > 1:
        return None
    if boxes:
        return boxes.pop()[:MAX_ANSWER_CHARACTERS] or None
    last_line = text.strip().rpartition("\n")[2].strip()
    return last_line if 0 < len(last_line) <= MAX_ANSWER_CHARACTERS else None


def _boxes(text: str) -> list[str]:
    """What each `\\boxed{...}` holds, braces balanced; an unclosed one is left out."""
    contents = []
    for piece in text.split("\\boxed{")[1:]:
        depth = 1
        for position, character in enumerate(piece):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                contents.append(piece[:position])
                break
    return contents
