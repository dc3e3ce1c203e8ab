"""What lies in boxes, the tasks about them, and conversations from which a model learns how calls look."""

import random
from collections.abc import Iterator
from typing import Any

BOXES = 1000
EMPTY, NONE = "empty", "none"


def content(box: int) -> str:
    """Three numbers; nothing in half of the boxes."""
    draw = random.Random(box)
    return EMPTY if draw.random() < 0.5 else " ".join(map(str, draw.sample(range(10, 100), 3)))


def tasks(*, size: int, seed: int, held_out: bool) -> Iterator[tuple[int, int]]:
    """Pairs of boxes of which one is empty. No pair is both held out and not, whatever the seeds."""
    draw, found = random.Random(f"{seed}:{held_out}"), 0
    while found < size:
        pair = draw.randrange(BOXES), draw.randrange(BOXES)
        if (sum(pair) % 5 == 0) == held_out and sum(content(box) == EMPTY for box in pair) == 1:
            found += 1
            yield pair


def question(pair: tuple[int, int]) -> str:
    """The prompt of a task."""
    return f"Find: {pair[0]} {pair[1]}"


def answer(pair: tuple[int, int]) -> str:
    """What lies in the box that is not empty."""
    return next(content(box) for box in pair if content(box) != EMPTY)


def calls(*, size: int = 400, seed: int = 1, goes_on: float = 0.3) -> list[dict[str, Any]]:
    """Conversations in nanodag's chat format: one of the boxes is opened, and what lies there is told. Where it is
    empty, the other one is opened in this share of the conversations; else `none` is told."""
    draw, rows = random.Random(seed), []
    for pair in tasks(size=size, seed=seed, held_out=False):
        first, second = draw.sample(pair, 2)
        opened = [first, second] if content(first) == EMPTY and draw.random() < goes_on else [first]
        parts = []
        for box in opened:
            parts += [{"type": "tool_call", "text": str(box)}, {"type": "tool_result", "text": content(box)}]
        told = content(opened[-1])
        parts.append({"type": "text", "text": NONE if told == EMPTY else told})
        rows.append(
            {"messages": [{"role": "user", "content": question(pair)}, {"role": "assistant", "content": parts}]}
        )
    return rows
