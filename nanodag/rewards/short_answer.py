"""A few words, compared without a judge: BIG-Bench Hard, SimpleQA and the like."""

import re
from collections.abc import Mapping
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.multiple_choice import multiple_choice
from nanodag.rewards.reward import Reward, right_or_wrong

_STATING = re.compile(r"\b(?:the )?(?:final )?answer(?:\s+is|\s*:|\s*=)[ \t:]*", re.IGNORECASE)
_LETTER = re.compile(r"\(([A-Z])\)")
_ARTICLE = re.compile(r"^(?:an?|the) ")
MAX_ANSWER_CHARACTERS = 300


@entry("reward", "short_answer")
def short_answer(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when the completion's answer is the prompt's, word for word.

    The answer is the rest of the line behind `answer is` or `Answer:`, else the last line. Several that differ are
    wrong: it would be guessing twice. Case, commas, quotation marks, backslashes, asterisks, a first article and a last
    full stop do not count, as in lm-eval's bbh. A prompt whose answer is a letter in brackets is judged as
    `multiple_choice`. No judge reads it: another wording of the same fact is wrong, so SimpleQA's scores lie below
    those of its paper.
    """
    if letter := _LETTER.fullmatch(prompt["answer"].strip()):
        return multiple_choice({**prompt, "answer": letter.group(1)}, completion)
    wanted = _plain(prompt["answer"])
    if not wanted:
        raise ValueError(f"the prompt's answer {prompt['answer']!r:.80} has no words")
    stated = [text.partition("\n")[0] for text in _STATING.split(completion)[1:]]
    texts = stated or [completion.strip().rpartition("\n")[2]]
    given = {_plain(text) for text in texts if len(text) <= MAX_ANSWER_CHARACTERS}
    return right_or_wrong(given == {wanted}, given.pop() if len(given) == 1 else "")


def _plain(text: str) -> str:
    kept = " ".join(re.sub(r"[,\"“”\\*`]", "", text).casefold().split()).removesuffix(".").strip()
    return _ARTICLE.sub("", kept)
