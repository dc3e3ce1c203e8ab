"""Samplers that die or hang in the middle of a step: replaced, asked again, and nothing shows in what comes out."""

import asyncio
import os
import resource
import signal
import threading
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from nanodag.engines.fleet import Fleet
from nanodag.engines.start import start_engine
from nanodag.engines.watch import ServerWatch
from nanodag.errors import SamplerLost
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from tests.engines.samplers import answers, samplers_of, until_busy, with_samplers
from tests.rl.models import save_tiny_model
from tests.rl.stages import digest, make_job, run, start, wait_for_step
from tests.server_info import server_info


def test_a_fleet_may_hold_as_many_connections_as_the_machine_lets_it():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        Fleet(model=None, version=0, launch=None, connect=SamplerClient)
        most = 65_536 if hard == resource.RLIM_INFINITY else min(65_536, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def launch_in(folder, **options):
    def launch(number, path, version):
        return start_engine(
            EngineSettings(model=path, weight_version=version, deterministic=True, max_batch=8, **options),
            log_path=folder / f"log-{number}",
        )

    return launch


def test_what_a_killed_sampler_was_asked_is_answered_with_the_same_bits(model, tmp_path):
    async def work(samplers, servers):
        undisturbed = await answers(samplers, 4)
        step = asyncio.ensure_future(answers(samplers, 4))
        await until_busy(servers[1].url)
        os.kill(servers[1].pid, signal.SIGKILL)
        assert await step == undisturbed
        assert await samplers.versions() == ["0", "0"]  # waits for the one that is started again
        assert samplers.num_restarts == 1
        assert await answers(samplers, 4) == undisturbed

    with_samplers(launch_in(tmp_path), model, work)


def test_what_was_asked_of_a_sampler_that_is_started_again_can_be_given_up(model, tmp_path):
    launch = launch_in(tmp_path)
    restart = threading.Event()

    def slow(number, path, version):
        if (tmp_path / "log-0").exists():
            restart.wait(600)
        return launch(number, path, version)

    async def work(samplers, servers):
        step = asyncio.ensure_future(answers(samplers, 1))
        await until_busy(servers[0].url)
        os.kill(servers[0].pid, signal.SIGKILL)
        while samplers.replicas[0].is_up or not samplers.replicas[0].client.is_closed:
            await asyncio.sleep(0.01)
        step.cancel()
        await samplers.abort("r0")
        await samplers.abort("of nobody")
        restart.set()
        assert await samplers.versions() == ["0"]

    with_samplers(slow, model, work, count=1)


def test_one_lost_question_after_its_health_does_not_end_the_watch_over_a_sampler():
    answers = [SamplerLost("a connection that was closing"), True, *[False] * 1000]
    client = SimpleNamespace(health=AsyncMock(side_effect=answers))
    server = SimpleNamespace(url="http://x", is_alive=True, kill=lambda: vars(server).update(is_alive=False))
    ended = []
    watch = ServerWatch(server, client, every_s=0.01, timeout_s=0.05, on_end=ended.append)
    asyncio.run(asyncio.wait_for(watch.look(), 30))
    assert len(ended) == 1 and not server.is_alive


@pytest.mark.parametrize(("late", "num_asked", "is_killed"), [({2, 4}, 6, False), ({2, 3}, 3, True)])
def test_a_sampler_that_is_late_is_asked_anew_and_killed_when_late_twice_in_a_row(late, num_asked, is_killed):
    connections = []

    async def health(request):
        connections.append(request.transport.get_extra_info("peername"))
        if len(connections) in late:
            await asyncio.sleep(60)
        return web.Response()

    async def work():
        application = web.Application()
        application.router.add_get("/health_generate", health)
        async with TestServer(application) as server, SamplerClient(str(server.make_url("/"))) as client:
            child = SimpleNamespace(url=client.url, is_alive=True, kill=lambda: None)
            look = asyncio.ensure_future(ServerWatch(child, client, every_s=0.01, timeout_s=2.0).look())
            while not look.done() and len(connections) < 6:
                await asyncio.sleep(0.01)
            assert look.done() == is_killed and len(connections) == len(set(connections)) == num_asked
            look.cancel()
            await asyncio.gather(look, return_exceptions=True)

    asyncio.run(work())


def test_the_time_in_which_this_process_does_not_run_is_not_the_samplers():
    async def work():
        async def info(request):
            return web.json_response({})

        application = web.Application()
        application.router.add_get("/model_info", info)
        application.router.add_get("/health_generate", info)
        async with TestServer(application) as server:
            async with SamplerClient(str(server.make_url("/")), connect_timeout_s=0.2) as client:
                asyncio.get_running_loop().call_soon(time.sleep, 1.0)  # after the connect began, before it was seen
                assert await client.model_info() == {}
                asyncio.get_running_loop().call_later(0.01, time.sleep, 1.0)
                watch = ServerWatch(SimpleNamespace(url="", is_alive=True), client, every_s=0.0, timeout_s=0.9)
                assert await watch._answer() is True

    asyncio.run(work())


def test_a_hung_sampler_is_killed_and_replaced(model, tmp_path):
    async def work(samplers, servers):
        undisturbed = await answers(samplers, 2)
        step = asyncio.ensure_future(answers(samplers, 2))
        await until_busy(servers[0].url)
        os.kill(servers[0].pid, signal.SIGSTOP)
        assert await step == undisturbed
        await samplers.versions()
        assert samplers.num_restarts == 1 and not servers[0].is_alive

    with_samplers(launch_in(tmp_path), model, work, health_every_s=0.1, health_timeout_s=3.0)


def test_a_sampler_that_says_for_long_that_it_cannot_serve_is_replaced(model, tmp_path):
    async def work(samplers, servers):
        (undisturbed,) = await answers(samplers, 1)
        async with SamplerClient(servers[0].url) as client:
            await client.pause("in_place")  # nobody resumes it
        assert await answers(samplers, 1) == [undisturbed]
        assert samplers.num_restarts == 1 and not servers[0].is_alive

    with_samplers(launch_in(tmp_path), model, work, count=1, health_every_s=0.1, health_timeout_s=2.0)


def test_all_samplers_are_paused_even_one_that_is_lost_meanwhile_and_all_resume(model, tmp_path):
    """With so short a patience that whoever is taken for ill is killed."""

    async def paused(url) -> tuple[bool, int]:
        async with SamplerClient(url) as client:
            info = await server_info(client)
            return info["is_paused"], info["num_running_samples"]

    async def work(samplers, servers):
        undisturbed = await answers(samplers, 4)
        step = asyncio.ensure_future(answers(samplers, 4))
        await until_busy(servers[1].url)
        async with samplers.paused():
            os.kill(servers[1].pid, signal.SIGKILL)
            while samplers.num_restarts == 0 or not samplers.replicas[1].is_up:
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.5)
            found = [await paused(replica.server.url) for replica in samplers.replicas]
            assert [is_paused for is_paused, _ in found] == [True, True] and servers[0].is_alive
            assert not step.done()
        assert await asyncio.wait_for(step, 60) == undisturbed
        assert samplers.num_restarts == 1
        assert not any(replica.watch.is_excused for replica in samplers.replicas)

    with_samplers(launch_in(tmp_path), model, work, pause="in_place", health_every_s=0.1, health_timeout_s=0.5)


def test_a_sampler_that_dies_again_and_again_ends_with_the_last_lines_of_its_log(model, tmp_path):
    launch = launch_in(tmp_path)
    numbers = []

    def dying(number, path, version):
        numbers.append(number)
        if len(numbers) > 1:
            raise SamplerLost("it ended with code 1")
        return launch(number, path, version)

    async def work(samplers, servers):
        os.kill(servers[0].pid, signal.SIGKILL)
        with pytest.raises(SamplerLost, match=r"(?s)lost 3 times .*code 1.*The end of its log:.*ready on port"):
            await answers(samplers, 1)

    with_samplers(dying, model, work, count=1, max_restarts=2)
    assert len(numbers) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_both", "of_killed"),
    [
        ({}, {}),
        ({"placement": "shared", "lends_states": True}, {}),
        ({}, {"sync": "distributed", "sync_bucket_bytes": 4000}),
    ],
    ids=["files", "in turns", "broadcast"],
)
def test_a_stage_whose_samplers_are_killed_in_mid_step_ends_on_the_same_bytes(tmp_path, of_both, of_killed):
    config = of_both | {"num_steps": 5, "sampler": {"context": 64, "max_batch": 16, "replicas": 2}, "eval_every": 5}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    quiet = make_job(tmp_path / "a", **config)
    run(quiet)
    job = make_job(tmp_path / "b", **config, **of_killed)
    process = start(job, fresh=True)
    for step in (1, 3):
        wait_for_step(job, process, step)
        if alive := samplers_of(process):
            os.kill(alive[-1], signal.SIGKILL)
    assert process.wait(timeout=300) == 0, (job.workspace / "worker.log").read_text()[-4000:]
    assert "was lost and is started again" in (job.workspace / "worker.log").read_text()
    assert digest(job.output) == digest(quiet.output)
    assert (job.records / "ledger.jsonl").read_text() == (quiet.records / "ledger.jsonl").read_text()
