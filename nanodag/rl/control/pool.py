"""Groups that are always in flight: a step takes the first that are done and pass (`rollout.order: arrival`). No torch.

A group that ends makes room for the next prompt at once, so samplers do not wait for the slowest answer of a step, nor
for the trainer. Two rules bound staleness, with N `prompts_per_step` and L `max_staleness`:

    room    while the samplers have policy p and step s is to be taken next, N x (p + 2 + L - s) groups may be in the
            pool: as many as the steps s to p + 1 + L train, the last ones that the weights of policy p are fresh
            enough for. At the end of the stage it is what the steps that are left train.
            Of these at most so many are in flight as keep the samplers busy: what waits at a sampler only grows old.
    due     a group that began with policy p is trained in step p + 1 + L at the latest. A step is held up only where
            more groups in flight are due than the steps until then could train.

So no group is dropped for being slow, and none is left over at the end: every group that began is judged, and short
answers come earlier but not more often. No token is older than L steps. Which groups a step trains depends on time, so
two runs differ.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanodag.rl.control.generation import WAVES_A_STEP, RolloutGenerator
from nanodag.rl.rollouts.batch import Dropped, RolloutBatch
from nanodag.rl.rollouts.prompts import Prompt, PromptCursor
from nanodag.rl.rollouts.rollout import groups_of

GROUPS_AHEAD = 3


@dataclass(eq=False, slots=True)
class Group:
    """One in the pool. policy: that the samplers had when it began; task: while it is in flight; judged: a rollout
    batch of it alone, when it is done and passed the filters."""

    prompt: Prompt
    policy: int
    task: "asyncio.Task[RolloutBatch] | None" = None
    judged: RolloutBatch | None = None


class RolloutPool:
    """The pool of one stage. Nothing is begun but inside `take`. is_stopping: true once a stop was asked for: it may
    have ended what computes rewards, so nothing that ends then counts."""

    def __init__(
        self, generator: RolloutGenerator, cursor: PromptCursor, *, is_stopping: Callable[[], bool] = lambda: False
    ) -> None:
        config, rollout = generator.config, generator.config.rollout
        self._generator, self._cursor, self._is_stopping = generator, cursor, is_stopping
        self._num_steps, self._size, self._lag = config.num_steps, rollout.prompts_per_step, rollout.max_staleness
        self._max_in_flight = most_in_flight(int(config.sampler.max_batch), rollout.samples_per_prompt)
        self._groups: list[Group] = []  # in the order in which they began
        self._dropped: list[Dropped] = []  # since a step was taken last, as what was passed over
        self._passed_over: list[tuple[Prompt, str]] = []
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._taken_at = time.monotonic()
        self._policy = 0

    def samplers_have(self, policy: int) -> None:
        """Note whose weights the samplers have now."""
        self._policy = policy
        self._changed.set()

    async def take(self, step: int) -> RolloutBatch:
        """The groups of a step, in the order of their prompts: `prompts_per_step` that passed the filters, or fewer
        where WAVES_A_STEP times as many were dropped. Raises what a group in flight raised."""
        enough_at = None
        while (taken := self._ready(step)) is None:
            if enough_at is None and self._num_done >= self._size:
                enough_at = time.monotonic()
            self._changed.clear()
            await self._changed.wait()
        now, gone = time.monotonic(), set(taken)
        self._groups = [group for group in self._groups if group not in gone]
        batch = joined([group.judged for group in taken if group.judged is not None])
        batch.dropped, self._dropped = self._dropped, []
        batch.passed_over, self._passed_over = self._passed_over, []
        batch.pool = {
            "groups_in_flight": float(len(self._groups) - self._num_done),
            "groups_done": float(self._num_done),
            "seconds_overdue": now - enough_at if enough_at is not None else 0.0,
        }
        batch.seconds, self._taken_at = now - self._taken_at, now
        self._generator.conclude(self._cursor, step, batch)
        return batch

    def _ready(self, step: int) -> list[Group] | None:
        """Groups that a step takes, those that began first; None while it lacks some or one that is due."""
        self._fill(step)
        done = [group for group in self._groups if group.judged is not None]
        if len(self._dropped) >= WAVES_A_STEP * self._size:
            return done[: self._size]
        if len(done) < self._size:
            return None
        taken = done[: self._size]
        for policy in {group.policy for group in self._groups}:
            due = [group for group in self._groups if group.policy <= policy]
            num_left = len(due) - sum(group.policy <= policy for group in taken)
            room = self._size * max(policy + 1 + self._lag - step, 0)
            if num_left > room and any(group.judged is None for group in due):
                return None
        return taken

    def state(self) -> tuple[dict[str, Any], RolloutBatch, dict[str, int]]:
        """Snapshot of the pool, which nothing that happens later changes: the position in the prompts, those in flight
        given back; the groups that are done; and by group id the policy that the samplers had when one of these began.
        """
        in_flight = [group.prompt for group in self._groups if group.judged is None]
        done = {group.prompt.group_id: group for group in self._groups if group.judged is not None}
        batch = joined([group.judged for group in done.values() if group.judged is not None])
        batch.dropped, batch.passed_over = list(self._dropped), [*self._passed_over, *self._cursor.passed_over()]
        self._passed_over = list(batch.passed_over)
        policies = {group_id: group.policy for group_id, group in done.items()}
        return self._cursor.state_dict(unused=in_flight), batch, policies

    async def restore(self, batch: RolloutBatch, policies: Mapping[str, int], *, step: int, policy: int) -> None:
        """Go on with what a checkpoint has; the cursor is where it says. step: the last one that was taken. policy:
        that the samplers will have. Rewards that failed are computed again."""
        (batch,) = await self._generator.judged_again(self._cursor, step, [batch], most=float("inf"))
        failed = groups_of(batch.failed)
        for prompt, kept in batch.kept:
            alone = RolloutBatch(kept=[(prompt, kept)], failed=failed.get(prompt.group_id, []))
            self._groups.append(Group(prompt, policies.get(prompt.group_id, policy), judged=alone))
        self._dropped, self._passed_over, self._policy = batch.dropped, batch.passed_over, policy

    @property
    def _num_done(self) -> int:
        return sum(group.judged is not None for group in self._groups)

    def _fill(self, step: int) -> None:
        if self._error is not None:
            raise self._error
        last = min(self._policy + 1 + self._lag, self._num_steps)
        room = self._size * (last + 1 - step) - len(self._groups)
        room = min(room, self._max_in_flight - len(self._groups) + self._num_done)
        for prompt in self._cursor.take(max(room, 0)):
            group = Group(prompt, self._policy)
            group.task = asyncio.create_task(self._generator.group(prompt))
            group.task.add_done_callback(partial(self._ended, group))
            self._groups.append(group)
        self._passed_over += self._cursor.passed_over()

    def _ended(self, group: Group, task: "asyncio.Task[RolloutBatch]") -> None:
        group.task = None
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or self._is_stopping():
            return
        self._changed.set()
        if error is not None:
            self._error = self._error or error
        elif task.result().kept:
            group.judged = task.result()
        else:
            self._groups.remove(group)
            self._dropped += task.result().dropped


def most_in_flight(max_batch: int, samples_per_prompt: int) -> int:
    """Groups that keep samplers of max_batch samples busy: most samples of a group end well before its last."""
    return -(-GROUPS_AHEAD * max_batch // samples_per_prompt)


def joined(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """The groups of all of them."""
    return RolloutBatch(
        kept=[group for batch in batches for group in batch.kept],
        failed=[rollout for batch in batches for rollout in batch.failed],
    )
