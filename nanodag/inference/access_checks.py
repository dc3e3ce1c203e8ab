"""Checks on who may ask a server of ours, and for how much: made before anything of a request's body is read. No torch.

A server on loopback is within reach of every process of the machine, and of every web page that a browser there shows.
So: the Host must be this machine's (a name that a page made point here is refused), no request may come from a page of
another origin that is not named, and where keys were set each request but those for health must bear one, as with
SGLang's --api-key. The bytes of a body are limited, and counted as they come.
"""

import hmac
import ipaddress
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

DEFAULT_MAX_BODY_BYTES = 16 << 20
OPEN_PATHS = ("/health", "/health_generate")


def is_health(scope: Scope) -> bool:
    """True when a request asks for health only."""
    return scope["path"] in OPEN_PATHS


class Doors:
    """An application behind these checks.

    names: of this machine, beside its addresses. keys: a request bears one of them; none for no check. is_open: the
    requests that need no key. origins: of pages that may ask, beside the server's own.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        names: Collection[str],
        keys: Collection[str],
        max_body_bytes: int,
        is_open: Callable[[Scope], bool] = is_health,
        origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._names = {"localhost", *names}
        self._keys = [f"Bearer {key}".encode() for key in keys]
        self._max_body_bytes = max_body_bytes
        self._is_open = is_open
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            return await refusal(scope, receive, send)
        await self._app(scope, self._limited(receive), send)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(host):
            return _refused(421, f"Host {host[:80]!r} is not this server's; ask for it by its address")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}", *self._origins):
            return _refused(403, f"a page of {origin[:80]!r} may not ask this server")
        sent = headers.get("authorization", "").encode()
        if self._keys and not self._is_open(scope) and not any([hmac.compare_digest(sent, k) for k in self._keys]):
            message = "this server wants its token: Authorization: Bearer TOKEN"
            return _refused(401, message, kind="authentication_error", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._max_body_bytes:
            return self._too_large(f"{length[:20]} bytes")
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name not in self._names:
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
            if num_bytes > self._max_body_bytes:
                raise TooLarge(self._too_large("more"))
            return message

        return counted

    def _too_large(self, found: str) -> JSONResponse:
        return _refused(
            413, f"the body has {found}, above {self._max_body_bytes}: send less at once, or raise --max-body-bytes"
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
