"""Turns prompts into groups of rollouts with rewards, and chooses the groups that are trained. No torch here.

Groups are chosen in the order of their prompts, never by who finished first, which would favour short answers and
differ from run to run. The seed of a group depends on the stage's seed, the step and the prompt alone.
"""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Protocol

from nanodag.config.schema import RLStage
from nanodag.errors import SamplerError, StageFailed
from nanodag.rl import entries
from nanodag.rl.harvest import Dropped, Harvest
from nanodag.rl.prompts import Prompt, PromptCursor
from nanodag.rl.rewards.pool import RewardPool
from nanodag.rl.rollout import FinishReason, Rollout, Span, prompt_span
from nanodag.rl.shaping import shaped
from nanodag.sampler.protocol import Completion, Request, SamplingParams
from nanodag.tokenizer.encoding import Encoding

WAVES_A_STEP = 16
REWARD_FAILED = "reward_failed"


class Sampler(Protocol):
    """What is needed of a sampler client."""

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """For each prompt its `params.n` completions."""
        ...

    async def abort(self, rid: str) -> None:
        """End a request that is under way."""
        ...


class Generator:
    """Generates for one stage. sampler: a client of the server; pool: computes rewards while others are generated."""

    def __init__(
        self, config: RLStage, sampler: Sampler, pool: RewardPool, encoding: Encoding, stop_ids: Sequence[int]
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._pool = pool
        self._encoding = encoding
        self._stop_ids = tuple(stop_ids)
        self._filters = [entries.load_filter(one.name, one.options) for one in config.filters]

    async def step(self, cursor: PromptCursor, step: int) -> Harvest:
        """The groups of one step: `prompts_per_step` that pass the filters, or fewer.

        Without over-sampling one wave of `prompts_per_step` prompts is generated, and what passes is trained. With it,
        waves of `over_sampling` prompts follow one another, at most WAVES_A_STEP, until enough have passed; prompts of
        a wave that are not needed go back to the cursor.
        """
        config, harvest, began = self._config, Harvest(), time.monotonic()
        num_waves = WAVES_A_STEP if config.over_sampling else 1
        for _ in range(num_waves):
            prompts = cursor.take(config.over_sampling or config.prompts_per_step)
            num_used = await self._wave(prompts, step, harvest)
            cursor.give_back(prompts[num_used:])
            if len(harvest.kept) == config.prompts_per_step:
                break
        _refuse_broken_rewards(harvest.all_rollouts)
        harvest.overlong = cursor.dropped_overlong()
        harvest.seconds = time.monotonic() - began
        return harvest

    async def greedy(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """One rollout of each prompt at temperature 0, with rewards: for evaluation, never for training."""
        params = SamplingParams(
            max_new_tokens=self._config.max_new_tokens, temperature=0.0, stop_token_ids=self._stop_ids
        )
        groups = await asyncio.gather(*(self._group(prompt, params, f"eval-{n}") for n, prompt in enumerate(prompts)))
        return [rollout for group in groups for rollout in group]

    async def _wave(self, prompts: Sequence[Prompt], step: int, harvest: Harvest) -> int:
        """Generate all, judge in order until enough are kept; returns how many were judged."""
        rids = [f"step-{step}-{prompt.group_id}" for prompt in prompts]
        tasks = [
            asyncio.create_task(self._group(prompt, self._params(step, prompt), rid))
            for prompt, rid in zip(prompts, rids, strict=True)
        ]
        used = 0
        try:
            for prompt, task in zip(prompts, tasks, strict=True):
                if len(harvest.kept) == self._config.prompts_per_step:
                    break
                self._judge(prompt, await task, harvest)
                used += 1
        finally:
            unfinished = [(task, rid) for task, rid in zip(tasks, rids, strict=True) if not task.done()]
            for task, _ in unfinished:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for _, rid in unfinished:
            await self._sampler.abort(rid)
        return used

    def _judge(self, prompt: Prompt, group: list[Rollout], harvest: Harvest) -> None:
        group = [shaped(rollout, self._config) for rollout in group]
        scored = [rollout for rollout in group if rollout.reward is not None]
        if len(scored) < 2:
            harvest.dropped.append(Dropped(prompt, group, REWARD_FAILED))
            return
        reason = next((reason for judge in self._filters if (reason := judge(scored)) is not None), None)
        if reason is not None:
            harvest.dropped.append(Dropped(prompt, group, reason))
            return
        harvest.kept.append((prompt, scored))
        harvest.failed += [rollout for rollout in group if rollout.reward is None]

    def _params(self, step: int, prompt: Prompt) -> SamplingParams:
        config = self._config
        return SamplingParams(
            n=config.samples_per_prompt,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=self._stop_ids,
            sampling_seed=group_seed(int(config.seed), step, prompt.group_id),
        )

    async def _group(self, prompt: Prompt, params: SamplingParams, rid: str) -> list[Rollout]:
        request = Request(input_ids=list(prompt.token_ids), params=params, rid=rid)
        (completions,) = await self._sampler.generate([request])
        rollouts = [self._rollout(prompt, index, found) for index, found in enumerate(completions)]
        futures = [self._pool.submit(prompt.record, self._answer(rollout)) for rollout in rollouts]
        scores = await asyncio.gather(*map(asyncio.wrap_future, futures))
        return [
            rollout.with_reward(score.value, score.components, **({"reward_error": score.error} if score.error else {}))
            for rollout, score in zip(rollouts, scores, strict=True)
        ]

    def _rollout(self, prompt: Prompt, index: int, completion: Completion) -> Rollout:
        return Rollout(
            group_id=prompt.group_id,
            prompt_id=prompt.prompt_id,
            sample_index=index,
            spans=(prompt_span(prompt.token_ids), _sampled(completion)),
            finish_reason=_finish_reason(completion),
        )

    def _answer(self, rollout: Rollout) -> str:
        """The text that the reward sees: special tokens by name, without the one that ended it."""
        ids = rollout.sampled_token_ids
        return self._encoding.decode(ids[:-1] if rollout.finish_reason == "stop" and ids else ids)


def group_seed(seed: int, step: int, group_id: str) -> int:
    """63 bits that depend on these three alone."""
    digest = hashlib.blake2b(f"{seed}\0{step}\0{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _sampled(completion: Completion) -> Span:
    return Span(
        kind="sampled",
        token_ids=tuple(completion.output_ids),
        mask=(1,) * len(completion.output_ids),
        logprobs=tuple(min(logprob, 0.0) for logprob in completion.logprobs),  # rounding may leave 1e-7
        versions=tuple(int(version) for version in completion.token_versions()),
    )


def _finish_reason(completion: Completion) -> FinishReason:
    found = completion.finish_reason
    if found is None or found.type == "abort":
        raise SamplerError(f"The sampler ended request {completion.rid}: {found.message if found else 'no reason'}.")
    return found.type


def _refuse_broken_rewards(rollouts: Sequence[Rollout]) -> None:
    """One failing sample is its own affair; when all fail, the reward is broken."""
    if rollouts and all(rollout.reward is None for rollout in rollouts):
        raise StageFailed(
            f"The reward failed for every one of {len(rollouts)} rollouts of this step. The last reason: "
            f"{rollouts[-1].metadata.get('reward_error')}. Repair the reward function, or raise reward_timeout_s."
        )
