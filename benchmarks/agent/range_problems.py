"""`Range: 52 17 98 43 21` asks for the largest number less the smallest, 81. What the agent of `range_agent.py`
answers, and the conversations from which a model learns how its calls look."""

import hashlib
import random


def problems(*, size: int = 1000, seed: int = 0, held_out: bool = False) -> list[dict[str, str]]:
    """Prompts. No problem is both held out and not, whatever the seeds."""
    return [{"question": f"Range: {_said(n)}", "answer": str(max(n) - min(n))} for n in _lists(size, seed, held_out)]


def calls(*, size: int = 300, seed: int = 0) -> list[dict[str, list]]:
    """Conversations of the agent with a tool: the list is sorted already, by another conversation. They show how a call
    looks and no more: half of them subtract the wrong way round. Which way is right is left to RL."""
    rows, stream = [], random.Random(seed)
    for numbers in _lists(size, seed, False):
        first, second = stream.sample([min(numbers), max(numbers)], 2)
        parts = [
            {"type": "tool_call", "text": f"{first}-{second}"},
            {"type": "tool_result", "text": str(first - second)},
            {"type": "text", "text": str(first - second)},
        ]
        question = {"role": "user", "content": f"Range: {_said(sorted(numbers))}"}
        rows.append({"messages": [question, {"role": "assistant", "content": parts}]})
    return rows


def _lists(size: int, seed: int, held_out: bool) -> list[list[int]]:
    stream, found = random.Random(f"range:{seed}:{held_out}"), []
    while len(found) < size:
        numbers = [stream.randrange(10, 100) for _ in range(5)]
        if (hashlib.blake2b(_said(numbers).encode(), digest_size=1).digest()[0] < 51) == held_out:
            found.append(numbers)
    return found


def _said(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
