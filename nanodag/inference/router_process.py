"""sglang-router in front of several SGLang servers: its process, and a client of it. No torch here."""

import math
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from pydantic_core import from_json

from nanodag.errors import SamplerLost
from nanodag.host.ports import free_port
from nanodag.inference.client import LOST, OK, SamplerClient
from nanodag.inference.sampler_process import ServerProcess, is_healthy
from nanodag.inference.sglang_options import Option, arguments
from nanodag.inference.sglang_process import foreign_environment

ENTRY = Path(__file__).with_name("router_entry.py")

# Its own thresholds leave a server idle until another one has 64 requests more, when prompts begin alike, as those of a
# chat template do. A request that fails is sent again by whoever sent it, who knows how often.
DEFAULTS: dict[str, Option] = {
    "balance-abs-threshold": 0,
    "balance-rel-threshold": 1.0,
    "disable-retries": True,
    "worker-startup-check-interval": 1,
    "log-level": "warn",
}


class RouterProcess(ServerProcess):
    """A running router, at first with no server behind it."""

    @classmethod
    def start(
        cls,
        python: Path,
        *,
        log_path: str | Path,
        request_timeout_s: float,
        options: Mapping[str, Option] | None = None,
        token: str = "",
        start_timeout_s: float = 120.0,
    ) -> "RouterProcess":
        """Start it and wait until it answers. Its output is appended to ``log_path``.

        python: the interpreter of SGLang's environment. options: further ones of the router's, by name. token: that
        its own requests to servers bear, and that those to it must bear.

        Raises SamplerLost, with the last lines of the log, if it ends or does not answer in time.
        """
        port = free_port()
        settings: dict[str, Option] = {
            "host": "127.0.0.1",
            "port": port,
            "prometheus-host": "127.0.0.1",  # else it listens on every interface
            "prometheus-port": free_port(),
            "request-timeout-secs": math.ceil(request_timeout_s),
            **DEFAULTS,
            **{name.replace("_", "-"): value for name, value in (options or {}).items()},
        }
        command = [str(python), str(ENTRY), *arguments(settings)]
        # It asks servers of this machine only, through no proxy, as the client does.
        environment = {k: v for k, v in foreign_environment().items() if not k.lower().endswith("_proxy")}
        url = f"http://127.0.0.1:{port}"
        router = cls.spawn(command, log_path=Path(log_path), env=environment, token=token, url=url)
        try:
            router.wait_until(lambda: is_healthy(f"{router.url}/liveness"), start_timeout_s)
        except BaseException:
            router.kill()
            raise
        return router


class RouterClient(SamplerClient):
    """Of a sampler's requests only ``generate`` is for a router, one prompt at once; the others go to the servers."""

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
