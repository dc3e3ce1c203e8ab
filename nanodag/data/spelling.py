"""Problems about the letters of words, as nanochat's SpellingBee: `python:nanodag.data.spelling:count?size=4000`.

A tokenizer hides the letters of a word. The answer spells the word first, then counts, so a model can learn both. A
word belongs to `train` or `test` by a hash of itself, so no word of the test was spelled in training. Rows are made
when they are taken and depend on function, parameters, seed and index alone.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from nanodag.data.lists import Split, is_of_test, rows_of
from nanodag.data.sources import LazyRows, Row

GENERATORS = ("count", "spell")  # what a pipeline may name of this module

# English words of everyday life, 3 to 13 letters, many with a letter twice.
WORDS = tuple(Path(__file__).with_name("everyday_words.txt").read_text(encoding="utf-8").split())
_COUNT = (
    "How many times does the letter {letter} occur in {word}?",
    "How many {letter} are in the word {word}?",
    "Count the letter {letter} in {word}.",
    "In the word {word}, how often does {letter} appear?",
    "What is the number of letters {letter} in {word}?",
    "Tell me how many times {word} contains {letter}",
    "{word}: how many letters {letter}?",
    "Please count every {letter} in the word {word}.",
)
_SPELL = ("Spell {word}.", "Spell the word {word}", "How is {word} spelled?", "Write {word} letter by letter.")
_QUOTES = ("", "", "'", '"')


def _questions(
    name: str, ask: Callable[[random.Random, str], tuple[str, str]], *, reward: str, size: int, seed: int, split: Split
) -> LazyRows:
    """`size` questions about the words of one split. reward: who judges the answer."""
    words = [word for word in WORDS if is_of_test(word) == (split == "test")]

    def row(index: int) -> Row:
        stream = random.Random(f"{name}:{seed}:{index}")
        question, answer = ask(stream, stream.choice(words))
        return {"question": question, "answer": answer, "reward": reward}

    return rows_of(size, split, row)


def count(*, size: int = 1000, seed: int = 0, split: Split = "train") -> LazyRows:
    """How often a letter stands in a word; the answer spells, counts and ends in `#### number`, for reward gsm8k."""

    def ask(stream: random.Random, word: str) -> tuple[str, str]:
        # Three of four times a letter that is in the word.
        letter = stream.choice(word if stream.random() < 0.75 else "abcdefghijklmnopqrstuvwxyz")
        seen, lines = 0, []
        for number, character in enumerate(word, start=1):
            seen += character == letter
            lines.append(f"{number}. {character}" + (f" - that makes {seen}" if character == letter else ""))
        times = {0: "not at all", 1: "once", 2: "twice"}.get(seen, f"{seen} times")
        steps = [f"{word} is spelled {_spelled(word)}. I look for {letter}:", *lines, f"{letter} occurs {times}."]
        return _asked(stream, _COUNT, word=word, letter=letter), "\n".join([*steps, f"#### {seen}"])

    return _questions("count", ask, reward="gsm8k", size=size, seed=seed, split=split)


def spell(*, size: int = 1000, seed: int = 0, split: Split = "train") -> LazyRows:
    """A word, letter by letter."""

    def ask(stream: random.Random, word: str) -> tuple[str, str]:
        return _asked(stream, _SPELL, word=word), _spelled(word)

    return _questions("spell", ask, reward="exact", size=size, seed=seed, split=split)


def _spelled(word: str) -> str:
    return ", ".join(word)


def _asked(stream: random.Random, templates: Sequence[str], **parts: str) -> str:
    """A question, its word and letter quoted or not, now and then all in small letters."""
    quote = stream.choice(_QUOTES)
    question = stream.choice(templates).format(**{name: f"{quote}{part}{quote}" for name, part in parts.items()})
    return question.lower() if stream.random() < 0.2 else question
