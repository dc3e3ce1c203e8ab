"""A router before several samplers: what goes through it, and what becomes of it and of samplers that are killed."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanodag.engines.router import Router, RouterClient, start_router
from nanodag.engines.start import ServerProcess, is_healthy, start_engine
from nanodag.errors import BadRequest, SamplerLost
from nanodag.host.ports import free_port
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from tests.engines.samplers import answers, requests, until_busy, with_samplers
from tests.rl.models import save_tiny_model
from tests.rl.stages import make_job, metrics, start
from tests.server_info import server_info
from tests.sglang_python import python_or_skip

START_S = 1500
FAKE = Path(__file__).with_name("fake_router.py")
CONTEXT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def python():
    return python_or_skip()


def launch_fake(folder):
    def launch():
        url = f"http://127.0.0.1:{(port := free_port())}"
        server = ServerProcess(subprocess.Popen([sys.executable, str(FAKE), str(port)]), url, folder / "log-0")
        server.wait_until(lambda: is_healthy(f"{url}/liveness"), 300)
        return server

    return launch


def launch_embedded(folder):
    def launch(number, path, version):
        return start_engine(
            EngineSettings(model=path, weight_version=version, deterministic=True, max_batch=8),
            log_path=folder / f"log-{number}",
        )

    return launch


def with_router(model, launch, launch_router, work, *, timeout_s=60.0, **options):
    """Run `work(samplers, servers, router)` with two samplers behind a router."""

    router = Router(
        launch_router(), launch=launch_router, connect=RouterClient, health_every_s=0.2, health_timeout_s=timeout_s
    )

    async def with_it(samplers, servers):
        return await work(samplers, servers, router)

    return with_samplers(launch, model, with_it, health_every_s=0.2, router=router, **options)


def with_fake(model, folder, work, **options):
    return with_router(model, launch_embedded(folder), launch_fake(folder), work, **options)


def counts(servers):
    async def ask():
        found = []
        for server in servers:
            async with SamplerClient(server.url) as client:
                found.append((await server_info(client))["num_generated_tokens"])
        return found

    return ask()


def test_prompts_go_through_the_router_to_both_samplers_and_weights_to_each(model, tmp_path):
    other = save_tiny_model(tmp_path / "other", seed=5)

    async def work(samplers, servers, router):
        before = await answers(samplers, 4)
        assert all(count > 0 for count in await counts(servers))
        await samplers.update_weights_from_disk(str(other), 3)
        assert await samplers.versions() == ["3", "3"]
        after = await answers(samplers, 4)
        assert {version for group in after for _, _, version in group} == {"3"} and before != after
        os.kill(router.replicas[0].server.pid, signal.SIGSTOP)  # what is no generation needs no router
        assert await samplers.versions() == ["3", "3"]

    with_fake(model, tmp_path, work)


def test_several_prompts_in_one_call_are_answered_in_their_order(model, tmp_path):
    async def work(samplers, servers, router):
        one_by_one = [(await samplers.generate([request]))[0] for request in requests(3)]
        assert [[c.output_ids for c in group] for group in await samplers.generate(requests(3))] == [
            [c.output_ids for c in group] for group in one_by_one
        ]

    with_fake(model, tmp_path, work)


def test_what_a_killed_sampler_was_asked_is_sent_again_and_another_one_takes_its_place(model, tmp_path):
    async def work(samplers, servers, router):
        undisturbed = await answers(samplers, 6)
        step = asyncio.ensure_future(answers(samplers, 6))
        await until_busy(servers[1].url)
        os.kill(servers[1].pid, signal.SIGKILL)
        assert await step == undisturbed
        members = await samplers.members()  # waits for the one that is started again
        assert samplers.num_restarts == 1 and router.num_restarts == 0
        assert set(await router.replicas[0].client.servers()) == {member.server.url for member in members}
        assert servers[1].url not in await router.replicas[0].client.servers()

    with_fake(model, tmp_path, work)


def test_a_sampler_killed_while_all_are_paused_is_behind_the_router_before_they_continue(model, tmp_path):
    async def work(samplers, servers, router):
        undisturbed = await answers(samplers, 6)
        step = asyncio.ensure_future(answers(samplers, 6))
        await until_busy(servers[1].url)
        async with samplers.paused(), asyncio.timeout(30):
            os.kill(servers[1].pid, signal.SIGKILL)
            while samplers.num_restarts == 0:
                await asyncio.sleep(0.05)
            members = await samplers.members()
            while set(await router.replicas[0].client.servers()) != {member.server.url for member in members}:
                await asyncio.sleep(0.05)
        assert await step == undisturbed and router.num_restarts == 0

    with_fake(model, tmp_path, work, pause="in_place")


def test_a_request_that_is_sent_again_has_another_rid_and_is_aborted_under_it(model, tmp_path):
    seen = []

    async def work(samplers, servers, router):
        async def generate(requests):
            seen.append(requests[0].rid)
            if len(seen) == 1:
                raise SamplerLost("the router died")
            await asyncio.sleep(60)

        async def abort(rid):
            aborted.append(rid)

        router.generate, aborted = generate, []
        asking = asyncio.ensure_future(samplers.generate([Request(input_ids=[1], rid="mine")]))
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        for member in await samplers.members():
            member.client.abort = abort
        asking.cancel()
        await samplers.abort("mine")
        assert seen == ["mine", "mine-attempt-2"] and set(aborted) == {"mine-attempt-2"}

    with_fake(model, tmp_path, work)


def test_a_sampler_that_ends_while_others_answer_is_noticed_and_replaced(model, tmp_path):
    async def work(samplers, servers, router):
        step = asyncio.ensure_future(answers(samplers, 6))
        await until_busy(servers[0].url)
        os.kill(servers[0].pid, signal.SIGKILL)
        while samplers.num_restarts == 0:  # nobody asks it for anything
            await asyncio.sleep(0.05)
        await step

    with_fake(model, tmp_path, work)


def test_when_both_samplers_are_killed_it_is_waited_for_one(model, tmp_path):
    async def work(samplers, servers, router):
        undisturbed = await answers(samplers, 2)
        for server in servers:
            os.kill(server.pid, signal.SIGKILL)
        assert await answers(samplers, 2) == undisturbed
        assert await samplers.versions() == ["0", "0"] and samplers.num_restarts == 2

    with_fake(model, tmp_path, work)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_router_that_is_killed_or_hangs_is_started_again_with_its_servers(model, tmp_path, how):
    async def work(samplers, servers, router):
        undisturbed = await answers(samplers, 4)
        step = asyncio.ensure_future(answers(samplers, 4))
        await until_busy(servers[0].url)
        os.kill(router.replicas[0].server.pid, how)
        assert await step == undisturbed
        assert router.num_restarts == 1 and samplers.num_restarts == 0
        assert set(await router.replicas[0].client.servers()) == {server.url for server in servers}

    with_fake(model, tmp_path, work, timeout_s=2.0)


def test_what_is_refused_is_not_sent_again_and_what_fails_again_and_again_ends(model, tmp_path):
    async def work(samplers, servers, router):
        sent = []
        generate = router.generate

        async def counted(requests):
            sent.append(requests)
            return await generate(requests)

        router.generate = counted
        with pytest.raises(BadRequest):
            await samplers.generate([Request(input_ids=[1] * 500)])
        assert len(sent) == 1

        async def failing(requests):
            raise SamplerLost("it ended with code 1")

        router.generate = failing
        with pytest.raises(SamplerLost, match=r"failed 2 times behind the router.*code 1"):
            await samplers.generate(requests(1))

    with_fake(model, tmp_path, work, max_restarts=1)


@pytest.mark.slow
def test_a_router_that_cannot_start_says_why(tmp_path, python):
    with pytest.raises(SamplerLost, match=r"invalid choice: 'fastest'"):
        start_router(python, log_path=tmp_path / "log", request_timeout_s=60, options={"policy": "fastest"})


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
def test_two_sglang_servers_behind_the_router_outlive_kills_and_have_the_right_weights(model, tmp_path, python):
    other = save_tiny_model(tmp_path / "other", seed=5)

    def launch(number, path, version):
        settings = EngineSettings(
            engine="sglang",
            python=str(python),
            dtype="float32",
            max_batch=8,
            context_length=CONTEXT // 2,
            memory_fraction=0.1,
            start_timeout_s=START_S,
        )
        return start_engine(settings.of_replica(0, path, version), log_path=tmp_path / f"log-{number}")

    def launch_router():
        return start_router(python, log_path=tmp_path / "router.log", request_timeout_s=300)

    def asked(count):
        params = SamplingParams(n=2, max_new_tokens=60, temperature=0.0, ignore_eos=True)
        return [Request(input_ids=[1, 2, n], params=params, rid=f"r{n}") for n in range(count)]

    async def versions_of_answers(samplers):
        groups = await asyncio.gather(*(samplers.generate([request]) for request in asked(6)))
        assert all(len(group) == 2 and all(len(c.output_ids) == 60 for c in group) for (group,) in groups)
        return {c.weight_version for (group,) in groups for c in group}

    async def work(samplers, servers, router):
        assert await versions_of_answers(samplers) == {"0"}
        await samplers.update_weights_from_disk(str(other), 1)
        assert await versions_of_answers(samplers) == {"1"}
        for victim in (servers[1], router.replicas[0].server):
            step = asyncio.ensure_future(versions_of_answers(samplers))
            await asyncio.sleep(0.1)
            os.kill(victim.pid, signal.SIGKILL)
            assert await step == {"1"}
        assert await samplers.versions() == ["1", "1"]  # the one that was started again, too
        assert samplers.num_restarts == 1 and router.num_restarts == 1
        assert await versions_of_answers(samplers) == {"1"}

    with_router(model, launch, launch_router, work)


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
def test_a_stage_with_two_sglang_servers_generates_through_the_router(tmp_path, python):
    sampler = {"engine": "sglang", "context": 64, "max_batch": 16, "replicas": 2, "memory_fraction": 0.1}
    job = make_job(tmp_path, sampler={**sampler, "router_options": {"policy": "round_robin"}})
    process = start(job, fresh=True)
    code = process.wait(timeout=START_S)
    log = (job.workspace / "worker.log").read_text()
    assert code == 0, log[-6000:]
    assert "has 2 servers behind it" in log and [line["step"] for line in metrics(job)] == [1, 2]
    assert (job.workspace / "router.log").exists()
