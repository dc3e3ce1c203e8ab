"""The API as one ASGI application: `application(models, ...)`, and how uvicorn reads its requests."""

import asyncio
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, ExceptionHandler, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanodag.api.endpoints import Endpoints
from nanodag.api.metrics import AccessLog, Metrics
from nanodag.api.refusals import Refused, refusal_of
from nanodag.api.served_model import Limits, ServedModel
from nanodag.errors import SamplerError
from nanodag.inference.access_checks import HANDLERS, Doors, is_health

LOOK_EVERY_S = 30.0  # a request that is not whole at two looks in a row is given up


def application(
    models: Mapping[str, ServedModel],
    *,
    limits: Limits | None = None,
    keys: Collection[str] = (),
    names: Collection[str] = (),
    origins: Collection[str] = (),
    engine_routes: Sequence[BaseRoute] = (),
    metrics: Metrics | None = None,
    extra_routes: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """Serve these models by OpenAI's protocol.

    models: by name; the first answers requests that name none. keys: a request bears one of them as `Authorization:
    Bearer KEY`; none for no check. names: of this host, beside its addresses, localhost and what it is called: a
    request for another Host is refused. origins: of pages elsewhere that may ask (CORS). engine_routes: the engines'
    own protocol (`sglang_routes.py`). metrics: made for these models. extra_routes: more, such as a page; what is
    fetched from them by GET needs no key, since a browser cannot bear one there.
    """
    metrics, limits = metrics or Metrics(models), limits or Limits()
    endpoints = Endpoints(models, limits, metrics)
    routes = [*endpoints.routes(), *engine_routes, Route("/metrics", metrics.exposition, methods=["GET"])]

    async def health(http: HttpRequest) -> Response:
        """200 where every model would answer now."""
        down = [name for name, model in models.items() if not model.backend.is_ready]
        content = {"status": "starting" if down else "ok", "models": list(models), "down": down}
        return JSONResponse(content, status_code=503 if down else 200)

    def is_open(scope: Scope) -> bool:
        return is_health(scope) or (
            scope["method"] in ("GET", "HEAD")
            and any(route.matches(scope)[0] is Match.FULL for route in extra_routes)
            and not any(route.matches(scope)[0] is Match.FULL for route in routes)
        )

    starlette = Starlette(
        routes=[*routes, Route("/health", health, methods=["GET"]), *extra_routes], exception_handlers=EXCEPTIONS
    )
    doors: ASGIApp = Doors(
        starlette,
        names={socket.gethostname(), *names},
        keys=keys,
        max_body_bytes=limits.max_body_bytes,
        is_open=is_open,
        origins=origins,
    )
    if origins:
        doors = CORSMiddleware(
            doors,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return AccessLog(doors, metrics)


def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message: Any = f"{http.method} {http.url.path[:200]}: {error.detail}"
    return Refused(message, status=error.status_code, code="unknown_url").response()


# How each error is answered, by any application with these endpoints.
EXCEPTIONS: Mapping[Any, ExceptionHandler] = {
    **dict.fromkeys((Refused, SamplerError, TimeoutError, Exception), lambda http, error: refusal_of(error).response()),
    HTTPException: _http_error,
    **HANDLERS,
}


def quiet_server(app: ASGIApp, kind: type[uvicorn.Server] = uvicorn.Server, **settings: Any) -> uvicorn.Server:
    """A server inside another program: it logs warnings alone, and those as the program does. settings: uvicorn's."""
    config = uvicorn.Config(
        app, http=WholeRequests, lifespan="off", access_log=False, log_config=None, log_level="warning", **settings
    )
    return kind(config)


class WholeRequests(H11Protocol):
    """uvicorn's protocol, but that a connection is closed on which a request takes too long to arrive: uvicorn alone
    would keep it for ever."""

    _next_look: asyncio.TimerHandle
    _seen: Any = ""  # the cycle that was waited for at the last look; None is one: nothing was sent yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._next_look = self.loop.call_later(LOOK_EVERY_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        is_whole = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if not is_whole and self._seen is self.cycle:
            self.transport.close()
            return
        self._seen = "" if is_whole else self.cycle
        self._next_look = self.loop.call_later(LOOK_EVERY_S, self._look)
