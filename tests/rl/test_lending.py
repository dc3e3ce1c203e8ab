"""Trainer and samplers that have the device's memory in turns: who gives before who takes, and what a kill changes."""

import asyncio

import pytest

from nanodag.config.kinds.rl import RLStage
from nanodag.errors import BadRequest
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.rl.control.memory_turns import Lending
from nanodag.rl.sync.broadcast_sync import DistributedSync
from nanodag.rl.sync.weight_sync import DiskSync
from tests.engines.fake_samplers import World
from tests.rl.stages import digest, make_job, metrics, run, same_in_the_end

ONE = Request(input_ids=[1], params=SamplingParams(max_new_tokens=1))


def sync_of(world, kind):
    if kind == "disk":
        return DiskSync(world.samplers, world.trainer.ask, check_every=1)
    return DistributedSync(world.samplers, world.trainer.ask, check_every=1, timeout_s=2.0)


async def two_steps(world, kind, lending):
    """What the controller does: a step's training and its sync, twice."""
    sync = sync_of(world, kind)
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
def test_who_gives_memory_does_so_before_the_other_takes_it(tmp_path, kind):
    async def main():
        async with World(tmp_path) as world:
            lending = Lending(world.samplers, world.trainer.ask)
            assert await two_steps(world, kind, lending) == [("2", "2", set())] * 2
            assert lending.taken() == {"sampler_resting_bytes": 0, "trainer_resting_bytes": 1}
            assert lending.taken() == {}
            return world.steps

    names = [name for number, name, how in asyncio.run(main()) if number == 0 and how in ("done", "begun")]
    sync = {
        "disk": (["export"], ["update_weights_from_disk"]),
        "distributed": ([], ["broadcast", "begin_weight_update", "end_weight_update"]),
    }[kind]
    turns = [
        *("release_memory_occupation", "take_back", *sync[0]),
        *("lend", "resume_memory_occupation", *sync[1], "lend", "resume_memory_occupation", "generate"),
    ]
    asked = set(turns)
    assert [name for name in names if name in asked and name != "generate"] == [n for n in 2 * turns if n != "generate"]


def test_in_the_trainers_turn_samplers_refuse_to_generate(tmp_path):
    async def main():
        async with World(tmp_path) as world:
            await Lending(world.samplers, world.trainer.ask).to_trainer()
            with pytest.raises(BadRequest, match="kv_cache and weights released"):
                await world.samplers.generate([ONE])

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["disk", "distributed"])
def test_a_sampler_killed_at_any_step_of_the_turns_has_weights_and_memory_in_the_end(tmp_path, kind):
    """One is killed at each step that an undisturbed turn has. A broadcast that it leaves waits `timeout_s`."""

    async def main(kill_at):
        folder = tmp_path / f"{kind}-{kill_at}"
        folder.mkdir()
        async with World(folder, kill_at=kill_at) as world:
            lending = Lending(world.samplers, world.trainer.ask)
            async with asyncio.timeout(20):
                found = await two_steps(world, kind, lending)
            return found, world.steps, world.killed

    _, steps, _ = asyncio.run(main(None))
    own = ("release_memory_occupation", "resume_memory_occupation", "lend", "take_back", "server_info")
    places = [place for place, (number, name, how) in enumerate(steps) if number == 0 and name in own]
    assert len(places) > 20
    for place in places:
        found, _, killed = asyncio.run(main(place))
        assert killed is not None and found == [("2", "2", set())] * 2, killed


@pytest.mark.parametrize("sync", ["disk", pytest.param("distributed", marks=pytest.mark.slow)])
def test_a_stage_in_turns_ends_on_the_bytes_of_one_side_by_side(tmp_path, sync):
    jobs = []
    for placement in ("beside", "shared"):
        (tmp_path / placement).mkdir()
        given = {"placement": placement, "lends_states": placement == "shared", "sync": sync}
        jobs.append(make_job(tmp_path / placement, **given))
        run(jobs[-1])
    beside, shared = jobs
    assert digest(shared.output) == digest(beside.output)
    lines = [metrics(job) for job in jobs]
    assert all(line["trainer_peak_bytes"] > 1 << 20 < line["sampler_peak_bytes"] for job in lines for line in job)
    resting = {"trainer_resting_bytes", "sampler_resting_bytes"}
    assert not resting & set(lines[0][1]) and resting <= set(lines[1][1])
    same_in_the_end(shared, beside)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"placement": "shared", "max_staleness": 1}, "need memory while it works"),
        ({"placement": "beside", "lends_states": True}, "nobody takes turns"),
        ({"placement": "shared", "sampler": {"gpus": 4}}, "sampler.gpus 4 with placement: shared"),
        ({"placement": "separate", "sampler": {"gpus": 4, "nodes": 1}}, "leave one of them out"),
        ({"placement": "separate", "resources": {"device": "cpu"}}, "share its cores"),
    ],
)
def test_what_a_placement_cannot_do_is_refused_with_the_way_out(given, why):
    with pytest.raises(ValueError, match=why):
        RLStage.of(kind="rl", data=["file:x"], **given)
