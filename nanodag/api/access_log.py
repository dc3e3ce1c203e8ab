"""What the log says of the API's use: a line a request, and how fast answers are written."""

import asyncio
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanodag.api.disconnects import CLIENT_CLOSED_REQUEST
from nanodag.api.metrics import Metrics
from nanodag.api.replies import usage
from nanodag.errors.words import counted

log = logging.getLogger(__name__)  # at INFO

SAMPLES = "nanodag.samples"  # in a request's scope: its samples
SPEED_EVERY_S = 10.0
LONGEST_PATH = 200


class AccessLog:
    """Logs each request when its reply has ended: `POST /v1/completions 200 0.532 s 12 + 34 tokens`, of its prompt and
    answers. A path is another's text, so what is not plain ASCII is spelled out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), CLIENT_CLOSED_REQUEST

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if scope["type"] == "http":
                path, seconds = ascii(scope["path"][:LONGEST_PATH])[1:-1], time.monotonic() - began
                log.info("%s %s %d %.3f s%s", scope["method"], path, status, seconds, _tokens(scope))


def _tokens(scope: Scope) -> str:
    if SAMPLES not in scope:
        return ""
    used = usage(scope[SAMPLES])
    return f" {used['prompt_tokens']} + {used['completion_tokens']} tokens"


async def log_speed(metrics: Metrics, every_s: float = SPEED_EVERY_S) -> None:
    """Log tokens a second while answers are written, for ever. An answer that is no stream counts at its end: the time
    that it took is then counted, too."""
    num_logged, since = metrics.num_sampled, time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        now, num_new = time.monotonic(), metrics.num_sampled - num_logged
        if num_new:
            log.info(
                "%.1f tokens a second, %s under way", num_new / (now - since), counted(metrics.num_in_flight, "answer")
            )
        if num_new or not metrics.num_in_flight:
            num_logged, since = num_logged + num_new, now
