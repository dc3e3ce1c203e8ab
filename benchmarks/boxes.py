"""An environment of the `verifiers` package: what lies in two boxes, opened with a tool, is to be told in order.

    Merge: 864 395      the task; box 864 holds two numbers, box 395 three
    open_box("864")     49 12
    open_box("395")     71 57 53
    12 49 53 57 71      the answer

`python -m benchmarks.verifiers_learns` trains on it. It needs verifiers 0.4.0, and nothing of nanodag.
"""

import random
from collections.abc import Iterable

import verifiers.v1 as vf

LARGEST = 1000
HOLDS = {0: 2, 1: 3}  # how many numbers lie in an even box, and in an odd one


def content(box: int) -> list[int]:
    """What lies in a box."""
    return random.Random(box).sample(range(10, 100), HOLDS[box % 2])


class BoxTools(vf.Toolset[vf.SharedToolsetConfig]):
    """One tool, for all rollouts: a box holds the same for everybody."""

    TOOL_PREFIX = None

    @vf.tool
    async def open_box(self, number: str) -> str:
        """What lies in a box."""
        if not number.strip().isascii() or not number.strip().isdecimal() or len(number) > 9:
            return "no such box"
        return " ".join(map(str, content(int(number))))


class BoxData(vf.TaskData):
    """answer: all numbers in order."""

    answer: str


class BoxTask(vf.Task[BoxData]):
    """One pair of boxes."""

    @vf.reward(weight=1.0)
    async def in_order(self, trace: vf.Trace) -> float:
        """1 for all numbers in order."""
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def opened(self, trace: vf.Trace) -> float:
        """Boxes that were opened."""
        return float(sum(message.role == "tool" for message in trace.branches[-1].messages))


class BoxConfig(vf.TasksetConfig):
    """size: tasks. seed: of the draw."""

    size: int = 1000
    seed: int = 0


class BoxTaskset(vf.Taskset[BoxTask, BoxConfig]):
    """Pairs of an even box and an odd one."""

    def load(self) -> Iterable[BoxTask]:
        """As verifiers calls it."""
        draw = random.Random(self.config.seed)
        for _ in range(self.config.size):
            even, odd = 2 * draw.randrange(LARGEST // 2), 2 * draw.randrange(LARGEST // 2) + 1
            answer = " ".join(map(str, sorted([*content(even), *content(odd)])))
            yield BoxTask(BoxData(prompt=f"Merge: {even} {odd}", answer=answer), self.config.task)

    @classmethod
    def toolsets(cls, config: BoxConfig) -> list[vf.Toolset]:
        """As verifiers calls it."""
        return [BoxTools(vf.SharedToolsetConfig())]


__all__ = ["BoxTaskset"]

if __name__ == "__main__":  # verifiers runs a tool server so
    BoxTools.run()
