"""One agent's visit to the API, from its key to the sample that came of it. No torch here.

Whatever drives an agent goes through `visited`: a function in a process, a program in the sandbox, a server elsewhere.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from nanodag.children.forks import EpisodeFailed, EpisodeLost
from nanodag.rl.environments.agent_session import CallLimits, Session
from nanodag.rl.environments.api_server import ApiServer, the_api_server
from nanodag.rl.environments.sample import Sample, TurnSampler


@dataclass(frozen=True, kw_only=True)
class Visit:
    """An agent's access. session: takes what it says of its reward and answer."""

    server: ApiServer
    session: Session
    api_key: str

    @property
    def base_url(self) -> str:
        """The address, as `OPENAI_BASE_URL` has it."""
        return self.server.base_url


async def visited(
    sampler: TurnSampler,
    sample: Sample,
    limits: CallLimits,
    run: Callable[[Visit], Awaitable[None]],
    *,
    place: AbstractAsyncContextManager[Any],
) -> Sample:
    """The sample that comes of `run`, which is awaited while its key is valid.

    place: entered before that; to wait there counts as no time of the agent's. An agent that fails once a call of its
    was refused for a limit was cut off: its sample has the answer and the reward that were said until then, else none
    and 0. Raises EpisodeFailed for other failures, EpisodeLost for one that was killed, SamplerError where the sampler
    is to blame, ValueError where nothing was asked or what was said is of no use.
    """
    server, session = the_api_server(), Session(sampler, sample, limits)
    async with sampler.placed(place):
        visit = Visit(server=server, session=session, api_key=server.admit(session))
        try:
            await _unless_over(run(visit), session)
        except EpisodeLost:
            raise  # from its beginning it asks for the same again, and is answered the same
        except EpisodeFailed:
            if not session.cut:
                raise
            session.answer = session.answer or ""
            session.reward = session.reward or 0.0
        finally:
            server.dismiss(visit.api_key)
    return session.result()


async def _unless_over(running: Awaitable[None], session: Session) -> None:
    """Wait for an agent to end, or to be of no use any more: then it is ended."""
    agent, over = asyncio.ensure_future(running), asyncio.ensure_future(session.over.wait())
    try:
        await asyncio.wait({agent, over}, return_when=asyncio.FIRST_COMPLETED)
        if agent.done():
            await agent
    finally:
        for task in (agent, over):
            task.cancel()
        await asyncio.gather(agent, over, return_exceptions=True)


def take(session: Session, returned: Any) -> None:
    """Keep the result of an agent's function: nothing, its reward, with components, or its answer. Raises ValueError
    for anything else."""
    if isinstance(returned, str):
        session.answer = returned
    elif isinstance(returned, list | tuple) and len(returned) == 2:
        session.report(*returned)
    elif returned is not None:
        session.report(returned)
