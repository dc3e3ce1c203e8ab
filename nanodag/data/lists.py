"""Problems about short lists of numbers, for runs without a network: `python:nanodag.data.lists:sort?count=5&size=800`.

A problem belongs to `train` or `test` by a hash of its text, so the two never share one, whatever their seeds. Rows are
made when they are taken and depend on function, parameters, seed and index alone.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

Split = Literal["train", "test"]
Row = dict[str, str]

GENERATORS = ("sort", "reverse", "pick", "add")  # what a pipeline may name of this module
_TEST_SHARE = 0.2


class Problems(Sequence[Row]):
    """`size` problems of one split; row i is the first of its own random stream that falls into the split."""

    def __init__(
        self, name: str, make: Callable[[random.Random], tuple[str, str]], *, size: int, seed: int, split: Split
    ) -> None:
        if split not in ("train", "test"):
            raise ValueError(f"split {split!r} is neither 'train' nor 'test'")
        if size < 1:
            raise ValueError(f"size {size} is below 1")
        self._name, self._make, self._size, self._seed, self._split = name, make, size, seed, split

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Row:  # type: ignore[override] # no slices
        if not 0 <= index < self._size:
            raise IndexError(index)
        for question, answer in self._draws(index):
            if (_share_of(question) < _TEST_SHARE) == (self._split == "test"):
                return {"question": question, "answer": answer}
        raise AssertionError("unreachable: the stream of draws has no end")

    def _draws(self, index: int) -> Iterator[tuple[str, str]]:
        stream = random.Random(f"{self._name}:{self._seed}:{index}")
        while True:
            yield self._make(stream)


def _share_of(question: str) -> float:
    return int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest(), "big") / 2**64


def _numbers(stream: random.Random, count: int) -> list[int]:
    return [stream.randrange(10, 100) for _ in range(count)]


def _joined(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def sort(*, count: int = 5, size: int = 1000, seed: int = 0, split: Split = "train") -> Problems:
    """Two-digit numbers in ascending order."""

    def make(stream: random.Random) -> tuple[str, str]:
        numbers = _numbers(stream, count)
        return f"Sort: {_joined(numbers)}", _joined(sorted(numbers))

    return Problems(f"sort-{count}", make, size=size, seed=seed, split=split)


def reverse(*, longest: int = 6, size: int = 1000, seed: int = 0, split: Split = "train") -> Problems:
    """A list of 2 to `longest` two-digit numbers, backwards."""

    def make(stream: random.Random) -> tuple[str, str]:
        numbers = _numbers(stream, stream.randrange(2, longest + 1))
        return f"Reverse: {_joined(numbers)}", _joined(numbers[::-1])

    return Problems(f"reverse-{longest}", make, size=size, seed=seed, split=split)


def pick(*, longest: int = 6, size: int = 1000, seed: int = 0, split: Split = "train") -> Problems:
    """The first, second or last number of a list of 2 to `longest`."""

    def make(stream: random.Random) -> tuple[str, str]:
        numbers = _numbers(stream, stream.randrange(2, longest + 1))
        word, place = stream.choice([("First", 0), ("Second", 1), ("Last", -1)])
        return f"{word} of: {_joined(numbers)}", str(numbers[place])

    return Problems(f"pick-{longest}", make, size=size, seed=seed, split=split)


def add(*, largest: int = 9, size: int = 1000, seed: int = 0, split: Split = "train") -> Problems:
    """The sum of two numbers from 0 to `largest`."""

    def make(stream: random.Random) -> tuple[str, str]:
        a, b = stream.randrange(largest + 1), stream.randrange(largest + 1)
        return f"Add: {a} + {b}", str(a + b)

    return Problems(f"add-{largest}", make, size=size, seed=seed, split=split)
