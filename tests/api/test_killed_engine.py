"""A served request whose engine is killed: asked again of another engine, or answered 503; never lost in silence."""

import asyncio
import os
import signal
from functools import partial

import pytest

from nanodag.engines.fleet import Fleet
from nanodag.engines.start import start_engine
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from tests.api.real_engines import client_over
from tests.server_info import server_info

LONG = {"prompt": "the cat", "max_tokens": 180, "ignore_eos": True, "seed": 3}
N = 60  # so that an answer takes long enough to be killed in


@pytest.fixture
def serve(model_folder, tmp_path):
    """serve(scenario, count): run scenario(client of the API, fleet) over so many engines."""
    settings = EngineSettings(deterministic=True, max_batch=4, token="t")

    def launch(number, folder, version):
        return start_engine(settings.of_replica(number, folder, version), log_path=tmp_path / f"log-{number}")

    async def main(scenario, count):
        fleet = Fleet(
            model=model_folder, version="1", launch=launch, connect=partial(SamplerClient, token="t"), name="tiny",
            max_restarts=None, is_watched_idle=True,
        )  # fmt: skip
        async with client_over(model_folder, fleet, count) as client:
            await asyncio.wait_for(scenario(client, fleet), 90)
            while len(fleet.up) < count:  # one that is being started would outlive the fleet
                await asyncio.sleep(0.02)

    return lambda scenario, count: asyncio.run(main(scenario, count))


async def until_busy(fleet):
    """Return when each engine samples."""
    while not all([(await server_info(replica.client))["num_running_samples"] for replica in fleet.replicas]):
        await asyncio.sleep(0.005)


def texts(reply):
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


def test_a_request_whose_engine_is_killed_is_answered_by_another_with_the_same_bytes(serve):
    async def scenario(client, fleet):
        undisturbed = texts(await client.post("/v1/completions", json=LONG | {"n": N}))
        asking = asyncio.ensure_future(client.post("/v1/completions", json=LONG | {"n": N}))
        await until_busy(fleet)
        os.kill(fleet.replicas[1].server.pid, signal.SIGKILL)
        assert texts(await asking) == undisturbed
        while len(fleet.up) < 2:
            await asyncio.sleep(0.02)
        assert fleet.num_restarts == 1

    serve(scenario, 2)


def test_without_another_engine_a_request_is_answered_503_and_later_ones_by_the_engine_in_its_place(serve):
    async def scenario(client, fleet):
        asking = asyncio.ensure_future(client.post("/v1/completions", json=LONG | {"n": N}))
        await until_busy(fleet)
        os.kill(fleet.replicas[0].server.pid, signal.SIGKILL)
        assert (await asking).status_code == 503
        assert (await client.get("/health")).status_code == 503
        while not fleet.is_ready:
            await asyncio.sleep(0.02)
        assert len(texts(await client.post("/v1/completions", json=LONG))) == 1

    serve(scenario, 1)


def test_a_stream_that_has_begun_ends_with_an_error_and_is_not_begun_again(serve):
    async def scenario(client, fleet):
        seen = []

        async def read():
            async with client.stream("POST", "/v1/completions", json=LONG | {"n": N, "stream": True}) as reply:
                async for line in reply.aiter_lines():
                    seen.append(line)

        reading = asyncio.ensure_future(read())
        await until_busy(fleet)
        os.kill(fleet.replicas[0].server.pid, signal.SIGKILL)
        await reading
        assert any('"error"' in line for line in seen)

    serve(scenario, 1)
