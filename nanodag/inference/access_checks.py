"""Checks on who may ask a server of ours, and for how much: made before anything of a request's body is read; where it
listens; and clients that leave before their answer is there, or do not read it. No torch.

A server on loopback is within reach of every process of the machine, and of every web page that a browser there shows.
So: the Host must be this machine's (a name that a page made point here is refused), no request may come from a page of
another origin that is not named, and where keys were set each request but those for health must bear one, as with
SGLang's --api-key. The bytes of a body are limited, and counted as they come.
"""

import asyncio
import hmac
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanodag.errors import ConfigError
from nanodag.host.threads import cancelled
from nanodag.inference.protocol import Body, json_object, parse_body

log = logging.getLogger(__name__)

DEFAULT_MAX_BODY_BYTES = 16 << 20
CLIENT_CLOSED_REQUEST = 499  # the status of a reply that nobody reads
READING_S = 30.0  # that a client may take to read an answer which has ended
OPEN_PATHS = ("/health", "/health_generate")
T = TypeVar("T")


def bound_socket(host: str, port: int, family: int = socket.AF_UNSPEC) -> socket.socket:
    """A bound socket, which listens only when all is ready. Raises ConfigError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]
        # Its protocol is named, because asyncio switches Nagle's algorithm off only then: it costs 40 ms an answer.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"Port {port} of {host} cannot be had ({error.strerror or error}); choose another with --port."
        ) from error
    return listener


def is_health(scope: Scope) -> bool:
    """True when a request asks for health only."""
    return scope["path"] in OPEN_PATHS


@dataclass(eq=False)
class Doors:
    """An application behind these checks.

    names: of this machine, beside its addresses. keys: a request bears one of them; none for no check. is_open: the
    requests that need no key. origins: of pages that may ask, beside the server's own.
    """

    app: ASGIApp
    _: KW_ONLY
    names: Collection[str]
    keys: Collection[str]
    max_body_bytes: int
    is_open: Callable[[Scope], bool] = is_health
    origins: Collection[str] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            return await refusal(scope, receive, send)
        await self.app(scope, self._limited(receive), send)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(host):
            return _refused(421, f"Host {host[:80]!r} is not this server's; ask for it by its address")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}", *self.origins):
            return _refused(403, f"a page of {origin[:80]!r} may not ask this server")
        sent = headers.get("authorization", "").encode()
        is_one_of_them = any([hmac.compare_digest(sent, f"Bearer {key}".encode()) for key in self.keys])
        if self.keys and not self.is_open(scope) and not is_one_of_them:
            message = "this server wants its token: Authorization: Bearer TOKEN"
            return _refused(401, message, kind="authentication_error", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.max_body_bytes:
            return self._too_large(f"{length[:20]} bytes")
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name != "localhost" and name not in self.names:
                ipaddress.ip_address(name)  # any address is ours
        except ValueError:  # of either: it is no address
            return False
        return True

    def _limited(self, receive: Receive) -> Receive:
        """Raises TooLarge in the middle of a body that says nothing, or too little, of its length."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_body_bytes:
                raise TooLarge(self._too_large("more"))
            return message

        return counted

    def _too_large(self, found: str) -> JSONResponse:
        return _refused(
            413, f"the body has {found}, above {self.max_body_bytes}: send less at once, or raise --max-body-bytes"
        )


class TooLarge(Exception):
    """A body is above the limit. response: the answer."""

    def __init__(self, response: JSONResponse) -> None:
        super().__init__("the body is too large")
        self.response = response


def _refused(
    status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None
) -> JSONResponse:
    content = {"error": {"message": message, "type": kind, "param": None, "code": code}}  # as OpenAI has it
    # The rest of the body is not read, so the connection is of no further use.
    return JSONResponse(content, status_code=status, headers={"connection": "close"})


class Left(Exception):
    """The client has gone."""


async def unless_left(http: HttpRequest, work: Awaitable[T]) -> T:
    """The result of work for a request whose body was read. Raises Left, and ends the work, when the client leaves."""
    running = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait([running, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise Left
        return running.result()
    finally:
        await cancelled(running, leaving)


HANDLERS: Mapping[Any, Any] = {
    TooLarge: lambda http, error: error.response,
    **dict.fromkeys((ClientDisconnect, Left), lambda http, error: Response(status_code=CLIENT_CLOSED_REQUEST)),
}
"""Answers of any server of ours to a body above its limit, and to a client that has gone."""


async def _left(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def left_unless_read(answering_s: float) -> AsyncIterator[None]:
    """Send a reply in here: a client that reads no longer, and does not leave, is left. answering_s: what the answer
    itself may take."""
    limit_s = answering_s + READING_S
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        log.warning("A client read nothing of its answer for %g s and was left.", limit_s)


def routes(method: str, endpoints: Iterable[Callable]) -> list[Route]:
    """Routes to endpoints, each under its function's name."""
    return [Route(f"/{endpoint.__name__}", endpoint, methods=[method]) for endpoint in endpoints]


async def body_of(http: HttpRequest, model: type[Body]) -> Body:
    """The validated body of a request; an empty one counts as {}. Raises BadRequest with what is wrong."""
    raw = await http.body()
    return parse_body(model, json_object(raw) if raw else {})
