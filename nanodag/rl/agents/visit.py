"""One agent's visit to the API, from its key to the sample that came of it. No torch here.

Whatever drives an agent goes through `visited`: a function in a process, a program in the sandbox, a server elsewhere.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from nanodag.rl.agents.door import Door, the_door
from nanodag.rl.agents.session import CallLimits, Session
from nanodag.rl.rollouts.turns.sample import Sample, TurnSampler

MAX_STARTS = 3


class AgentFailed(Exception):
    """An agent that raised, hung or died; the message is its sample's reason. last_words: the last lines that it wrote,
    empty where there are none."""

    def __init__(self, reason: str, last_words: str = "") -> None:
        super().__init__(reason, last_words)
        self.last_words = last_words

    def __str__(self) -> str:
        return str(self.args[0])


class AgentLost(AgentFailed):
    """An agent that somebody killed, such as the system when memory is short: from its beginning it may do better."""


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What an agent is given. session: takes what it says of its reward and answer."""

    door: Door
    session: Session
    api_key: str

    @property
    def base_url(self) -> str:
        """The address, as `OPENAI_BASE_URL` has it."""
        return self.door.base_url


async def visited(
    sampler: TurnSampler,
    sample: Sample,
    limits: CallLimits,
    run: Callable[[Visit], Awaitable[None]],
    *,
    place: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
) -> Sample:
    """The sample that comes of `run`, which is awaited in the door's event loop while its key is valid.

    place: entered before that; to wait there counts as no time of the agent's. An agent that fails once a call of its
    was refused for a limit was cut off: its sample has the answer and the reward that were said until then, else none
    and 0. One that was killed begins anew, MAX_STARTS times in all. Raises AgentFailed for other failures, SamplerError
    where the sampler is to blame, ValueError where nothing was asked or what was said is of no use.
    """
    door = the_door()

    async def whole() -> Sample:
        session = Session(sampler, sample, limits)
        with sampler.held():
            entered = place()
            await entered.__aenter__()
        try:
            visit = Visit(door=door, session=session, api_key=door.admit(session))
            try:
                await _unless_over(run(visit), session)
            except AgentFailed:
                if not session.cut:
                    raise
                session.answer = session.answer or ""
                session.reward = session.reward or 0.0
            finally:
                door.dismiss(visit.api_key)
        finally:
            await entered.__aexit__(None, None, None)
        return session.result()

    for _ in range(MAX_STARTS - 1):
        with suppress(AgentLost):
            return await door.do(whole())  # it asks for the same again, and is answered the same
    return await door.do(whole())


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
    """What an agent's function returned: nothing, its reward, with components, or its answer. Raises ValueError for
    anything else."""
    if isinstance(returned, str):
        session.answer = returned
    elif isinstance(returned, list | tuple) and len(returned) == 2:
        session.report(*returned)
    elif returned is not None:
        session.report(returned)
