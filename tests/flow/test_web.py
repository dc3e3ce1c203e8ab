"""What of Prefect's server a web page can reach: by another name (DNS rebinding), by another origin's websocket."""

import asyncio

import pytest
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy import text
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from flows.prefect_server import guarded, write_at_once


async def page(request):
    return PlainTextResponse("inside")


async def events(websocket):
    await websocket.accept()
    await websocket.send_text("inside")
    await websocket.close()


@pytest.fixture
def client():
    app = Starlette(routes=[Route("/", page), WebSocketRoute("/events", events)])
    return TestClient(guarded(app, ["127.0.0.1", "localhost"], ["team.example.org"]))


@pytest.mark.parametrize("host", ["127.0.0.1:4200", "localhost:4200", "LOCALHOST", "team.example.org"])
def test_the_servers_own_names_are_answered(client, host):
    assert client.get("/", headers={"host": host}).text == "inside"


OTHERS = ["rebound.example:4200", "127.0.0.1.example", "www.localhost", "[::1]:4200", "", "a b"]


@pytest.mark.parametrize("host", OTHERS)
def test_any_other_name_is_refused(client, host):
    answer = client.get("/", headers={"host": host})
    assert answer.status_code == 400 and "inside" not in answer.text


def opened(client, **headers):
    with client.websocket_connect("/events", headers={"host": "127.0.0.1:4200", **headers}) as socket:
        return socket.receive_text()


@pytest.mark.parametrize("headers", [{}, {"origin": "http://127.0.0.1:4200"}, {"origin": "https://team.example.org"}])
def test_programs_and_its_own_pages_open_websockets(client, headers):
    assert opened(client, **headers) == "inside"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:8000"},
        {"origin": "null"},
        {"host": "rebound.example:4200", "origin": "http://rebound.example:4200"},
    ],
)
def test_pages_of_another_origin_open_none(client, headers):
    with pytest.raises((WebSocketDisconnect, WebSocketDenialResponse)):
        opened(client, **headers)


def test_a_transaction_that_reads_and_then_writes_waits_for_its_turn_in_sqlite(tmp_path, monkeypatch):
    """As creating a flow run does in Prefect: begun as a reader, it met "database is locked" at once."""
    begin = AioSqliteConfiguration.begin_transaction
    monkeypatch.setattr(AioSqliteConfiguration, "begin_transaction", begin)  # put back afterwards
    write_at_once()

    async def count_up(config, engine, pause_s):
        async with await config.session(engine) as session, config.begin_transaction(session):
            number = (await session.execute(text("SELECT n FROM t"))).scalar_one()
            await asyncio.sleep(pause_s)
            await session.execute(text(f"UPDATE t SET n = {number + 1}"))

    async def both():
        config = AioSqliteConfiguration(f"sqlite+aiosqlite:///{tmp_path}/p.db")
        engine = await config.engine()
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE t AS SELECT 0 AS n"))
        await asyncio.gather(count_up(config, engine, 0.3), count_up(config, engine, 0.1))
        async with engine.connect() as connection:
            found = (await connection.execute(text("SELECT n FROM t"))).scalar_one()
        await engine.dispose()
        return found

    assert asyncio.run(both()) == 2
