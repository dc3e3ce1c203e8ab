"""sglang-router before a fleet, kept alive: a fleet's option. Requests for generation go through it. No torch here."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

from pydantic_core import from_json

from nanodag.engines.replica import NO_FOLDER
from nanodag.engines.roster import Roster
from nanodag.engines.start import ServerProcess, foreign_environment, is_healthy
from nanodag.engines.watch import ChildServer
from nanodag.errors import BadRequest, SamplerError, SamplerLost
from nanodag.errors.words import counted
from nanodag.host.ports import LOOPBACK, free_port
from nanodag.inference.client import LOST, OK, SamplerClient
from nanodag.inference.protocol import Completion, Request
from nanodag.inference.sglang_options import Option, arguments

log = logging.getLogger(__name__)

ENTRY = Path(__file__).with_name("router_entry.py")
POLL_S = 0.02
REGISTER_TIMEOUT_S = 60.0
MOMENT_S = 0.25  # for a server that ended to be seen to have ended; doubled at each attempt

# Its own thresholds leave a server idle until another one has 64 requests more, when prompts begin alike, as those of a
# chat template do. A request that fails is sent again by whoever sent it, who knows how often.
DEFAULTS: dict[str, Option] = {
    "balance-abs-threshold": 0,
    "balance-rel-threshold": 1.0,
    "disable-retries": True,
    "worker-startup-check-interval": 1,
    "log-level": "warn",
}


def start_router(
    python: Path,
    *,
    log_path: str | Path,
    request_timeout_s: float,
    options: Mapping[str, Option] | None = None,
    token: str = "",
    start_timeout_s: float = 120.0,
) -> ServerProcess:
    """Start a router with no server behind it, and wait until it answers. Its output is appended to ``log_path``.

    python: the interpreter of SGLang's environment. options: further ones of the router's, by name. token: that its own
    requests to servers bear, and that those to it must bear.

    Raises SamplerLost, with the last lines of the log, if it ends or does not answer in time.
    """
    port = free_port()
    settings: dict[str, Option] = {
        "host": LOOPBACK,
        "port": port,
        "prometheus-host": LOOPBACK,  # else it listens on every interface
        "prometheus-port": free_port(),
        "request-timeout-secs": math.ceil(request_timeout_s),
        **DEFAULTS,
        **{name.replace("_", "-"): value for name, value in (options or {}).items()},
    }
    # It asks servers of this machine only, through no proxy, as the client does.
    environment = {k: v for k, v in foreign_environment().items() if not k.lower().endswith("_proxy")}
    command, url = [str(python), str(ENTRY), *arguments(settings)], f"http://{LOOPBACK}:{port}"
    router = ServerProcess.spawn(command, log_path=Path(log_path), env=environment, token=token, url=url)
    try:
        router.wait_until(lambda: is_healthy(f"{url}/liveness"), start_timeout_s)
    except BaseException:
        router.kill()
        raise
    return router


class RouterClient(SamplerClient):
    """Client of a router. Only ``generate`` is for it, one prompt at once; other requests go to the servers."""

    async def health(self, *, generates: bool = True) -> bool:
        """True: it answers, whatever the servers behind it do. Raises SamplerLost if it does not."""
        return await self._is_well("/liveness")

    async def servers(self) -> dict[str, str]:
        """The servers behind it: its own name for each, by URL."""
        workers = from_json(await self._call("GET", "/workers"))["workers"]
        return {str(worker["url"]): str(worker["id"]) for worker in workers}

    async def add(self, url: str) -> None:
        """Begin to add a server; it is among ``servers`` once the router has reached it."""
        await self._accepted("POST", "/workers", {"url": url} | ({"api_key": self.token} if self.token else {}))

    async def remove(self, name: str) -> None:
        """Begin to remove a server; nothing is sent to it once it is no longer among ``servers``."""
        await self._accepted("DELETE", f"/workers/{name}")

    async def _accepted(self, method: str, path: str, body: dict[str, str] | None = None) -> None:
        try:
            async with self._http.request(method, self.url + path, json=body) as response:
                text = await response.text(errors="replace")
        except LOST as error:
            raise self._lost(path, error) from error
        if response.status not in (OK, HTTPStatus.ACCEPTED, HTTPStatus.NOT_FOUND):
            raise SamplerLost(f"{path} of the router at {self.url} answered {response.status}: {text}")


class Router(Roster):
    """A router is kept alive as an engine is. server: a running one. launch: starts another, blocks, raises SamplerLost
    with the end of the log. connect, max_restarts and the others: as of `Fleet`."""

    def __init__(
        self,
        server: ChildServer,
        *,
        launch: Callable[[], ChildServer],
        connect: Callable[[str], RouterClient],
        max_restarts: int = 3,
        health_every_s: float = 5.0,
        health_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(
            model=NO_FOLDER,
            version=0,
            launch=lambda number, folder, version: launch(),
            connect=connect,
            name="Router",
            max_restarts=max_restarts,
            is_stopping=lambda: False,
            health_every_s=health_every_s,
            health_timeout_s=health_timeout_s,
            is_watched_idle=False,
            external=None,
        )
        self._restarts_each = max_restarts
        self._lock = asyncio.Lock()
        self._is_arranged = False
        self._sent: dict[str, str] = {}  # rid -> the name under which the router has it
        self.add([server])

    def rid_there(self, rid: str) -> str:
        """The name under which the engines have a request that is given up."""
        return self._sent.pop(rid, rid)

    async def generate(self, requests: Sequence[Request], fleet: Roster) -> list[list[Completion]]:
        """For each prompt its `params.n` completions. A request that fails is sent again, with another rid: a paused
        server may still hold the request of a router that died, and SGLang refuses a second request of the same rid."""
        for attempt in range(self._restarts_each + 1):
            await fleet.choose()
            named = [_of_attempt(request, attempt) for request in requests]
            pairs = zip(requests, named, strict=True)
            self._sent.update({old.rid: new.rid for old, new in pairs if old.rid and new.rid})
            work: Awaitable[list[list[Completion]]] = self.ask(named, fleet)
            for replica in fleet.replicas:
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
            for replica in fleet.replicas:
                if not replica.server.is_alive:
                    fleet.noticed(replica, replica.server, SamplerLost(str(failure)))
            self.disarrange()
        raise SamplerLost(
            f"A prompt failed {counted(self._restarts_each + 1, 'time')} behind the router, the last time: {failure}. "
            f"The end of the router's log:\n{self.replicas[0].server.tail()}"
        ) from failure

    async def ask(self, requests: Sequence[Request], fleet: Roster) -> list[list[Completion]]:
        """The same once. Raises SamplerError when the router or a server behind it fails."""
        client = await self.with_servers_of(fleet)
        asked = asyncio.gather(*(client.generate([request]) for request in requests))
        return [group for (group,) in await self.replicas[0].watched(asked)]

    def disarrange(self) -> None:
        """Note that the servers are others now, or that the router may be gone."""
        self._is_arranged = False

    async def with_servers_of(self, fleet: Roster) -> RouterClient:
        """Have it run, with a fleet's servers behind it and no others. Raises SamplerLost when that cannot be."""
        async with self._lock:
            while True:
                replica = await self.choose()
                server, client = replica.server, replica.client
                assert isinstance(client, RouterClient)
                if self._is_arranged:
                    return client
                try:
                    await self._register(client, fleet)
                except (SamplerLost, TimeoutError) as error:
                    lost = SamplerLost(f"it could not be told its servers: {error!r}")
                    self.lost(replica, server, lost)
                else:
                    self._is_arranged = True

    async def _register(self, client: RouterClient, fleet: Roster) -> None:
        """Add and remove servers until they are the right ones. Raises SamplerLost, TimeoutError."""
        added: set[str] = set()  # each is asked for once, although a server may be lost, and have to go, meanwhile
        removed: set[str] = set()
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            while (servers := await client.servers()).keys() != (urls := {r.server.url for r in fleet.up}):
                for url in servers.keys() - urls - removed:
                    removed.add(url)
                    await client.remove(servers[url])
                for url in urls - servers.keys() - added:
                    added.add(url)
                    await client.add(url)
                await asyncio.sleep(POLL_S)
        log.info("%s has %d servers behind it.", self.replicas[0].name, len(servers))


def _of_attempt(request: Request, attempt: int) -> Request:
    if request.rid is None or attempt == 0:
        return request
    return replace(request, rid=f"{request.rid}-attempt-{attempt + 1}")
