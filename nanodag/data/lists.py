"""Problems about short lists of numbers, for runs without a network: `python:nanodag.data.lists:sort?count=5&size=800`.

A problem belongs to `train` or `test` by a hash of its text, so the two never share one, whatever their seeds. Rows are
made when they are taken and depend on function, parameters, seed and index alone.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Literal

from nanodag.data.sources import LazyRows, Row

Split = Literal["train", "test"]

GENERATORS = ("sort", "reverse", "pick", "add")  # what a pipeline may name of this module
_TEST_SHARE = 0.2


def rows_of(size: int, split: Split, make: Callable[[int], Row]) -> LazyRows:
    """`size` rows, made by their index. Raises ValueError for a split that there is not, and for no rows."""
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r} is neither 'train' nor 'test'")
    if size < 1:
        raise ValueError(f"size {size} is below 1")
    return LazyRows(size, make)


def is_of_test(text: str) -> bool:
    """Whether a text belongs to the split `test`, by its hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64 < _TEST_SHARE


def _problems(
    name: str, make: Callable[[random.Random], tuple[str, str]], *, size: int, seed: int, split: Split
) -> LazyRows:
    """`size` problems of one split; row i is the first of its own random stream that falls into the split."""

    def row(index: int) -> Row:
        stream = random.Random(f"{name}:{seed}:{index}")
        for _ in range(10_000):
            question, answer = make(stream)
            if is_of_test(question) == (split == "test"):
                return {"question": question, "answer": answer}
        raise ValueError(f"{name} has no problem in the split {split} with these numbers; take larger ones")

    return rows_of(size, split, row)


def _numbers(stream: random.Random, count: int) -> list[int]:
    return [stream.randrange(10, 100) for _ in range(count)]


def _joined(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def sort(*, count: int = 5, size: int = 1000, seed: int = 0, split: Split = "train") -> LazyRows:
    """Two-digit numbers in ascending order."""

    def make(stream: random.Random) -> tuple[str, str]:
        numbers = _numbers(stream, count)
        return f"Sort: {_joined(numbers)}", _joined(sorted(numbers))

    return _problems(f"sort-{count}", make, size=size, seed=seed, split=split)


def reverse(*, longest: int = 6, size: int = 1000, seed: int = 0, split: Split = "train") -> LazyRows:
    """A list of 2 to `longest` two-digit numbers, backwards."""

    def make(stream: random.Random) -> tuple[str, str]:
        numbers = _numbers(stream, stream.randrange(2, longest + 1))
        return f"Reverse: {_joined(numbers)}", _joined(numbers[::-1])

    return _problems(f"reverse-{longest}", make, size=size, seed=seed, split=split)


def pick(*, longest: int = 6, size: int = 1000, seed: int = 0, split: Split = "train") -> LazyRows:
    """The first, second or last number of a list of 2 to `longest`."""

    def make(stream: random.Random) -> tuple[str, str]:
        numbers = _numbers(stream, stream.randrange(2, longest + 1))
        word, place = stream.choice([("First", 0), ("Second", 1), ("Last", -1)])
        return f"{word} of: {_joined(numbers)}", str(numbers[place])

    return _problems(f"pick-{longest}", make, size=size, seed=seed, split=split)


def add(*, largest: int = 9, size: int = 1000, seed: int = 0, split: Split = "train") -> LazyRows:
    """The sum of two numbers from 0 to `largest`."""

    def make(stream: random.Random) -> tuple[str, str]:
        a, b = stream.randrange(largest + 1), stream.randrange(largest + 1)
        return f"Add: {a} + {b}", str(a + b)

    return _problems(f"add-{largest}", make, size=size, seed=seed, split=split)
