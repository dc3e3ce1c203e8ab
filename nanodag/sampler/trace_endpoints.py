"""POST /start_profile and /stop_profile, as SGLang has them: torch's trace of the engine's thread, into a folder."""

import os
from contextlib import ExitStack
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from nanodag.errors import BadRequest
from nanodag.inference.protocol import StartProfileBody, StopProfileBody
from nanodag.sampler.device import traced
from nanodag.sampler.in_flight import Traffic, body_of


class TraceEndpoints:
    """One trace at a time. It is of the thread that runs the engine, which starts and ends it between two steps."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._trace: ExitStack | None = None

    def routes(self) -> list[Route]:
        endpoints = (self.start_profile, self.stop_profile)
        return [Route(f"/{endpoint.__name__}", endpoint, methods=["POST"]) for endpoint in endpoints]

    async def start_profile(self, http: HttpRequest) -> Response:
        """Begin a trace. The folder must be there: nobody makes one through this door."""
        folder = Path((await body_of(http, StartProfileBody)).output_dir)
        if self._trace is not None:
            raise BadRequest("a trace is under way; end it with /stop_profile first")
        if not folder.is_absolute() or not folder.is_dir():
            raise BadRequest(f"output_dir {str(folder)!r:.200} is not the absolute path of a folder")
        trace = self._trace = ExitStack()
        path = folder / f"sampler-{os.getpid()}.trace.json.gz"
        await self._traffic.in_loop(lambda: trace.enter_context(traced(path)))
        return PlainTextResponse("Start profiling.\n")

    async def stop_profile(self, http: HttpRequest) -> Response:
        """End it, and write its file."""
        await body_of(http, StopProfileBody)
        if self._trace is None:
            raise BadRequest("no trace is under way; begin one with /start_profile")
        trace, self._trace = self._trace, None
        await self._traffic.in_loop(trace.close)
        return PlainTextResponse("Stop profiling.\n")
