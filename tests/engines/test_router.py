"""A router before several samplers: what goes through it, and what becomes of it and of samplers that are killed."""

import asyncio
import os
import signal

import pytest

from nanodag.engines.router import Router, RouterClient, start_router
from nanodag.engines.start import start_engine
from nanodag.errors import BadRequest, SamplerLost
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from tests.engines.fake_samplers import PATIENCE_S, World
from tests.engines.foreign import given, until
from tests.engines.samplers import with_samplers
from tests.rl.models import save_tiny_model
from tests.rl.stages import make_job, metrics, start
from tests.sglang_python import python_or_skip

START_S = 1500
CONTEXT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def python():
    return python_or_skip()


def play(folder, scenario, **options):
    """Run scenario(world, samplers) with two samplers behind a router, which answer at once unless they are told to
    wait."""

    async def main():
        async with World(folder, has_router=True, **options) as world:
            world.may_answer.set()
            await asyncio.wait_for(scenario(world, world.samplers), PATIENCE_S)

    asyncio.run(main())


def asking(samplers, count):
    return [asyncio.ensure_future(samplers.generate([Request(input_ids=[n], rid=f"r{n}")])) for n in range(count)]


async def answered(tasks):
    return [completion.output_ids for ((completion,),) in await asyncio.gather(*tasks)]


def busy(world):
    """Numbers of the samplers that a prompt has reached."""
    return {number for number, name, how in world.steps if (name, how) == ("generate", "asked")}


async def is_behind(world):
    """Whether the samplers, and no others, are behind the router."""
    return set(await world.router.replicas[0].client.servers()) == {server.url for server in world.servers}


def test_prompts_go_through_the_router_to_both_samplers_in_order_and_weights_to_each(tmp_path):
    async def scenario(world, samplers):
        ids = [[n] for n in range(5)]
        groups = await samplers.generate([Request(input_ids=prompt) for prompt in ids])
        assert [completion.output_ids for (completion,) in groups] == ids and busy(world) == {0, 1}
        for version in (1, 2):
            (tmp_path / str(version)).mkdir()
            (tmp_path / str(version) / "weights").write_text(str(version))
            await given(samplers, tmp_path, version)
        world.routers[0].hangs = True  # what is no generation needs no router
        assert await samplers.versions() == ["2", "2"] and {server.weights for server in world.servers} == {"2"}

    play(tmp_path, scenario)


@pytest.mark.parametrize("victims", [(1,), (0, 1)])
def test_what_killed_samplers_were_asked_is_sent_again_and_others_take_their_places(tmp_path, victims):
    async def scenario(world, samplers):
        world.may_answer.clear()
        tasks = asking(samplers, 6)
        await until(lambda: busy(world) == {0, 1})
        for number in victims:
            world.servers[number].kill()
        await until(lambda: samplers.num_restarts == len(victims))  # it is noticed while others are asked
        world.may_answer.set()
        assert await answered(tasks) == [[n] for n in range(6)]
        await samplers.members()
        assert await is_behind(world) and world.router.num_restarts == 0

    play(tmp_path, scenario)


def test_a_sampler_killed_while_all_are_paused_is_behind_the_router_before_they_continue(tmp_path):
    async def scenario(world, samplers):
        async with samplers.paused():
            world.servers[1].kill()
            await samplers.members()
            assert samplers.num_restarts == 1
            while not await is_behind(world):
                await asyncio.sleep(0.01)

    play(tmp_path, scenario, pause="in_place")


def test_a_request_that_is_sent_again_has_another_rid_and_is_aborted_under_it(tmp_path):
    async def scenario(world, samplers):
        world.may_answer.clear()
        (task,) = asking(samplers, 1)
        await until(lambda: busy(world))
        (number,) = busy(world)
        world.servers[number].kill()
        await until(lambda: len(world.routers[0].sent) == 2)
        aborted = []
        for server in world.servers:
            server.abort_request = lambda body: _noted(aborted, body)
        task.cancel()
        await samplers.members()
        await samplers.abort("r0")
        assert world.routers[0].sent == ["r0", "r0-attempt-2"]
        assert {body["rid"] for body in aborted} == {"r0-attempt-2"}

    play(tmp_path, scenario)


async def _noted(notes, body):
    notes.append(body)
    return {}


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_router_that_is_killed_or_hangs_is_started_again_with_its_servers(tmp_path, how):
    async def scenario(world, samplers):
        world.may_answer.clear()
        tasks = asking(samplers, 4)
        await until(lambda: busy(world) == {0, 1})
        if how == "killed":
            world.routers[0].kill()
        else:
            world.routers[0].hangs = True
        await until(lambda: world.router.num_restarts == 1)
        world.may_answer.set()
        assert await answered(tasks) == [[n] for n in range(4)]
        assert samplers.num_restarts == 0 and await is_behind(world)

    play(tmp_path, scenario)


def test_what_is_refused_is_not_sent_again_and_what_fails_again_and_again_ends(tmp_path):
    async def scenario(world, samplers):
        for error, num_sent, reason in (
            (BadRequest("no"), 1, "no"),
            (SamplerLost("it ended with code 1"), 2, r"failed 2 times behind the router.*code 1"),
        ):
            sent = []

            async def failing(requests, fleet, error=error, sent=sent):
                sent.append(requests)
                raise error

            world.router.ask = failing
            with pytest.raises(type(error), match=reason):
                await samplers.generate([Request(input_ids=[1])])
            assert len(sent) == num_sent

    play(tmp_path, scenario, max_restarts=1)


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

    router = Router(launch_router(), launch=launch_router, connect=RouterClient, health_every_s=0.2)
    with_samplers(launch, model, lambda *both: work(*both, router), health_every_s=0.2, router=router)


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
