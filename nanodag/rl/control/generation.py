"""Turns prompts into groups of rollouts with rewards, and chooses the groups that are trained. No torch here.

Groups are chosen in the order of their prompts, never by who finished first, which would favour short answers and
differ from run to run. With partial rollouts they are chosen round by round, in the order of their prompts in each: a
group of short answers is then trained in an earlier step than one of long ones, and counts of tokens decide that, so
it is the same in each run. The seed of a group depends on the stage's seed, the step and the prompt alone. Groups in
order of arrival are nanodag.rl.control.pool's.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, ClassVar

from nanodag.config.kinds.rl import RLStage
from nanodag.engines.fleet import Fleet
from nanodag.errors import StageFailed
from nanodag.errors.words import counted
from nanodag.host.threads import cancelled
from nanodag.inference.protocol import SamplingParams
from nanodag.inference.seeds import derived_seed
from nanodag.rewards.function_rewards import token_places
from nanodag.rewards.reward import Reward
from nanodag.rewards.reward_pool import RewardPool
from nanodag.rewards.text_rewards import REPORTED
from nanodag.rl.environments.runner import Turns
from nanodag.rl.rollouts.batch import Dropped, RolloutBatch
from nanodag.rl.rollouts.filters import shaped
from nanodag.rl.rollouts.prompts import Prompt, PromptCursor
from nanodag.rl.rollouts.rollout import (
    ANSWER,
    FAILED,
    GENERATE_FAILED,
    GREEDY,
    LAST_WORDS,
    REASON,
    REWARD_FAILED,
    Rollout,
    main_sequences,
    places_of_samples,
    reward_spread,
)
from nanodag.rl.rollouts.segments import GroupRequests, is_unfinished
from nanodag.tokenizer.encoding import Encoding

log = logging.getLogger(__name__)

WARNED_ABOVE = 0.01
WAVES_A_STEP = 16
NO_STEP = 0


@dataclass(eq=False)
class RolloutGenerator:
    """Generates for one stage. sampler: a client of the server; pool: computes rewards while others are generated;
    turns: where the config names a function that generates."""

    config: RLStage
    sampler: Fleet
    pool: RewardPool
    encoding: Encoding
    stop_ids: Sequence[int]
    turns: Turns | None = None
    identity: ClassVar[Mapping[str, Any]] = {}  # of the files that are trained: there are none

    def __post_init__(self) -> None:
        rollout = self.config.rollout
        self._ends: dict[str, Any] = {"max_new_tokens": rollout.max_new_tokens}  # of each answer
        self._ends |= {"stop_token_ids": tuple(self.stop_ids), "stop": rollout.stop or None}
        self._filters = [entry.load() for entry in rollout.filters]
        self._reported_weight = sum(reward.weight for reward in self.config.reward if reward.name == REPORTED)

    async def step(self, cursor: PromptCursor, step: int) -> RolloutBatch:
        """The groups of one step: `prompts_per_step` that pass the filters, or fewer.

        Without over-sampling one wave of `prompts_per_step` prompts is generated, and what passes is trained. With it,
        waves of `over_sampling` prompts follow one another, at most WAVES_A_STEP, until enough have passed; prompts of
        a wave that are not needed go back to the cursor. With partial rollouts there are rounds instead of waves.
        """
        batch, began = RolloutBatch(), time.monotonic()
        if self.config.rollout.partial_rollout_tokens:
            await self._rounds(cursor, step, batch)
        else:
            rollout = self.config.rollout
            for _ in range(WAVES_A_STEP if rollout.over_sampling else 1):
                prompts = cursor.take(rollout.over_sampling or rollout.prompts_per_step)
                num_used = await self._wave(prompts, step, batch)
                cursor.give_back(prompts[num_used:])
                if len(batch.kept) == rollout.prompts_per_step:
                    break
        self.conclude(cursor, step, batch)
        batch.passed_over = cursor.passed_over()
        batch.seconds = time.monotonic() - began
        return batch

    async def group(self, prompt: Prompt) -> RolloutBatch:
        """One prompt's group with its rewards, judged: a rollout batch of it alone. Its seed depends on the stage's
        seed and the prompt; who asks for it knows no step yet."""
        batch = RolloutBatch()
        self._judge(prompt, await self._rollouts(self._group(NO_STEP, prompt)), batch)
        return batch

    async def judged_again(
        self, cursor: PromptCursor, step: int, waiting: Sequence[RolloutBatch], *, most: float | None = None
    ) -> tuple[RolloutBatch, ...]:
        """The rollout batches of a checkpoint of this step, the next one's first, with failed rewards computed again:
        the function may have been mended. most: groups that one may keep, `prompts_per_step` if not given.

        Groups are chosen again in the order of their prompts; those that are not needed any more go back to the cursor,
        of all rollout batches together, so that the order stays.
        """
        spare: list[Prompt] = []
        judged = list(waiting)
        limit = self.config.rollout.prompts_per_step if most is None else most
        for number, batch in enumerate(waiting):
            if not any(map(has_failed_reward, batch.all_rollouts)):
                continue
            again = judged[number] = replace(batch, kept=[], failed=[], dropped=[])
            prompts, groups = map(list, zip(*batch.in_order(), strict=True))
            groups = await asyncio.gather(*map(self._scored_again, prompts, groups))
            for prompt, group in zip(prompts, groups, strict=True):
                if len(again.kept) < limit:
                    self._choose(prompt, group, again)
                else:
                    spare.append(prompt)
            self.conclude(cursor, step + 1 + number, again)
        cursor.give_back(spare)
        return tuple(judged)

    def conclude(self, cursor: PromptCursor, step: int, batch: RolloutBatch) -> None:
        """Raise StageFailed when too much of it failed; tell the cursor which prompts had spread."""
        limit = self.config.rollout.max_failed_rewards
        check_failures(batch.all_rollouts, of=f"step {step}", max_failed_rewards=limit)
        for prompt, group in [*batch.kept, *((drop.prompt, drop.rollouts) for drop in batch.dropped)]:
            if sum(rollout.reward is not None for rollout in main_sequences(group)) > 1:
                cursor.note(prompt.prompt_id, has_spread=reward_spread(group) > 0)

    async def answers(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Whole responses to held-out prompts, as the evaluation section says, with rewards: never for training. Every
        evaluation draws with the same seeds. Raises StageFailed when too many of the rewards failed."""
        evaluation, seed = self.config.evaluation, int(self.config.seed)
        settings = {**self._ends, "n": evaluation.eval_samples, "temperature": evaluation.eval_temperature}
        groups = []
        for number, prompt in enumerate(prompts):
            drawn = derived_seed(seed, "evaluation", prompt.group_id) if evaluation.eval_temperature else None
            params = SamplingParams(**settings, sampling_seed=drawn)
            groups.append(GroupRequests(prompt, params, f"eval-{number}", self.sampler))
        rollouts = [rollout for group in await asyncio.gather(*map(self._rollouts, groups)) for rollout in group]
        if not evaluation.eval_temperature:
            rollouts = [replace(rollout, metadata={**rollout.metadata, GREEDY: True}) for rollout in rollouts]
        check_failures(rollouts, of="an evaluation", max_failed_rewards=self.config.rollout.max_failed_rewards)
        return rollouts

    async def _rounds(self, cursor: PromptCursor, step: int, batch: RolloutBatch) -> None:
        """In each round every unfinished response of `over_sampling` groups gets a few more tokens; the groups that
        this finishes are judged in prompt order, and new ones take their places, until enough are kept. The others go
        on in the next step, but a finished one that was not needed is generated again there."""
        rollout = self.config.rollout
        groups: list[Prompt] = []
        num_drawn = 0
        while len(batch.kept) < rollout.prompts_per_step and num_drawn < WAVES_A_STEP * rollout.over_sampling:
            new = cursor.take(rollout.over_sampling - len(groups))
            num_drawn += len(new)
            groups += new
            answered = await asyncio.gather(*(self._rollouts(self._group(step, prompt)) for prompt in groups))
            groups = self._finished(groups, answered, batch)
        cursor.give_back(groups)
        batch.num_partial = sum(bool(prompt.begun) for prompt in groups)

    def _finished(
        self, prompts: Sequence[Prompt], groups: Sequence[list[Rollout]], batch: RolloutBatch
    ) -> list[Prompt]:
        """Judge the finished groups as long as more are needed; returns the prompts of the others. What is finished and
        not needed is generated again later, with fresher weights."""
        rest = []
        for prompt, group in zip(prompts, groups, strict=True):
            if any(map(is_unfinished, group)):
                rest.append(replace(prompt, begun=tuple(group)))
            elif len(batch.kept) < self.config.rollout.prompts_per_step:
                self._judge(replace(prompt, begun=()), group, batch)
            else:
                rest.append(replace(prompt, begun=()))
        return rest

    async def _wave(self, prompts: Sequence[Prompt], step: int, batch: RolloutBatch) -> int:
        """Generate all, judge in order until enough are kept; returns how many were judged."""
        groups = [self._group(step, prompt) for prompt in prompts]
        tasks = [asyncio.create_task(self._rollouts(group)) for group in groups]
        used = 0
        try:
            for prompt, task in zip(prompts, tasks, strict=True):
                if len(batch.kept) == self.config.rollout.prompts_per_step:
                    break
                self._judge(prompt, await task, batch)
                used += 1
        finally:
            await cancelled(*tasks)
        for rid in [rid for group in groups for rid in group.under_way]:
            await self.sampler.abort(rid)
        return used

    def _judge(self, prompt: Prompt, group: list[Rollout], batch: RolloutBatch) -> None:
        self._choose(prompt, self._shared([shaped(rollout, self.config.rollout) for rollout in group]), batch)

    def _choose(self, prompt: Prompt, group: list[Rollout], batch: RolloutBatch) -> None:
        """Keep or drop a group whose rewards are those that are trained on."""
        num_before = len(batch.kept)
        scored = [rollout for rollout in group if rollout.reward is not None]
        samples = main_sequences(scored)
        if len(samples) < min(2, self.config.rollout.samples_per_prompt):
            failed = any(map(has_failed_reward, group))
            reason: str | None = REWARD_FAILED if failed else GENERATE_FAILED
        else:
            reason = next((reason for judge in self._filters if (reason := judge(samples)) is not None), None)
        if reason is not None:
            batch.dropped.append(Dropped(prompt, group, reason, num_before))
            return
        batch.kept.append((prompt, scored))
        batch.failed += [rollout for rollout in group if rollout.reward is None]

    def _group(self, step: int, prompt: Prompt) -> GroupRequests:
        config = self.config
        params = SamplingParams(
            **self._ends,
            n=config.rollout.samples_per_prompt,
            temperature=config.rollout.temperature,
            sampling_seed=derived_seed(int(config.seed), step, prompt.group_id),
        )
        rid, segment = f"step-{step}-{prompt.group_id}", config.rollout.partial_rollout_tokens
        return GroupRequests(prompt, params, rid, self.sampler, segment, takes_routes=config.rollout.router_replay)

    async def _rollouts(self, group: GroupRequests) -> list[Rollout]:
        """The group's rollouts, with rewards unless some are unfinished."""
        if self.turns is None:
            rollouts = await group.rollouts()
        else:
            rollouts = await self.turns.group(group.prompt, group.params, group.ask, group.rid)
        return rollouts if any(map(is_unfinished, rollouts)) else await self._scored(group.prompt, rollouts)

    async def _scored(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts of one prompt with their rewards: each main sequence is judged."""
        whole = [rollout for rollout in main_sequences(rollouts) if rollout.finish_reason != "error"]
        answers = [self._answer(rollout) for rollout in whole]
        reported = [rollout.metadata.get(REPORTED) for rollout in whole]
        futures = self.pool.submit_group(prompt.record, answers, reported=reported)
        # shielded: a group that is given up must not cancel futures that the pool's threads will fulfil
        scores = await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(future)) for future in futures))
        scored = map(self._with_score, whole, answers, scores)
        by_id = {id(before): after for before, after in zip(whole, scored, strict=True)}
        return self._shared([by_id.get(id(rollout), rollout) for rollout in rollouts])

    def _shared(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return with_rewards_of_samples(rollouts, reported_weight=self._reported_weight)

    async def _scored_again(self, prompt: Prompt, group: Sequence[Rollout]) -> list[Rollout]:
        """A judged group, with failed rewards computed again. All are scored, as a reward may compare them."""
        if not any(map(has_failed_reward, group)):
            return list(group)
        bare = [replace(member, metadata={k: v for k, v in member.metadata.items() if k != REASON}) for member in group]
        scored = await self._scored(prompt, bare)
        pairs = zip(group, scored, strict=True)
        mended = [shaped(new, self.config.rollout) if has_failed_reward(old) else old for old, new in pairs]
        return self._shared(mended)

    def _answer(self, rollout: Rollout) -> str:
        """The text that the reward sees, if no function says another: what was sampled after the last tool tokens,
        special tokens by name, without the one that ended it. So a tool's words are never taken for an answer."""
        if (answer := rollout.metadata.get(ANSWER)) is not None:
            return answer
        return self.encoding.decode(rollout.without_stop(_last_words(rollout)))

    def _with_score(self, rollout: Rollout, answer: str, score: Reward | str) -> Rollout:
        steps = score.steps if isinstance(score, Reward) and self.config.has_process_reward else None
        if steps is not None and ANSWER in rollout.metadata:
            score = "the steps of an answer that a function says have no place in the tokens"
        if isinstance(score, str):
            return rollout.with_reward(None, {}, **{REASON: score})
        rollout = rollout.with_reward(score.value, score.components)
        if steps is None:
            return rollout
        ids = _last_words(rollout)
        before = len(rollout.response_token_ids) - len(ids)
        places = token_places(steps, ids, text=answer, decode=self.encoding.decode)
        return replace(rollout, steps=tuple((before + place, value) for place, value in places))


def has_failed_reward(rollout: Rollout) -> bool:
    """True where there is a response, and no reward of it."""
    return rollout.reward is None and rollout.finish_reason != "error"


def with_rewards_of_samples(rollouts: Sequence[Rollout], *, reported_weight: float) -> list[Rollout]:
    """The rollouts, each further sequence with the reward of its sample; or where a reward of its role's own was
    reported, with that. reported_weight: of the reward `reported` among the stage's; at 0 what roles report means
    nothing."""
    mains = {(sequence.group_id, sequence.sample_index): sequence for sequence in main_sequences(rollouts)}
    shared = []
    for rollout, place in zip(rollouts, places_of_samples(rollouts), strict=True):
        first = rollouts[place]
        main, own = mains[first.group_id, first.sample_index], first.metadata.get(REPORTED)
        if first.branch and own is not None and reported_weight:
            rollout = rollout.with_reward(reported_weight * own["value"], own["components"])
        elif main is not rollout:
            reason = {REASON: main.metadata[REASON]} if REASON in main.metadata else {}
            rollout = rollout.with_reward(main.reward, main.reward_components, **reason)
        shared.append(rollout)
    return shared


def _last_words(rollout: Rollout) -> list[int]:
    """Ids that were sampled after the last tool tokens."""
    last = takewhile(lambda span: span.kind != "tool", reversed(rollout.spans[1:]))
    return [token for span in reversed(list(last)) for token in span.token_ids]


def check_failures(rollouts: Sequence[Rollout], *, of: str, max_failed_rewards: float) -> None:
    """Warn, once for each function, when it failed for more than WARNED_ABOVE of the samples.

    of: what they were sampled for, as in `step 3`. Raises StageFailed when more than max_failed_rewards of the samples
    or of the rewards failed, or all of them.
    """
    rollouts = main_sequences(rollouts)
    broken = [rollout for rollout in rollouts if rollout.finish_reason == "error"]
    answered = [rollout for rollout in rollouts if rollout.finish_reason != "error"]
    failed = [rollout for rollout in answered if has_failed_reward(rollout)]
    mend_reward = "Repair the reward function and start the stage again, raise reward_timeout_s"
    for what, why, bad, tried, mend in (
        ("function that generates", FAILED, broken, rollouts, "Repair it, raise generate.timeout_s"),
        ("reward", REASON, failed, answered, mend_reward),
    ):
        if not bad:
            continue
        share, reason = len(bad) / len(tried), str(bad[0].metadata.get(why))
        if words := str(bad[0].metadata.get(LAST_WORDS, "")).splitlines():
            reason += f"; its last words: {' | '.join(words)}"
        message = (
            f"The {what} failed for {len(bad)} of {counted(len(tried), 'sample')} of {of} ({share:.1%}). The first "
            f"reason: {reason.rstrip('.')}."
        )
        if share > max_failed_rewards or share == 1.0:
            raise StageFailed(
                f"{message} The limit is max_failed_rewards {max_failed_rewards:g}, and all is always too many. "
                f"{mend}, or raise max_failed_rewards."
            )
        if share > WARNED_ABOVE:
            log.warning("%s These samples are left out.", message)
