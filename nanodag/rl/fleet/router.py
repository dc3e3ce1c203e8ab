"""sglang-router before the samplers, kept alive. Requests for generation go through it, no others do. No torch here."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from nanodag.errors import SamplerLost
from nanodag.host.threads import in_thread
from nanodag.inference.protocol import Completion, Request
from nanodag.inference.router_process import RouterClient
from nanodag.rl.fleet.server_watch import ChildServer, ServerWatch

log = logging.getLogger(__name__)

POLL_S = 0.02
REGISTER_TIMEOUT_S = 60.0


class Router:
    """server: a running one. launch: starts another, blocks, raises SamplerLost with the end of the log; connect: a
    client of it. every_s, timeout_s: as of `ServerWatch`.

    urls: of the servers that should be behind it now.
    """

    def __init__(
        self,
        server: ChildServer,
        *,
        launch: Callable[[], ChildServer],
        connect: Callable[[str], RouterClient],
        every_s: float = 5.0,
        timeout_s: float = 60.0,
    ) -> None:
        self._launch, self._connect = launch, connect
        self._every_s, self._timeout_s = every_s, timeout_s
        self._lock = asyncio.Lock()
        self._is_arranged = False
        self._is_closed = False
        self._restarting: asyncio.Task[None] | None = None
        self._take_up(server)
        self.urls: Callable[[], Sequence[str]] = list
        self.num_restarts = 0

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """For each prompt its `params.n` completions. Raises SamplerError when the router or a server behind it fails:
        then call `disarrange`."""
        await self.arrange()
        client = self._client
        answers = await self._watch.over(asyncio.gather(*(client.generate([request]) for request in requests)))
        return [group for (group,) in answers]

    def disarrange(self) -> None:
        """Note that the servers are others now, or that the router may be gone."""
        self._is_arranged = False

    async def arrange(self) -> None:
        """Have it run, with those servers behind it and no others. Raises SamplerLost when that cannot be."""
        async with self._lock:
            if self._is_arranged:
                return
            if self._server.is_alive and await self._registered():
                return
            if self._is_closed:
                raise SamplerLost("the router was ended")
            # A task of its own, which goes on when who asked is cancelled: a router that was started is not lost.
            if self._restarting is None or self._restarting.done():
                self._restarting = asyncio.ensure_future(self._restart())
            await asyncio.shield(self._restarting)
            if not await self._registered():
                raise SamplerLost(f"The router ({self.describe()}) does not take the servers {list(self.urls())}")

    async def _restart(self) -> None:
        log.warning("The router (%s) was lost and is started again.", self.describe())
        await self._watch.leave()
        self._server.kill()
        await self._client.close()
        server = await in_thread(self._launch)
        if self._is_closed:
            server.stop()
            raise SamplerLost("the stage is ending")
        self._take_up(server)
        self.num_restarts += 1

    def _take_up(self, server: ChildServer) -> None:
        self._server, self._client = server, self._connect(server.url)
        self._watch = ServerWatch(server, self._client, every_s=self._every_s, timeout_s=self._timeout_s)

    async def _registered(self) -> bool:
        """Add and remove servers until they are the right ones; False when it does not do so, or is lost."""
        added: set[str] = set()  # each is asked for once, although a server may be lost, and have to go, meanwhile
        removed: set[str] = set()
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                while (servers := await self._client.servers()).keys() != (wanted := set(self.urls())):
                    for url in servers.keys() - wanted - removed:
                        removed.add(url)
                        await self._client.remove(servers[url])
                    for url in wanted - servers.keys() - added:
                        added.add(url)
                        await self._client.add(url)
                    await asyncio.sleep(POLL_S)
        except (SamplerLost, TimeoutError) as error:
            log.warning("The router (%s) could not be told its servers: %r", self.describe(), error)
            return False
        self._is_arranged = True
        log.info("The router (%s) has %d servers behind it.", self.describe(), len(servers))
        return True

    def describe(self) -> str:
        """Its process and its address, for a message."""
        return f"pid {self._server.pid}, {self._server.url}"

    def tail(self) -> str:
        """The end of its log."""
        return self._server.tail()

    def close(self) -> None:
        """End it for good."""
        self._is_closed = True
        self._server.stop()

    async def disconnect(self) -> None:
        """Close the connections to it."""
        await self._watch.leave()
        await self._client.close()
