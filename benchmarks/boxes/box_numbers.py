"""What lies in boxes, the tasks about them, and conversations from which a model learns how calls look."""

import random
from collections.abc import Iterator
from typing import Any

BOXES = 500  # even ones, and as many odd ones
HOLDS = {0: 2, 1: 3}  # how many numbers lie in an even box, and in an odd one


def content(box: int) -> list[int]:
    """What lies in a box."""
    return random.Random(box).sample(range(10, 100), HOLDS[box % 2])


def said(numbers: list[int]) -> str:
    """As text."""
    return " ".join(map(str, numbers))


def tasks(*, size: int, seed: int, held_out: bool) -> Iterator[tuple[int, int]]:
    """Pairs of an even box and an odd one. No pair is both held out and not, whatever the seeds."""
    draw, found = random.Random(f"{seed}:{held_out}"), 0
    while found < size:
        even, odd = draw.randrange(BOXES), draw.randrange(BOXES)
        if ((even + odd) % 5 == 0) == held_out:
            found += 1
            yield 2 * even, 2 * odd + 1


def question(even: int, odd: int) -> str:
    """The prompt of a task."""
    return f"Merge: {even} {odd}"


def answer(even: int, odd: int) -> str:
    """What is right: all numbers in order."""
    return said(sorted([*content(even), *content(odd)]))


def calls(*, size: int = 400, seed: int = 1) -> list[dict[str, Any]]:
    """Conversations in nanodag's chat format: both boxes are opened, then the numbers are told."""
    rows = []
    for even, odd in tasks(size=size, seed=seed, held_out=False):
        parts = []
        for box in (even, odd):
            parts += [
                {"type": "tool_call", "text": str(box)},
                {"type": "tool_result", "text": said(content(box))},
            ]
        parts.append({"type": "text", "text": answer(even, odd)})
        user = {"role": "user", "content": question(even, odd)}
        rows.append({"messages": [user, {"role": "assistant", "content": parts}]})
    return rows
