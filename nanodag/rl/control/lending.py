"""Memory of a device that trainer and samplers have in turns (`placement: shared`). No torch here.

    samplers' turn    weights, cache                                  trainer: states and weights in host memory
    to_trainer        samplers release weights and cache, then the trainer takes its memory back
    trainer's turn    weights, states, activations                    samplers: nothing
    before_sync       the trainer's states go to the host, then the samplers take memory for weights
    (the weight sync: both sides have weights)
    after_sync        the trainer's weights go to the host, then the samplers take memory for their cache

Who gives does so before the other takes. A sampler that dies is started again with all of its memory; it gives that up
when the trainer's turn comes, and one that dies in the trainer's turn is started when that has ended.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nanodag.rl.fleet.samplers import Samplers
from nanodag.rl.fleet.weight_sync import Ask


class Lending:
    """Of one stage. ask: of the trainer's ranks. lends_states: the trainer's states and weights go to host memory; else
    only what it does not use is given."""

    def __init__(self, samplers: Samplers, ask: Ask, *, lends_states: bool) -> None:
        self._samplers, self._ask, self._lends_states = samplers, ask, lends_states
        self._is_trainers = False
        self._values: dict[str, float] = {}

    async def begin(self) -> None:
        """Have the trainer, which has just started, lend all, before the samplers start."""
        await self._lend("states")
        await self._lend("weights")

    async def to_trainer(self) -> None:
        """Give the memory to the trainer, unless it has it."""
        if self._is_trainers:
            return
        self._note("sampler", await self._samplers.memory())
        await self._samplers.release_memory()
        self._is_trainers = True
        await self._ask("take_back")

    async def before_sync(self) -> None:
        """Give the samplers memory for weights."""
        if not self._is_trainers:
            return
        self._note("trainer", await self._lend("states"))
        await self._samplers.resume_memory(["weights"])

    async def after_sync(self) -> None:
        """Give the samplers the rest."""
        if not self._is_trainers:
            return
        await self._lend("weights")
        await self._samplers.resume_memory(["kv_cache"])
        self._is_trainers = False

    def taken(self) -> dict[str, float]:
        """Metrics since this was called last: the most that a rank and a sampler have held."""
        values, self._values = self._values, {}
        return values

    async def _lend(self, what: str) -> list[dict[str, Any]]:
        return await self._ask("lend", what=what, keeps_states=not self._lends_states)

    def _note(self, side: str, held: Sequence[Mapping[str, Any]]) -> None:
        peaks = [each["peak_bytes"] for each in held if "peak_bytes" in each]
        if peaks:
            name = f"{side}_peak_bytes"
            self._values[name] = max(self._values.get(name, 0), *peaks)
