"""Trainer and samplers that have the device's memory in turns: who gives before who takes, and what a kill changes."""

import asyncio
import gc
from functools import partial

import pytest

from nanodag.inference.protocol import Request, SamplingParams
from nanodag.rl.control.memory_turns import Lending
from nanodag.rl.sync.broadcast_sync import DistributedSync
from nanodag.rl.sync.weight_sync import DiskSync
from tests.engines.fake_samplers import World
from tests.rl.stages import make_job, metrics, run, same_in_the_end

ONE = Request(input_ids=[1], params=SamplingParams(max_new_tokens=1))


async def two_steps(world, kind, lending):
    """What the controller does: a step's training and its sync, twice."""
    made = {"disk": DiskSync, "distributed": partial(DistributedSync, timeout_s=2.0)}[kind]
    sync = made(world.samplers, world.trainer.ask, check_every=1)
    world.may_answer.set()
    for version in (1, 2):
        await lending.to_trainer()
        world.trainer.weights = str(version)
        folder = world.folder / f"policy-{version}"
        await sync.publish(folder, version)
        async with lending.for_sync():
            await sync.load(folder, version)
        ((answer,),) = await world.samplers.generate([ONE])
        assert answer.weight_version == str(version)
    return [(server.weights, server.version, server.released) for server in world.servers]


@pytest.mark.parametrize("kind", ["disk", "distributed"])
async def test_who_gives_memory_does_so_before_the_other_takes_it(tmp_path, kind):
    async with World(tmp_path) as world:
        lending = Lending(world.samplers, world.trainer.ask)
        assert await two_steps(world, kind, lending) == [("2", "2", set())] * 2
        assert lending.taken() == {"sampler_resting_bytes": 0, "trainer_resting_bytes": 1}
        assert lending.taken() == {}
    names = [name for number, name, how in world.steps if number == 0 and how in ("done", "begun")]
    before, sync = {
        "disk": (["export"], ["update_weights_from_disk"]),
        "distributed": ([], ["broadcast", "begin_weight_update", "end_weight_update"]),
    }[kind]
    turns = ["release_memory_occupation", "take_back", *before]
    turns += ["lend", "resume_memory_occupation", *sync, "lend", "resume_memory_occupation"]
    assert [name for name in names if name in turns] == 2 * turns


# A connection that is just being made when its client or the fake server is closed is left to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("kind", ["disk", "distributed"])
def test_a_sampler_killed_at_any_step_of_the_turns_has_weights_and_memory_in_the_end(tmp_path, kind):
    """One is killed at each step that an undisturbed turn has. A broadcast that it leaves waits `timeout_s`."""

    async def main(kill_at):
        folder = tmp_path / f"{kind}-{kill_at}"
        folder.mkdir()
        async with World(folder, kill_at=kill_at) as world:
            lending = Lending(world.samplers, world.trainer.ask)
            async with asyncio.timeout(20):
                assert await two_steps(world, kind, lending) == [("2", "2", set())] * 2, world.killed
            assert (world.killed is None) == (kill_at is None)
            return world.steps

    own = ("release_memory_occupation", "resume_memory_occupation", "lend", "take_back", "server_info")
    places = [n for n, (number, name, how) in enumerate(asyncio.run(main(None))) if number == 0 and name in own]
    assert len(places) > 20
    for place in places:
        asyncio.run(main(place))
    gc.collect()  # while such connections are expected


@pytest.mark.parametrize("sync", ["disk", pytest.param("distributed", marks=pytest.mark.slow)])
def test_a_stage_in_turns_ends_on_the_bytes_of_one_side_by_side(plain, tmp_path, sync):
    shared = make_job(tmp_path, placement="shared", lends_states=True, sync=sync)
    run(shared)
    same_in_the_end(shared, plain)
    resting = {"trainer_resting_bytes", "sampler_resting_bytes"}
    for job in (shared, plain):
        lines = metrics(job)
        assert all(line["trainer_peak_bytes"] > 1 << 20 < line["sampler_peak_bytes"] for line in lines)
        assert resting <= set(lines[1]) if job is shared else not resting & set(lines[1])
