"""Clients that begin a request and do not end it."""

import asyncio

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from nanodag.api import slow_requests

LOOK_S = 0.1


async def said(http):
    await http.body()
    await asyncio.sleep(4 * LOOK_S)  # an answer may take long
    return PlainTextResponse("said")


@pytest.mark.parametrize(
    ("sent", "is_answered"),
    [
        (b"", False),
        (b"GET / HT", False),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf", False),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nfour", True),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", True),
    ],
)
def test_a_request_that_does_not_arrive_is_given_up_and_one_that_is_answered_slowly_is_not(
    monkeypatch, sent, is_answered
):
    monkeypatch.setattr(slow_requests, "LOOK_EVERY_S", LOOK_S)
    app = Starlette(routes=[Route("/", said, methods=["GET", "POST"])])

    async def main():
        config = uvicorn.Config(app, http=slow_requests.WholeRequests, lifespan="off", log_level="error", port=0)
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        try:
            reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname()[:2])
            writer.write(sent)
            async with asyncio.timeout(5):
                found = await (reader.readuntil(b"said") if is_answered else reader.read())
            writer.close()
            return found
        finally:
            await server.shutdown()

    assert asyncio.run(main()).endswith(b"said" if is_answered else b"")
