"""F1: the words that answer and completion share."""

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.reward import Reward

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@entry("reward", "f1")
def f1(prompt: Mapping[str, Any], completion: str) -> Reward:
    """2PR / (P + R) over words, each counted as often as it stands in both: a long or repeating completion loses
    precision. Case, punctuation and English articles do not count. The component `exact` is 1 when the words are the
    same in the same order. With a list `metadata.answers` the best of them counts. A completion without words gets 0.

    Source: SQuAD, arXiv:1606.05250, section 6.1.
    """
    answers = prompt["metadata"].get("answers") or [prompt["answer"]]
    given = _words(completion)
    scores = [_score(given, _words(answer)) for answer in answers]
    is_exact = any(given == _words(answer) for answer in answers) and bool(given)
    return Reward(max(scores), {"exact": float(is_exact)})


def _score(given: list[str], wanted: list[str]) -> float:
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
