"""The routes of the chat page: its files, Markdown to HTML, and the tools. They are mounted beside the OpenAI API.

    GET  /              the page
    GET  /chat/NAME     its style and scripts
    GET  /chat/tools    what may be called: definitions as the OpenAI API has them, and why one cannot be used here
    POST /chat/render   {"text": Markdown} -> {"html": HTML}
    POST /chat/tool     {"name": ..., "arguments": JSON as the model wrote it} -> {"result": text, "failed": bool}
    POST /chat/about    {} -> {"models": name -> what facts.py says of it, "ratings": where they are kept, or ""}
    POST /chat/rate     {"id", "kind", "row"} as keep_rating has them -> {"file": path, "count": how many rows it has}

Only a script of the page itself is answered a POST: it must be JSON, which a form of another site cannot send, and its
Origin must be this server; an origin that `--cors` names may ask models, and run nothing. The application that these
are mounted in checks the Host, and a key where one is needed.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from nanodag.api.refusals import Refused
from nanodag.chat.tools import DEFAULT_TOOLS, DEFINITIONS, FAILED, MAX_ROUNDS, TOOLS, call, why_not
from nanodag.data.adapters import open_adapter
from nanodag.errors import SourceError
from nanodag.host.beside import table_beside
from nanodag.store.atomic import locked, write_bytes

FOLDER = Path(__file__).parent
PAGE = "index.html"
LONGEST = 32 << 10  # characters of Markdown; a fifth of a second of CPU for the worst that was tried
MAX_BODY_BYTES = 8 * LONGEST  # a character takes 6 bytes at most, as JSON's \uXXXX
MAX_CALLS_WAITING = 16
RATED = ("pairs", "thumbs")  # in a file each, of rows that a stage of kind `preference` reads; thumbs by loss=kto alone
RATING_ID = re.compile(r"[\w-]{1,100}", re.ASCII)
MAX_RATED_BYTES = 32 << 20  # of a file; it is written anew for each rating
LOCK_S = 10.0
HEADERS: dict[str, str] = table_beside(__file__, "headers.yaml")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def routes(about: Mapping[str, Any] = {}, ratings: Path | None = None) -> list[Route]:
    """The routes of one application. Python that a model wrote runs in the sandbox, or is refused with the reason.
    about: facts of models by their names. ratings: how the paths of their files begin; None where none are kept."""

    places = asyncio.Semaphore(MAX_CALLS_WAITING)

    async def tool(body: dict[str, Any]) -> dict[str, Any]:
        name, arguments = _text_of(body, "name"), _text_of(body, "arguments")
        if places.locked():
            message = f"{MAX_CALLS_WAITING} calls of tools wait already; try again in a while"
            raise Refused(message, status=HTTPStatus.TOO_MANY_REQUESTS)
        async with places:
            result = await asyncio.to_thread(call, name, arguments)
        return {"result": result, "failed": result.startswith(FAILED)}

    async def facts(body: dict[str, Any]) -> dict[str, Any]:
        return {"models": about, "ratings": str(ratings or "")}

    async def rate(body: dict[str, Any]) -> dict[str, Any]:
        if ratings is None:
            raise Refused("this server keeps no ratings: start it with nanodag chat --web, or nanodag serve")
        return await asyncio.to_thread(keep_rating, body, ratings)

    files = sorted(path.name for path in FOLDER.iterdir() if path.suffix in TYPES)
    return [
        Route("/", _file(PAGE), methods=["GET"]),
        *(Route(f"/chat/{name}", _file(name), methods=["GET"]) for name in files if name != PAGE),
        Route("/chat/tools", _tools, methods=["GET"]),
        Route("/chat/render", _json(_render), methods=["POST"]),
        Route("/chat/tool", _json(tool), methods=["POST"]),
        Route("/chat/about", _json(facts), methods=["POST"]),
        Route("/chat/rate", _json(rate), methods=["POST"]),
    ]


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    path = FOLDER / name

    async def answer(request: Request) -> Response:
        return FileResponse(path, media_type=TYPES[path.suffix], headers=HEADERS)

    return answer


async def _tools(request: Request) -> Response:
    reasons = await asyncio.to_thread(lambda: {name: why_not(name) for name in TOOLS})
    tools = [
        {"definition": DEFINITIONS[name], "why_not": why, "is_default": name in DEFAULT_TOOLS}
        for name, why in reasons.items()
    ]
    return JSONResponse({"tools": tools, "max_rounds": MAX_ROUNDS}, headers=HEADERS)


async def _render(body: dict[str, Any]) -> dict[str, Any]:
    return {"html": await asyncio.to_thread(to_html, _text_of(body, "text"))}


def _json(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint that reads a body, and writes what `answer` makes of it."""

    async def endpoint(request: Request) -> Response:
        try:
            _check_sender(request)
            return JSONResponse(await answer(await _body(request)), headers=HEADERS)
        except Refused as refused:
            return JSONResponse(refused.content(), refused.status, headers=HEADERS)

    return endpoint


def _check_sender(request: Request) -> None:
    """Raises Refused for what a page of another site could have sent."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"Content-Type must be application/json; found {kind!r}"
        raise Refused(message, status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
    if not host or urlsplit(origin).netloc != host:
        raise Refused(f"Origin must be this server, {host}; found {origin!r}", status=HTTPStatus.FORBIDDEN)


async def _body(request: Request) -> dict[str, Any]:
    """Raises Refused for what is too long or no JSON object."""
    if len(content := await request.body()) > MAX_BODY_BYTES:  # the application reads no endless one
        raise Refused(f"a body has at most {MAX_BODY_BYTES} bytes", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused("the body is no JSON") from error
    if not isinstance(body, dict):
        raise Refused("the body must be an object")
    return body


def _text_of(body: dict[str, Any], name: str) -> str:
    text = body.get(name)
    if not isinstance(text, str):
        raise Refused(f"{name} must be a text; found {type(text).__name__}")
    # Half a pair of UTF-16, which JSON may name and no encoding can write.
    return text.encode("utf-8", "replace").decode("utf-8")


class _Renderer(RendererHTML):
    def link_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        tokens[idx].attrSet("target", "_blank")
        tokens[idx].attrSet("rel", "noopener noreferrer nofollow")
        return self.renderToken(tokens, idx, options, env)


class _Reader(MarkdownIt):
    """Reads Markdown that a model wrote: no HTML of its own, no image, no link but to the web. A block nested deeper
    than markdown-it's 20 levels is left out."""

    def __init__(self) -> None:
        # Line ends stay line ends: models write verses and lists without Markdown's two spaces.
        super().__init__("commonmark", {"html": False, "breaks": True}, renderer_cls=_Renderer)
        self.enable(["table", "strikethrough"])
        self.disable("image")  # what is left of one is a link to it

    def validateLink(self, url: str) -> bool:
        return re.match(r"(?:https?://|mailto:)", url, re.IGNORECASE) is not None


_READER = _Reader()


def to_html(text: str) -> str:
    """Markdown as HTML that cannot do anything. Raises Refused for a text of more than LONGEST characters."""
    if len(text) > LONGEST:
        message = f"the text has {len(text)} characters, and {LONGEST} are rendered at most"
        raise Refused(message, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return _READER.render(text)


def keep_rating(body: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write a rating into PATH.pairs.jsonl or PATH.thumbs.jsonl, whose old or new content is there at any instant.
    Returns the file and how many rows it has. Raises Refused for what is no rating, and for a file that is full.

    body: id, of what is rated: a later rating of it replaces the earlier one; kind; row, as the adapter `preference`
    reads it, None to take the rating back.
    """
    rating_id, kind, row = (body.get(name) for name in ("id", "kind", "row"))
    if not (isinstance(rating_id, str) and RATING_ID.fullmatch(rating_id) and kind in RATED):
        raise Refused(f"a rating has an id of up to 100 letters, and a kind of {' or '.join(RATED)}", param="id")
    file, begin = path.with_name(f"{path.name}.{kind}.jsonl"), f'{{"id": "{rating_id}", '.encode()
    new = [] if row is None else [_rated_line(rating_id, row, kind)]
    with locked(file.with_suffix(".lock"), timeout_s=LOCK_S):
        before = file.read_bytes().splitlines() if file.exists() else []
        lines = [*(line for line in before if not line.startswith(begin)), *new]
        content = b"".join(line + b"\n" for line in lines)
        if len(content) > MAX_RATED_BYTES:
            raise Refused(f"{file} is full: move it elsewhere, and rate on", status=507)
        write_bytes(file, content)
    return {"file": str(file), "count": len(lines)}


def _rated_line(rating_id: str, row: Any, kind: str) -> bytes:
    """The row with its id, once the adapter has read it. Raises Refused for what it cannot read, or UTF-8 hold."""
    columns = ("chosen", "rejected") if kind == "pairs" else ("completion", "label")
    try:
        kept = {name: row[name] for name in ("prompt", *columns, "models")}
        open_adapter("preference", "rating", "preference" if kind == "pairs" else "judgement", {})(0, kept)
        line = json.dumps({"id": rating_id, **kept}, ensure_ascii=False).encode()
    except (SourceError, LookupError, TypeError, UnicodeError) as error:
        raise Refused(f"this is no row of {kind}: {error!s:.300}", param="row") from error
    return line
