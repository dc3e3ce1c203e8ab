"""`generate: verifiers:MODULE`: a rollout of the `verifiers` package as the agent of a sample. No torch here."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanodag.external_envs.verifiers_process import Outcome, VerifiersProcess, block_of
from nanodag.host.threads import MadeOnce
from nanodag.registry import entry
from nanodag.rl.environments.agent_session import MODEL, CallLimits
from nanodag.rl.environments.sample import Sample, TurnSampler
from nanodag.rl.environments.sample_context import Visit, visited
from nanodag.rl.rollouts.metrics import METRICS, TURNS


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

    max_calls, max_tokens: as nanodag.rl.environments.agent_session has them. max_bytes: memory of the process, with all
    that it starts; one that takes more is ended. at_once: rollouts. The prompt's `metadata.task` is the task, as data
    of `verifiers:` have it.
    """
    if "task" not in sample.record["metadata"]:
        raise ValueError(f"the prompt has no metadata.task; take it from data as verifiers:{named}")
    block = json.dumps(block_of(named, options), sort_keys=True)
    outcomes: list[Outcome] = []

    # Another rollout may have ended the process. So a lost one has one to itself, and fails by its own fault alone.
    process, places = _process(block, max_bytes, at_once if sampler.attempt == 0 else 1)

    async def run(visit: Visit) -> None:
        task = sample.record["metadata"]["task"]
        outcome = await process.rollout(task, base_url=visit.base_url, api_key=visit.api_key, model=MODEL)
        visit.session.report(outcome.reward, outcome.components)
        outcomes.append(outcome)

    limits = CallLimits(max_calls=max_calls, max_tokens=max_tokens)
    made = await visited(sampler, sample, limits, run, place=places)
    return _said(made, *outcomes)


def _said(sample: Sample, outcome: Outcome | None = None) -> Sample:
    """A sample with what its environment said; nothing where a limit of ours cut it off."""
    if outcome is None:
        return sample
    said: Mapping[str, Any] = {METRICS: dict(outcome.metrics), TURNS: outcome.turns}
    reason = "length" if outcome.is_cut else sample.finish_reason
    return replace(sample, metadata={**sample.metadata, **said}, finish_reason=reason)


@MadeOnce
def _process(block: str, max_bytes: int, at_once: int) -> tuple[VerifiersProcess, asyncio.Semaphore]:
    """That of an environment, for all samples, and its places. Both belong to the event loop of turns."""
    return VerifiersProcess(json.loads(block), max_bytes=max_bytes), asyncio.Semaphore(at_once)
