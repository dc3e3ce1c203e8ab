"""`generate: verifiers:MODULE`: a rollout of the `verifiers` package as the agent of a sample. No torch here."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nanodag.guests.verifiers_process import Outcome, RolloutFailed, RolloutLost, VerifiersProcess, block_of
from nanodag.host.threads import MadeOnce
from nanodag.registry import entry
from nanodag.rl.agents.session import MODEL, CallLimits
from nanodag.rl.agents.visit import AgentFailed, Visit, visited
from nanodag.rl.rollouts.metrics import METRICS, TURNS
from nanodag.rl.rollouts.turns.sample import Sample, TurnSampler

MAX_PLAYS = 3  # of a sample whose process ended


@entry("generate", "verifiers", argument="module")
async def verifiers(
    sampler: TurnSampler,
    sample: Sample,
    *,
    named: str,
    max_calls: int = 64,
    max_tokens: int = 0,
    max_bytes: int = 8 << 30,
    at_once: int = 64,
    **options: Any,
) -> Sample:
    """An environment of the `verifiers` package, in a process of its Python environment; further options are verifiers'
    own, such as `agent.max_turns`.

    max_calls, max_tokens: as nanodag.rl.agents.session has them. max_bytes: memory of the process, with all that it
    starts; one that takes more is ended. at_once: rollouts. The prompt's `metadata.task` is the task, as data of
    `verifiers:` have it.
    """
    if "task" not in sample.record["metadata"]:
        raise ValueError(f"the prompt has no metadata.task; take it from data as verifiers:{named}")
    block = json.dumps(block_of(named, options), sort_keys=True)
    outcomes: list[Outcome] = []

    async def run(process: VerifiersProcess, visit: Visit) -> None:
        task = sample.record["metadata"]["task"]
        try:
            outcome = await process.rollout(task, base_url=visit.base_url, api_key=visit.api_key, model=MODEL)
        except RolloutLost:
            raise
        except RolloutFailed as error:
            raise AgentFailed(str(error)) from error
        visit.session.report(outcome.reward, outcome.components)
        outcomes.append(outcome)

    limits = CallLimits(max_calls=max_calls, max_tokens=max_tokens)
    for number in range(MAX_PLAYS):
        # Another rollout may have ended the process. So a lost one has one to itself, and fails by its own fault alone;
        # once more, as somebody may kill processes. From the same seeds comes the same sample.
        process, places = _process(block, max_bytes, at_once if number == 0 else 1)
        try:
            made = await visited(sampler, sample, limits, partial(run, process), place=_given(places))
            return _said(made, *outcomes)
        except RolloutLost:
            if number == MAX_PLAYS - 1:
                raise
    raise AssertionError("the last play returns or raises")


def _given(places: asyncio.Semaphore) -> Callable[[], asyncio.Semaphore]:
    return lambda: places


def _said(sample: Sample, outcome: Outcome | None = None) -> Sample:
    """A sample with what its environment said; nothing where a limit of ours cut it off."""
    if outcome is None:
        return sample
    said: Mapping[str, Any] = {METRICS: dict(outcome.metrics), TURNS: outcome.turns}
    reason = "length" if outcome.is_cut else sample.finish_reason
    return replace(sample, metadata={**sample.metadata, **said}, finish_reason=reason)


@MadeOnce
def _process(block: str, max_bytes: int, at_once: int) -> tuple[VerifiersProcess, asyncio.Semaphore]:
    """That of an environment, for all samples, and its places. Both belong to the door's event loop."""
    return VerifiersProcess(json.loads(block), max_bytes=max_bytes), asyncio.Semaphore(at_once)
