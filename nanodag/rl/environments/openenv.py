"""`generate: openenv:URL`: an OpenEnv server as the environment of a sample."""

import asyncio

from nanodag.errors import ConfigError
from nanodag.host.threads import MadeOnce
from nanodag.registry import entry
from nanodag.rl.environments.class_environment import environment
from nanodag.rl.environments.sample import Sample, TurnSampler


@entry("generate", "openenv", argument="url")
async def openenv(
    sampler: TurnSampler,
    sample: Sample,
    *,
    named: str,
    max_turns: int = 16,
    step_s: float = 30.0,
    at_once: int = 64,
    action: str = "auto",
    observation: str = "auto",
) -> Sample:
    """An environment that an OpenEnv server runs, which you start yourself.

    max_turns: of an episode. step_s: seconds that the server may take for an answer. at_once: sessions, as many as the
    server allows (its `max_concurrent_envs`). action, observation: fields, as
    nanodag.rl.environments.openenv_session has them.
    """
    async with sampler.placed(_places(named, at_once)):
        return await environment(
            sampler,
            sample,
            named="nanodag.rl.environments.openenv_session:OpenEnv",
            max_turns=max_turns,
            step_s=step_s,
            url=named,
            action=action,
            observation=observation,
        )


@MadeOnce
def _places(url: str, at_once: int) -> asyncio.Semaphore:
    """Places of all samples. Raises ConfigError where there are none."""
    if at_once < 1:
        raise ConfigError(f"openenv:{url}: at_once {at_once} must be above 0.")
    return asyncio.Semaphore(at_once)
