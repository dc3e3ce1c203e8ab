"""`generate: openenv:URL`: an OpenEnv server as the environment of a sample."""

from nanodag.registry import entry
from nanodag.rl.environments.loop import environment
from nanodag.rl.rollouts.turns.sample import Sample, TurnSampler


@entry("generate", "openenv", argument="url")
async def openenv(
    sampler: TurnSampler,
    sample: Sample,
    *,
    named: str,
    max_turns: int = 16,
    step_s: float = 30.0,
    action: str = "auto",
    observation: str = "auto",
) -> Sample:
    """An environment that an OpenEnv server runs, which you start yourself.

    max_turns: of an episode. step_s: seconds that the server may take for an answer. action, observation: fields, as
    nanodag.rl.environments.openenv_session has them.
    """
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
