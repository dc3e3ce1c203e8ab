"""An OpenAI API with models that say what a test asks for, beside the routes of the chat page.

What the last user message says decides: `long` is streamed slowly, `markup` is hostile Markdown and `page` a friendly
one, `hostile` has a line of 300 kB, `think` thinks first, `sum`, `program` and `loop` call tools, `lost` ends in the
middle, `full` has room for one question alone. Anything else is answered with how it was asked.
"""

import asyncio
import json
import math
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanodag.chat.web.routes import routes

MARKUP = """Look: <script>window.owned = 1</script> <img src=x onerror="window.owned = 2">

[press](javascript:window.owned=3) and [elsewhere](https://example.org/)

![picture](https://example.org/a.png)

```html
<script>window.owned = 4</script>
```
"""
PAGE = """## What there is to see

A **bold** claim, `code`, and a list:

1. first
2. second, with a [link](https://example.org/)

```python
def area(radius: float) -> float:
    return math.pi * radius**2  # of a circle
```

| model | score |
|---|---|
| sft | 0.31 |
| rl | 0.52 |

> A quotation stands here.
"""
CALLS = {
    "sum": ("calculator", {"expression": "12*34"}),
    "loop": ("calculator", {"expression": "1+1"}),
    "program": ("python", {"program": "print(sum(range(10)))"}),
}


class FakeApi:
    """models: the names served. key: that it wants, empty for none. asked: the bodies that came. about, ratings: as the
    routes of the page take them."""

    def __init__(self, *models: str, key: str = "", about: Any = None, ratings: Path | None = None) -> None:
        self.models, self.key, self.about, self.ratings = models, key, about or {}, ratings
        self.asked: list[dict[str, Any]] = []
        self.num_left = 0  # answers whose reader went before their end

    def app(self) -> Starlette:
        own = [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/chat/completions", self._answer, methods=["POST"]),
        ]
        return Starlette(routes=[*own, *routes(self.about, self.ratings)])

    def _refusal(self, request: Request) -> Response | None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return _error(401, "the key is wrong", "invalid_api_key")
        return None

    async def _models(self, request: Request) -> Response:
        data = [{"id": name, "object": "model"} for name in self.models]
        return self._refusal(request) or JSONResponse({"object": "list", "data": data})

    async def _answer(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        body = await request.json()
        self.asked.append(body)
        asked = [message["content"] for message in body["messages"] if message["role"] == "user"]
        if asked[-1] == "full" and len(asked) > 1:
            return _error(400, "the context is full", "context_length_exceeded")
        if body.get("tools") and body["model"] == "plain":
            return _error(400, "plain knows no tools: leave tools out", None, param="tools")
        return StreamingResponse(self._events(body, asked), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any], asked: list[str]) -> AsyncIterator[str]:
        question, is_first = asked[-1], body["messages"][-1]["role"] == "user"
        finish, pieces = "stop", []
        if question in CALLS and body.get("tools") and (is_first or question == "loop"):
            name, arguments = CALLS[question]
            text = json.dumps(arguments)
            call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": name, "arguments": text[:7]}}
            yield _event({"tool_calls": [call]})
            yield _event({"tool_calls": [{"index": 0, "function": {"arguments": text[7:]}}]})
            finish = "tool_calls"
        elif question == "long":
            pieces = [f"word{number} " for number in range(400)]
        elif question == "markup":
            pieces = [MARKUP]
        elif question == "hostile":
            pieces = [*("</script><!-- \u202etxt.exe\u202c ", "\x00\x1b[2J", "W" * 300_000), " end"]
        elif question == "think":
            pieces = ["<think>", "It is easy.", "</think>", "\n\n", "Easy."]
        elif question == "page":
            pieces = [line + "\n" for line in PAGE.split("\n")]
        elif not is_first:
            pieces = ["It is ", body["messages"][-1]["content"], "."]
        else:
            said = f"{body['model']} heard {question} as message {len(body['messages'])}."
            pieces = [word + " " for word in said.split()]
            finish = "length" if question == "cut" else "stop"
        try:
            yield ": keep-alive\n\n"
            for number, piece in enumerate(pieces):
                yield _event({"content": piece}, logprobs=_logprobs(piece, number) if body.get("logprobs") else None)
                await asyncio.sleep(0.05 if question == "long" else 0)
                if question == "lost" and number == 1:
                    await asyncio.sleep(0.3)  # a browser drops what it had no time to read
                    raise ConnectionResetError("told to")
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        yield _event({}, finish=finish)
        usage = {"prompt_tokens": 9, "completion_tokens": len(pieces)}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


def _event(delta: dict[str, Any], *, finish: str | None = None, logprobs: Any = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"


def _logprobs(piece: str, number: int) -> dict[str, Any]:
    chance = (0.98, 0.6, 0.12)[number % 3]
    top = [(piece, chance), (" other", (1 - chance) / 2), ("\n", (1 - chance) / 4)]
    return {
        "content": [
            {
                "token": piece,
                "logprob": math.log(chance),
                "top_logprobs": [{"token": text, "logprob": math.log(its)} for text, its in top],
            }
        ]
    }


def _error(status: int, message: str, code: str | None, param: str | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": "error", "param": param, "code": code}}, status)


@contextmanager
def serving(app: Any, *, port: int = 0, **settings: Any) -> Iterator[int]:
    """The port on which an application is served from a thread as long as the block lasts."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()  # who comes before the server is up waits for it
        settings = {"log_level": "critical", "timeout_graceful_shutdown": 0, "lifespan": "off", **settings}
        server = uvicorn.Server(uvicorn.Config(app, **settings))

        async def serve() -> None:
            await server.serve(sockets=[listener])
            # Whom it still answered: what the loop leaves open is found later, in the midst of another test.
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)

        thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)
            assert not thread.is_alive()
