"""Clients that begin a request and do not end it."""

import asyncio
import socket

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from nanodag.api import application
from tests.chat.fake_api import serving

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
    monkeypatch.setattr(application, "LOOK_EVERY_S", LOOK_S)
    app, heard = Starlette(routes=[Route("/", said, methods=["GET", "POST"])]), b""
    with serving(app, http=application.WholeRequests) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(sent)
            while not heard.endswith(b"said") and (piece := client.recv(4096)):
                heard += piece
    assert heard.endswith(b"said") == is_answered
