"""The routes of the chat page: its files, Markdown to HTML, and the tools. They are mounted beside the OpenAI API.

    GET  /              the page
    GET  /chat/NAME     its style and scripts
    GET  /chat/tools    what may be called: definitions as the OpenAI API has them, and why one cannot be used here
    POST /chat/render   {"text": Markdown} -> {"html": HTML}
    POST /chat/tool     {"name": ..., "arguments": JSON as the model wrote it} -> {"result": text, "failed": bool}

Only a script of the page itself is answered a POST: it must be JSON, which a form of another site cannot send, and its
Origin must be this server; an origin that `--cors` names may ask models, and run nothing. The application that these
are mounted in checks the Host, and a key where one is needed.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from nanodag.chat.tools import DEFAULT_TOOLS, FAILED, MAX_ROUNDS, TOOLS, call
from nanodag.chat.web.markdown import LONGEST, to_html

FOLDER = Path(__file__).parent
PAGE = "index.html"
MAX_BODY_BYTES = 8 * LONGEST  # a character takes 6 bytes at most, as JSON's \uXXXX
MAX_CALLS_WAITING = 16
# Nothing but this server's own files runs, is shown or is spoken to. `data:` is the icon of the tab.
POLICY = "; ".join(
    (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:",
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # another nanodag may serve others at the same address
}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class _Refused(Exception):
    """A request that is not answered. status: of HTTP."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def routes() -> list[Route]:
    """The routes of one application. Python that a model wrote runs in the sandbox, or is refused with the reason."""
    files = sorted(path.name for path in FOLDER.iterdir() if path.suffix in TYPES)
    return [
        Route("/", _file(PAGE), methods=["GET"]),
        *(Route(f"/chat/{name}", _file(name), methods=["GET"]) for name in files if name != PAGE),
        Route("/chat/tools", _tools, methods=["GET"]),
        Route("/chat/render", _json(_render), methods=["POST"]),
        Route("/chat/tool", _json(_Calls().answer), methods=["POST"]),
    ]


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    path = FOLDER / name

    async def answer(request: Request) -> Response:
        return FileResponse(path, media_type=TYPES[path.suffix], headers=HEADERS)

    return answer


async def _tools(request: Request) -> Response:
    reasons = await asyncio.to_thread(lambda: {name: tool.why_not() for name, tool in TOOLS.items()})
    tools = [
        {"definition": tool.definition(), "why_not": reasons[name], "is_default": name in DEFAULT_TOOLS}
        for name, tool in TOOLS.items()
    ]
    return JSONResponse({"tools": tools, "max_rounds": MAX_ROUNDS}, headers=HEADERS)


async def _render(body: dict[str, Any]) -> dict[str, Any]:
    text = _text_of(body, "text")
    try:
        return {"html": await asyncio.to_thread(to_html, text)}
    except ValueError as error:
        raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from error


class _Calls:
    """Runs the calls of one application, of which only so many may wait for each other."""

    def __init__(self) -> None:
        self._num_waiting = 0

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        name, arguments = _text_of(body, "name"), _text_of(body, "arguments")
        if self._num_waiting >= MAX_CALLS_WAITING:
            message = f"{self._num_waiting} calls of tools wait already; try again in a while"
            raise _Refused(HTTPStatus.TOO_MANY_REQUESTS, message)
        self._num_waiting += 1
        try:
            result = await asyncio.to_thread(call, name, arguments)
        finally:
            self._num_waiting -= 1
        return {"result": result, "failed": result.startswith(FAILED)}


def _json(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint that reads a body, and writes what `answer` makes of it."""

    async def endpoint(request: Request) -> Response:
        try:
            _check_sender(request)
            return JSONResponse(await answer(await _body(request)), headers=HEADERS)
        except _Refused as refused:
            error = {"message": str(refused), "type": "invalid_request_error", "param": None, "code": None}
            return JSONResponse({"error": error}, refused.status, headers=HEADERS)

    return endpoint


def _check_sender(request: Request) -> None:
    """Raises _Refused for what a page of another site could have sent."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type must be application/json; found {kind!r}")
    origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
    if not host or urlsplit(origin).netloc != host:
        raise _Refused(HTTPStatus.FORBIDDEN, f"Origin must be this server, {host}; found {origin!r}")


async def _body(request: Request) -> dict[str, Any]:
    """Raises _Refused for what is too long or no JSON object."""
    read = bytearray()
    async for piece in request.stream():
        read += piece
        if len(read) > MAX_BODY_BYTES:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(read)
    except (ValueError, RecursionError) as error:
        raise _Refused(HTTPStatus.BAD_REQUEST, "the body is no JSON") from error
    if not isinstance(body, dict):
        raise _Refused(HTTPStatus.BAD_REQUEST, "the body must be an object")
    return body


def _text_of(body: dict[str, Any], name: str) -> str:
    text = body.get(name)
    if not isinstance(text, str):
        raise _Refused(HTTPStatus.BAD_REQUEST, f"{name} must be a text; found {type(text).__name__}")
    # Half a pair of UTF-16, which JSON may name and no encoding can write.
    return text.encode("utf-8", "replace").decode("utf-8")
