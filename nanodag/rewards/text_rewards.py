"""Rewards of a text by itself: its answer is found and compared, without a program or a model.

Each looks for the answer in one way: all of the text, after `####`, a letter, a few words, a box, a tag.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.reward import Reward, plain_number, right_or_wrong

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BARE = re.compile(r"[(\[*]*([A-Z])[)\]*.:]*")
_STATED = re.compile(r"\banswer(?:\s+is|\s*:|\s*=)\s*[(\[*]*(?!(?-i:a) (?!because)\w)([A-Z])\b(?!')", re.IGNORECASE)
_STATING = re.compile(r"\b(?:the )?(?:final )?answer(?:\s+is|\s*:|\s*=)[ \t:]*", re.IGNORECASE)
_BRACKETED = re.compile(r"\(([A-Z])\)")
_ARTICLE = re.compile(r"^(?:an?|the) ")
MAX_WORDS_CHARACTERS = 300
MAX_ANSWER_CHARACTERS = 400
# What sympy may write out for ever, without blanks and braces: towers of numbers, long exponents, big binomials.
_ENDLESS = re.compile(r"\d\^([4-9]|\d\d+)\^\d|\d\^\d\^\d[\d^]|\^-?\d{6}|\d\)\^\d{3}|binom\d{9}|\d{6}!|!\)*!")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
REPORTED = "reported"  # of a prompt's record, as a reward gets it: {"value": 0.5, "components": {...}} or None


@entry("reward", "exact")
def exact(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when completion and answer are the same text, blanks at both ends aside. An empty answer is never matched."""
    answer = prompt["answer"].strip()
    return right_or_wrong(answer != "" and completion.strip() == answer)


@entry("reward", "gsm8k")
def gsm8k(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when the completion has exactly one `#### number` and the number equals the answer's, by value.

    `#### 1,234`, `#### $1234.00` and `#### 1234.` are the same answer. The number is all that stands in the rest of
    that line; text on later lines is ignored. A completion with a second `####` is wrong: it would be a way
    to guess twice. The prompt's answer may be the number alone or a worked solution that ends in `#### number`.
    """
    expected = plain_number(prompt["answer"].rpartition("####")[2])
    if expected is None:
        raise ValueError(f"the prompt's answer {prompt['answer']!r:.80} has no number")
    _, *candidates = completion.split("####")
    number = plain_number(candidates[0].strip(" \t").partition("\n")[0]) if len(candidates) == 1 else None
    return right_or_wrong(number == expected, "" if number is None else str(number))


@entry("reward", "f1")
def f1(prompt: Mapping[str, Any], completion: str) -> Reward:
    """2PR / (P + R) over words, each counted as often as it stands in both: a long or repeating completion loses
    precision. Case, punctuation and English articles do not count. The component `exact` is 1 when the words are the
    same in the same order. With a list `metadata.answers` the best of them counts. A completion without words gets 0.

    Source: SQuAD, arXiv:1606.05250, section 6.1.
    """
    answers = prompt["metadata"].get("answers") or [prompt["answer"]]
    response = _words(completion)
    references = [_words(answer) for answer in answers]
    shared = [sum((Counter(response) & Counter(words)).values()) for words in references]
    scores = [2 * n / (len(response) + len(words)) if n else 0.0 for n, words in zip(shared, references, strict=True)]
    return Reward(max(scores), {"exact": float(bool(response) and response in references)})


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


@entry("reward", "multiple_choice")
def multiple_choice(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when the completion names the right letter and no other one as its answer.

    Counted as naming: the completion is one letter (`B`, `(B)`, `B.`), begins with one on a line or before its full
    stop (`B. Paris`), or says `answer is B`, `Answer: B`. Several different letters named are wrong: it would be
    guessing twice. The prompt's answer is the letter.
    """
    expected = prompt["answer"].strip().upper()
    if not re.fullmatch("[A-Z]", expected):
        raise ValueError(f"the prompt's answer {prompt['answer']!r:.80} is no letter")
    stated = {letter.upper() for letter in _STATED.findall(completion)}
    if not stated:
        stated = _leading_letters(completion.strip())
    return right_or_wrong(stated == {expected}, next(iter(stated)) if len(stated) == 1 else "")


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
            # Further bare choices on the same line: the `B)` and `(C)` of `A) B) (C)`.
            further = [_BARE.fullmatch(word.rstrip(",;")) for word in line.split()[1:] if len(word) > 1]
            letters.update(also.group(1) for also in further if also is not None)
    return letters


@entry("reward", "short_answer")
def short_answer(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when the completion's answer is the prompt's, word for word.

    The answer is the rest of the line behind `answer is` or `Answer:`, else the last line. Several that differ are
    wrong: it would be guessing twice. Case, commas, quotation marks, backslashes, asterisks, a first article and a last
    full stop do not count, as in lm-eval's bbh. A prompt whose answer is a letter in brackets is judged as
    `multiple_choice`. No judge reads it: another wording of the same fact is wrong, so SimpleQA's scores lie below
    those of its paper.
    """
    if letter := _BRACKETED.fullmatch(prompt["answer"].strip()):
        return multiple_choice({**prompt, "answer": letter.group(1)}, completion)
    expected = _plain(prompt["answer"])
    if not expected:
        raise ValueError(f"the prompt's answer {prompt['answer']!r:.80} has no words")
    stated = [text.partition("\n")[0] for text in _STATING.split(completion)[1:]]
    texts = stated or [completion.strip().rpartition("\n")[2]]
    answers = {_plain(text) for text in texts if len(text) <= MAX_WORDS_CHARACTERS}
    return right_or_wrong(answers == {expected}, answers.pop() if len(answers) == 1 else "")


def _plain(text: str) -> str:
    kept = " ".join(re.sub(r"[,\"“”\\*`]", "", text).casefold().split()).removesuffix(".").strip()
    return _ARTICLE.sub("", kept)


@entry("reward", "math")
def math_answer(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when the completion's answer equals the prompt's as a mathematical expression.

    The answer is what the one `\\boxed{}` holds. Several boxes that say different things are wrong, and so is a box
    that lists several values where one is asked for: both would be guessing twice. Without a box the last line counts,
    when it is short enough to be an answer. The prompt's answer may come with or without a box or dollar signs.
    """
    from math_verify import parse, verify  # in here: importing sympy takes half a second

    answer = _answer_of(completion)
    asked = _answer_of(prompt["answer"]) or prompt["answer"]
    bare, wanted = (re.sub(r"[\s{}$]", "", text or "") for text in (answer, asked))
    if answer is None or (_ENDLESS.search(bare) and bare != wanted):
        return right_or_wrong(False, "")
    gold = _parsed(parse, asked)
    if not gold:
        raise ValueError(f"math-verify cannot read the prompt's answer {prompt['answer']!r:.80}")
    # Time limits of math-verify need the alarm signal; the pool's own limit covers all of this.
    expression = _parsed(parse, answer)
    # The text, not the expression: writing out what an expression comes to may take for ever.
    return right_or_wrong(verify(gold, expression, timeout_seconds=None), "".join(answer.split()) if expression else "")


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
    """Contents of each `\\boxed{...}`, braces balanced; an unclosed one is left out."""
    contents = []
    for piece in text.split("\\boxed{")[1:]:
        depth = 1
        for position, character in enumerate(piece):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                contents.append(piece[:position])
                break
    return contents


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


@entry("reward", "reported", is_of_generate=True)
def reported(prompt: Mapping[str, Any], completion: str) -> Reward:
    """The reward that the `generate` function reported of the sample. A sample of which nothing was reported fails."""
    report = prompt.get(REPORTED)
    if report is None:
        raise ValueError("reported none")
    return Reward(float(report["value"]), {name: float(value) for name, value in report["components"].items()})
