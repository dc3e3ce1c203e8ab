"""An environment of the `verifiers` package: one of two boxes is empty, and what lies in the other is to be told.

    Find: 864 395       the task
    open_box("864")     empty
    open_box("395")     71 57 53
    71 57 53            the answer

`python -m benchmarks.verifiers_learns` trains on it. It needs verifiers 0.4.0, and nothing of nanodag.
"""

from collections.abc import Iterable

import box_numbers
import verifiers.v1 as vf


class BoxTools(vf.Toolset[vf.SharedToolsetConfig]):
    """One tool, for all rollouts: a box holds the same for everybody."""

    TOOL_PREFIX = None

    @vf.tool
    async def open_box(self, number: str) -> str:
        """What lies in a box."""
        if not number.isascii() or not number.isdecimal() or len(number) > 9:
            return "no such box"
        return box_numbers.content(int(number))


class BoxData(vf.TaskData):
    """answer: what lies in the box that is not empty."""

    answer: str


class BoxTask(vf.Task[BoxData]):
    """One pair of boxes."""

    @vf.reward
    async def told(self, trace: vf.Trace) -> float:
        """1 for the right numbers."""
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def opened(self, trace: vf.Trace) -> float:
        """Boxes that were opened."""
        return float(sum(message.role == "tool" for message in trace.branches[-1].messages))


class BoxConfig(vf.TasksetConfig):
    """size: tasks. seed: of the draw. held_out: those that are never trained on."""

    size: int = 1000
    seed: int = 0
    held_out: bool = False


class BoxTaskset(vf.Taskset[BoxTask, BoxConfig]):
    """Pairs of boxes."""

    def load(self) -> Iterable[BoxTask]:
        """As verifiers calls it."""
        config = self.config
        for pair in box_numbers.tasks(size=config.size, seed=config.seed, held_out=config.held_out):
            data = BoxData(prompt=box_numbers.question(pair), answer=box_numbers.answer(pair))
            yield BoxTask(data, config.task)

    @classmethod
    def toolsets(cls, config: BoxConfig) -> list[vf.Toolset]:
        """As verifiers calls it."""
        return [BoxTools(vf.SharedToolsetConfig())]


__all__ = ["BoxTaskset"]

if __name__ == "__main__":  # verifiers runs a tool server so
    BoxTools.run()
