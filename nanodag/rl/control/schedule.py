"""The samplers' loop and the trainer's loop, side by side, tied together by weights and rollouts. No torch here.

Step k trains rollout batch k and leaves the weights of *policy* k; policy 0 the stage began with. The number counts
steps; a policy version counts updates, of which a step may have none or several. The samplers take the policies in
order, and with lag L (`max_staleness`) the weights of policy j sample rollout batch j + 1 + L:

    lag 0   samplers | batch 1   |        | batch 2   |        |         batch 2 with policy 1
            trainer              | step 1 |           | step 2 |

    lag 1   samplers | batch 1   | batch 2   | batch 3   | batch 4       1 and 2 with policy 0, 3 with policy 1
            trainer              | step 1    | step 2    | step 3

So the step alone decides which weights sample a batch, not the faster side: with a deterministic sampler a stage ends
on the same bytes whatever the timing. Each side continues until it lacks something: the trainer a batch, the samplers
weights that are fresh enough. At most L + 1 batches exist at once. Where bytes are not promised (`is_exact` false) the
samplers take the newest weights before each batch, so a batch is at most L steps behind, often less. With
`loads_in_flight` they also take weights in the middle of a batch, which then has tokens of several versions. In order
of arrival a batch is what nanodag.rl.control.pool has ready, and the samplers go on between two batches.

An evaluation of policy j runs while the samplers have its weights, beside their next rollout batch and beside training.
Where an evaluation may end the stage (`is_over`), the samplers wait for it before their next rollout batch; a step that
is under way then is the last.
With `takes_turns` nothing of the samplers runs beside a step: who works has the memory of the device.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import TYPE_CHECKING, Any

from nanodag.errors import SamplerError
from nanodag.host.threads import cancelled
from nanodag.rl.rollouts.batch import RolloutBatch

if TYPE_CHECKING:
    from nanodag.rl.control.controller import Controller

POLL_S = 0.2


class StopRequested(Exception):
    """A stop was asked for; a checkpoint can be written."""


@dataclass(frozen=True, slots=True)
class Position:
    """The state of the loops. step: steps trained; policy: the one whose weights the samplers have, or wait for;
    waiting: finished rollout batches, of step + 1 and later."""

    step: int = 0
    policy: int = 0
    waiting: tuple[RolloutBatch, ...] = ()


@dataclass(eq=False)
class Schedule:
    """The two loops of a stage. work: does what they ask for; its `check` raises when something that is needed has
    ended, and is called often. begins: where it goes on. timed: adds what a block takes to the seconds of that name.
    keeps_trainer: the weights that are published are the trainer's own, so no step begins before the samplers have
    taken them, or passed them over. loads_in_flight: weights may be loaded while a rollout batch is under way; not with
    is_exact. is_over: whether what was evaluated says that the stage ends here. takes_turns: a step, its weights
    included, and what samplers do with a policy never overlap; only with lag 0."""

    work: "Controller"
    _: KW_ONLY
    num_steps: int
    lag: int
    is_exact: bool
    begins: InitVar[Position]
    timed: Callable[[str], AbstractContextManager[None]]
    keeps_trainer: bool = False
    loads_in_flight: bool = False
    is_over: Callable[[], bool] | None = None
    takes_turns: bool = False

    def __post_init__(self, begins: Position) -> None:
        assert not (self.is_exact and self.loads_in_flight)
        assert not (self.takes_turns and self.lag)
        self._step, self._policy, self._waiting = begins.step, begins.policy, deque(begins.waiting)
        self._published = begins.step - 1
        self._has_ended_early = False
        self._turn: AbstractAsyncContextManager[Any] = asyncio.Lock() if self.takes_turns else nullcontext()
        self._under_way: asyncio.Task[None] | None = None
        self._taken = begins.policy - 1  # the last policy whose weights the samplers have taken or passed over
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()

    @property
    def position(self) -> Position:
        return Position(self._step, self._policy, tuple(self._waiting))

    async def run(self) -> None:
        """To the end. Raises what a loop raised, or Stopped; then nothing of it runs any more."""
        await self._publish()
        self._ends_early()  # as it was when the checkpoint was written
        training = asyncio.create_task(self._training())
        sampling = asyncio.create_task(self._sampling())
        watching = asyncio.create_task(self._watch())
        loops = asyncio.gather(training, sampling)
        try:
            awaited: set[asyncio.Future[Any]] = {loops, watching}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            await loops
        finally:
            await cancelled(loops, training, sampling, watching)
        if self._policy <= self.num_steps and not self._has_ended_early:
            raise StopRequested

    async def _training(self) -> None:
        while self._step < self.num_steps:
            with self.timed("trainer_waits"):
                await self._until(lambda: self._has_ended_early or (bool(self._waiting) and self._may_change_weights))
            if self._has_ended_early:
                break
            async with self._turn:
                await self._until(lambda: True)  # a stop may have come while the turn was the samplers'
                await self.work.train(self._step + 1, self._waiting[0])
                self._waiting.popleft()
                self._step += 1
                if not self._stop.is_set():
                    await self._publish()
            self.work.note(self._step)
            if self._step < self.num_steps and self.work.is_checkpoint_due(self._step):
                # It has no weights but the trainer's, so the samplers must be done with older ones.
                with self.timed("trainer_waits"):
                    await self._until(lambda: self._policy >= self._step or self._has_ended_early)
                if not self._has_ended_early:
                    await self.work.save(self.position)

    async def _publish(self) -> None:
        if self._is_wanted(self._step):
            await self.work.publish(self._step)
        self._published = self._step
        self._changed.set()

    async def _sampling(self) -> None:
        """Run the samplers' side; give it up when a stop is asked for. The trainer's side ends its step first."""
        task, stop = asyncio.create_task(self._policies()), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        except StopRequested:
            self._ask_to_stop()
        except SamplerError:
            if not self.work.is_stop_requested():
                raise
            self._ask_to_stop()  # the signal reached the samplers too
        finally:
            # In one wait: on a stop this is cancelled once more, while it waits.
            await cancelled(task, stop, *([] if self._under_way is None else [self._under_way]))

    async def _policies(self) -> None:
        while self._policy <= self.num_steps and not self._ends_early():
            policy = self._policy
            if self._is_wanted(policy):
                with self.timed("samplers_wait"):
                    await self._until(lambda: self._published >= policy)  # noqa: B023 - awaited in this very round
                if not self._is_outdated(policy) or self.work.is_evaluation_due(policy):
                    async with self._turn:
                        await self.work.load(policy)
                        self._now_taken(policy)
                        if self.is_over is not None:
                            await self.work.evaluate(policy)
                            if self._ends_early():
                                return
                        await asyncio.gather(self._batches(policy), self.work.evaluate(policy))
            self._policy += 1
            self._now_taken(policy)

    def _ends_early(self) -> bool:
        """True once the stage is over; the trainer's side is told."""
        if self.is_over is not None and self.is_over():
            self._has_ended_early = True
            self._changed.set()
        return self._has_ended_early

    def _now_taken(self, policy: int) -> None:
        self._taken = policy
        self._changed.set()

    @property
    def _may_change_weights(self) -> bool:
        return not self.keeps_trainer or self._taken >= self._step

    def _is_wanted(self, policy: int) -> bool:
        return self._num_generated < self._last_step(policy) or self.work.is_evaluation_due(policy)

    def _is_outdated(self, policy: int) -> bool:
        return not self.is_exact and self._published > policy

    def _last_step(self, policy: int) -> int:
        """The last one that the weights of a policy are fresh enough for."""
        return min(policy + 1 + self.lag, self.num_steps)

    @property
    def _num_generated(self) -> int:
        return self._step + len(self._waiting)

    async def _batches(self, policy: int) -> None:
        """Generate what a policy's weights are fresh enough for; with loads_in_flight until there are fresher ones."""
        while self._under_way is not None or (
            self._num_generated < self._last_step(policy) and not self._is_outdated(policy)
        ):
            task = self._under_way = self._under_way or asyncio.create_task(self._batch())
            if self.loads_in_flight and not await self._ends_first(task, lambda: self._is_outdated(policy)):
                return
            await task

    async def _batch(self) -> None:
        """One. It waits from the moment on at which its prompts count as used: a checkpoint has both or neither."""
        self._waiting.append(await self.work.generate(self._num_generated + 1))
        self._under_way = None
        self._changed.set()

    async def _ends_first(self, task: "asyncio.Task[None]", is_so: Callable[[], bool]) -> bool:
        """Wait for a task or for the other side, whichever comes first; whether the task has ended."""
        other = asyncio.create_task(self._until(is_so))
        try:
            await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                other.result()
            return task.done()
        finally:
            await cancelled(other)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until the other side has brought it about. Raises Stopped when a stop was asked for."""
        while not is_so() and not self._stop.is_set():
            self._changed.clear()
            await self._changed.wait()
        if self._stop.is_set() or self.work.is_stop_requested():
            raise StopRequested

    async def _watch(self) -> None:
        while True:
            self.work.check()
            if self.work.is_stop_requested():
                self._ask_to_stop()
            await asyncio.sleep(POLL_S)

    def _ask_to_stop(self) -> None:
        self._stop.set()
        self._changed.set()
