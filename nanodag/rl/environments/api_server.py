"""One server of the OpenAI API for the agents of all samples, in a thread of the controller.

It listens on loopback, and on a Unix socket for programs in the sandbox, which have no network. A key names its sample.
Keys are random, so none is guessed; one whose sample has ended is answered 410. Beside OpenAI's endpoints there are
/v1/reward and /v1/answer (docs/how-to/environment.md).
"""

import asyncio
import atexit
import secrets
import socket
from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nanodag.api.application import EXCEPTIONS, quiet_server
from nanodag.api.refusals import Refused
from nanodag.host.folders import Scratch
from nanodag.host.ports import LOOPBACK
from nanodag.host.threads import MadeOnce
from nanodag.inference.access_checks import DEFAULT_MAX_BODY_BYTES, Doors
from nanodag.inference.protocol import json_object
from nanodag.rl.environments.agent_session import Session, gone
from nanodag.rl.environments.runner import turns_loop

POST = ["POST"]
KEYS_REMEMBERED = 100_000  # of samples that have ended
BACKLOG = 1024
MAX_ANSWER = 1 << 20
KEEP_ALIVE_S = 3600  # an agent may think for long between two calls, and not ask again where a connection has ended


class ApiServer:
    """The server. It belongs to the event loop of all turns, and so do sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, None] = {}  # in the order in which they ended
        listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        self.port = int(listener.getsockname()[1])
        self.base_url = f"http://{LOOPBACK}:{self.port}/v1"
        self._app = Doors(self._application(), names=(), keys=(), max_body_bytes=DEFAULT_MAX_BODY_BYTES)
        self._listen(listener)

    def admit(self, session: Session) -> str:
        """Register a session; returns its API key."""
        key = f"nanodag-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        return key

    def dismiss(self, key: str) -> None:
        self._sessions.pop(key).end()
        self._ended[key] = None
        if len(self._ended) > KEYS_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    @cached_property
    def socket_path(self) -> Path:
        """The Unix socket on which it listens, too, once this was asked for. Anybody on the machine may connect to it,
        as to the port: the key counts."""
        scratch = Scratch("agents")
        atexit.register(scratch.cleanup)
        scratch.path.chmod(0o755)  # programs in the sandbox are another user's, where this process is root's
        path = scratch.path / "api"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(BACKLOG)
        self._listen(listener)
        return path

    def _listen(self, listener: socket.socket) -> None:
        server = quiet_server(self._app, timeout_keep_alive=KEEP_ALIVE_S)
        asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), turns_loop().loop)

    def _application(self) -> Starlette:
        def of_session(work: Callable[[Session, HttpRequest], Awaitable[Response]]) -> Any:
            async def endpoint(http: HttpRequest) -> Response:
                return await work(self._session_of(http), http)

            return endpoint

        return Starlette(
            routes=[
                Route("/v1/models", of_session(lambda one, http: one.endpoints().list_models(http))),
                Route("/v1/models/{name:path}", of_session(lambda one, http: one.endpoints().one_model(http))),
                Route("/v1/chat/completions", of_session(lambda one, http: one.endpoints().chat(http)), methods=POST),
                Route("/v1/completions", of_session(lambda one, http: one.endpoints().completions(http)), methods=POST),
                Route("/v1/reward", of_session(_reward), methods=POST),
                Route("/v1/answer", of_session(_answer), methods=POST),
            ],
            exception_handlers=EXCEPTIONS,
        )

    def _session_of(self, http: HttpRequest) -> Session:
        """The session that the request's key names. Raises Refused where there is none."""
        key = http.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key in self._sessions:
            return self._sessions[key]
        if key in self._ended:
            raise gone()
        raise Refused(
            "this key names no sample: use the one that the agent was given (api_key, or OPENAI_API_KEY)",
            status=401, kind="authentication_error", code="invalid_api_key",
        )  # fmt: skip


@MadeOnce
def the_api_server() -> ApiServer:
    """This process's server, started at the first call."""
    return ApiServer()


async def _reward(session: Session, http: HttpRequest) -> Response:
    body = await _object(http, {"reward", "components"})
    try:
        session.report(body.get("reward"), body.get("components"))
    except ValueError as error:
        raise Refused(str(error), param="reward") from error
    return JSONResponse({})


async def _answer(session: Session, http: HttpRequest) -> Response:
    body = await _object(http, {"answer"})
    if not isinstance(body.get("answer"), str) or len(body["answer"]) > MAX_ANSWER:
        raise Refused(f"answer must be a text of at most {MAX_ANSWER} characters", param="answer")
    session.answer = body["answer"]
    return JSONResponse({})


async def _object(http: HttpRequest, names: set[str]) -> dict[str, Any]:
    body = json_object(await http.body())
    if not body.keys() <= names:
        raise Refused(f"the body must be a JSON object with {' and '.join(sorted(names))}")
    return body
