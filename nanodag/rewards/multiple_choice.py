"""Multiple choice: one letter."""

import re
from collections.abc import Mapping
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.reward import Reward, right_or_wrong

_BARE = re.compile(r"[(\[*]*([A-Z])[)\]*.:]*")
_STATED = re.compile(r"\banswer(?:\s+is|\s*:|\s*=)\s*[(\[*]*([A-Z])\b(?!')", re.IGNORECASE)


@entry("reward", "multiple_choice")
def multiple_choice(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when the completion names the right letter and no other one as its answer.

    Counted as naming: the completion is one letter (`B`, `(B)`, `B.`), begins with one on a line or before its full
    stop (`B. Paris`), or says `answer is B`, `Answer: B`. Several different letters named are wrong: it would be
    guessing twice. The prompt's answer is the letter.
    """
    wanted = prompt["answer"].strip().upper()
    if not re.fullmatch("[A-Z]", wanted):
        raise ValueError(f"the prompt's answer {prompt['answer']!r:.80} is no letter")
    stated = {letter.upper() for letter in _STATED.findall(completion)}
    if not stated:
        stated = _leading_letters(completion.strip())
    return right_or_wrong(stated == {wanted}, next(iter(stated)) if len(stated) == 1 else "")


def _leading_letters(text: str) -> set[str]:
    """Letters that stand alone at the start of lines, or {} when the first line does not begin with one."""
    letters = set()
    for number, line in enumerate(text.splitlines()):
        words = line.split(maxsplit=1)
        match = _BARE.fullmatch(words[0]) if words else None
        is_choice = match is not None and (len(words) == 1 or words[0] != match.group(1))  # "A cat" is no choice
        if number == 0 and not is_choice:
            return set()
        if match is not None and is_choice:
            letters.add(match.group(1))
            rest = words[1] if len(words) > 1 else ""
            letters.update(_also_listed(rest))
    return letters


def _also_listed(rest: str) -> set[str]:
    """Further bare choices on the same line: the `B)` and `(C)` of `A) B) (C)`."""
    return {match.group(1) for word in rest.split() if len(word) > 1 and (match := _BARE.fullmatch(word.rstrip(",;")))}
