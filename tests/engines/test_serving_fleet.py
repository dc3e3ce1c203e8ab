"""A fleet that serves: engines that die are started again for ever, nobody waits for one, weights come one by one."""

import asyncio
import contextlib
import threading

import pytest

from nanodag.engines import replica
from nanodag.errors import SamplerError, SamplerLost
from nanodag.inference.protocol import Completion, Request
from tests.engines.fake_samplers import PATIENCE_S, World, write_weights
from tests.engines.foreign import until


@pytest.fixture
def play(tmp_path, monkeypatch):
    """play(scenario, size=1): run scenario(world, its fleet), which serves as `tiny`."""
    monkeypatch.setattr(replica, "FIRST_PAUSE_S", 0.001)

    def check(folder):
        if folder.name == "misshapen":
            raise SamplerError("of another shape")

    async def main(scenario, size):
        for weights in ("0", "2", "other shape"):
            write_weights(tmp_path / weights, weights)
        options = {"name": "tiny", "max_restarts": None, "is_watched_idle": True, "check": check}
        async with World(tmp_path, size=size, **options) as world:
            world.may_answer.set()
            await asyncio.wait_for(scenario(world, world.samplers), PATIENCE_S)

    return lambda scenario, size=1: asyncio.run(main(scenario, size))


async def version_of(fleet):
    return [completion async for completion in fleet.answer(Request(input_ids=[1]), stream=False)][-1].weight_version


async def takes(fleet, folder):
    """Whether they took its weights."""
    try:
        await fleet.take_weights(folder, folder.name)
    except SamplerError:
        return False
    return True


def prompts_of(world):
    """Prompts that each engine was asked."""
    asked = [number for number, name, how in world.steps if (name, how) == ("generate", "asked")]
    return [asked.count(number) for number in range(world.size)]


def test_an_engine_that_dies_is_started_until_it_is_up_and_lost_meanwhile(play, caplog):
    async def scenario(world, fleet):
        assert await version_of(fleet) == "0"
        world.faults = [SamplerLost("no memory")] * 2
        world.servers[0].kill()
        with pytest.raises(SamplerLost, match="no engine of tiny is up"):
            await version_of(fleet)
        await until(lambda: fleet.is_ready)
        assert await version_of(fleet) == "0" and fleet.num_restarts == 1 and not world.faults

    play(scenario)
    assert "was lost and is started again" in caplog.text and "no log" in caplog.text


def test_the_least_busy_engine_is_asked_and_a_dead_one_is_not(play):
    async def scenario(world, fleet):
        world.may_answer.clear()
        asking = [asyncio.ensure_future(version_of(fleet)) for _ in range(4)]
        await until(lambda: prompts_of(world) == [2, 2])
        asking.pop().cancel()
        await until(lambda: fleet.load == 3)
        assert (await fleet.choose()).load == 1
        world.may_answer.set()
        await asyncio.gather(*asking)
        fleet.is_stopping = lambda: True  # so that it stays dead
        world.servers[0].kill()
        assert [await version_of(fleet) for _ in range(3)] == ["0"] * 3 and prompts_of(world) == [2, 5]

    play(scenario, size=2)


def test_new_weights_are_taken_and_an_engine_that_was_away_or_dies_comes_back_with_them(play, tmp_path):
    async def scenario(world, fleet):
        world.held = threading.Event()
        world.servers[0].kill()
        await until(lambda: len(world.started) == 2)  # with weights 0; it is not up yet
        assert not fleet.is_ready and await takes(fleet, tmp_path / "2")
        world.held.set()
        await until(lambda: fleet.is_ready)
        assert await version_of(fleet) == "2" == fleet.weight_version
        world.servers[0].kill()
        await until(lambda: fleet.num_restarts == 2)
        assert world.started == ["0", "0", "2"] and await version_of(fleet) == "2"

    play(scenario)


@pytest.mark.parametrize("refused", ["other shape", "missing", "misshapen"])
def test_weights_that_an_engine_refuses_or_fails_at_and_those_of_another_shape_leave_the_old_ones(
    play, tmp_path, refused
):
    async def scenario(world, fleet):
        assert not await takes(fleet, tmp_path / refused)
        assert await version_of(fleet) == "0" == fleet.weight_version
        if refused == "misshapen":  # refused also while no engine is up
            world.held = threading.Event()
            world.servers[0].kill()
            await until(lambda: not fleet.is_ready)
            assert not await takes(fleet, tmp_path / refused)
            world.held.set()
            await until(lambda: fleet.is_ready)
            assert await version_of(fleet) == "0"

    play(scenario)


@pytest.mark.parametrize(("num_told", "asked"), [(0, [0, 1]), (1, [0])])
def test_a_stream_is_asked_of_another_engine_only_as_long_as_nothing_was_told(play, num_told, asked):
    async def scenario(world, fleet):
        part = Completion(
            rid="x", output_ids=[1], logprobs=[], finish_reason=None, weight_version="0", weight_versions=[],
            num_prompt_tokens=1,
        )  # fmt: skip
        told, numbers = [], []

        def stream_of(number):
            async def stream(request):
                numbers.append(number)
                for _ in range(num_told or number):
                    yield part
                if number == 0:
                    raise SamplerLost("gone")

            return stream

        for number, one in enumerate(fleet.replicas):
            one.client.stream = stream_of(number)
        with pytest.raises(SamplerLost, match="gone") if num_told else contextlib.nullcontext():
            async for completion in fleet.answer(Request(input_ids=[1]), stream=True):
                told.append(completion)
        assert told == [part] and numbers == asked and fleet.load == 0

    play(scenario, size=2)
