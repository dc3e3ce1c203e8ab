"""Prompts that go to a stage's samplers by way of the router. No torch here."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from nanodag.errors import BadRequest, SamplerError, SamplerLost
from nanodag.errors.words import counted
from nanodag.inference.protocol import Completion, Request
from nanodag.rl.fleet.replica import Replica
from nanodag.rl.fleet.router import Router
from nanodag.rl.fleet.server_watch import ChildServer

MOMENT_S = 0.25  # for a server that ended to be seen to have ended; doubled at each attempt


class RoutedPrompts:
    """Asks the router, and asks again when a request fails.

    replicas: the samplers behind it. max_restarts: so many times may one request fail and be sent again. until_one_up:
    awaited before each attempt. noticed: called with a sampler that has ended, its server, and why.
    """

    def __init__(
        self,
        router: Router,
        replicas: Sequence[Replica],
        *,
        max_restarts: int,
        until_one_up: Callable[[], Awaitable[object]],
        noticed: Callable[[Replica, ChildServer, SamplerError], None],
    ) -> None:
        self._router, self._replicas, self._max_restarts = router, replicas, max_restarts
        self._until_one_up, self._noticed = until_one_up, noticed
        self._sent: dict[str, str] = {}  # rid -> the name under which the router has it

    def rid_there(self, rid: str) -> str:
        """The name under which the samplers have a request that is given up."""
        return self._sent.pop(rid, rid)

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """What the samplers answer by way of the router. A request that fails is sent again, with another rid: a paused
        server may still hold the request of a router that died, and SGLang refuses a second request of the same rid."""
        for attempt in range(self._max_restarts + 1):
            await self._until_one_up()
            named = [_of_attempt(request, attempt) for request in requests]
            pairs = zip(requests, named, strict=True)
            self._sent.update({old.rid: new.rid for old, new in pairs if old.rid and new.rid})
            work: Awaitable[list[list[Completion]]] = self._router.generate(named)
            for replica in self._replicas:
                if replica.is_up:
                    work = replica.watch.over(work)  # who answered is not known, so no loss is forgotten
            try:
                answers = await work
                for request in requests:  # those of a call that is given up stay, for `rid_there`
                    self._sent.pop(request.rid or "", None)
                return answers
            except BadRequest:
                raise
            except SamplerError as error:
                failure = error
            await asyncio.sleep(MOMENT_S * 2**attempt)
            for replica in self._replicas:
                if not replica.server.is_alive:
                    self._noticed(replica, replica.server, SamplerLost(str(failure)))
            self._router.disarrange()
        raise SamplerLost(
            f"A prompt failed {counted(self._max_restarts + 1, 'time')} behind the router, the last time: {failure}. "
            f"The end of the router's log:\n{self._router.tail()}"
        ) from failure


def _of_attempt(request: Request, attempt: int) -> Request:
    if request.rid is None or attempt == 0:
        return request
    return replace(request, rid=f"{request.rid}-attempt-{attempt + 1}")
