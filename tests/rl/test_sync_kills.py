"""A sampler killed at every step of giving it weights: none of these ends the stage, or leaves another one's weights."""

import asyncio

import pytest

from nanodag.errors import SamplerLost
from nanodag.rl.broadcast_sync import DistributedSync
from nanodag.rl.sync import DiskSync
from nanodag.sampler.client import SamplerClient
from nanodag.sampler.protocol import Request
from tests.rl.fake_samplers import PATIENCE_S, World


def make_sync(way, world):
    if way == "disk":
        return DiskSync(world.samplers, world.trainer.ask, check_every=1)
    return DistributedSync(world.samplers, world.trainer.ask, check_every=1, timeout_s=PATIENCE_S)


async def three_loads(folder, way, *, is_busy, kill_at, has_router):
    """Weights 1 to 3 given to two samplers, one of which is killed at a step of the first two; which one that was."""
    folder.mkdir()
    pause = {"pause": "in_place"} if is_busy else {}
    async with World(folder, kill_at=kill_at, has_router=has_router, **pause) as world:
        sync = make_sync(way, world)
        asked = [asyncio.ensure_future(world.samplers.generate([Request(input_ids=[n])])) for n in range(2 * is_busy)]
        for version in (1, 2, 3):
            if version == 3 and kill_at is None:
                break
            world.trainer.weights = str(version)
            await sync.publish(folder / f"turn-{version}", version)
            async with world.samplers.standing():
                await sync.load(folder / f"turn-{version}", version)
            assert await world.samplers.versions() == [str(version)] * 2
            assert await world.samplers.fingerprints() == [[{"w": str(version)}]] * 2
        num_steps = len(world.steps)
        world.may_answer.set()
        ((late,),) = await world.samplers.generate([Request(input_ids=[9])])
        assert late.weight_version == str(2 if kill_at is None else 3)
        await asyncio.gather(*asked)
        await world.samplers.members()  # waits for one that is being started
        assert world.samplers.num_restarts == (kill_at is not None), world.killed
        return num_steps


@pytest.mark.parametrize("has_router", [False, True])
@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("way", ["disk", "distributed"])
def test_a_sampler_killed_at_any_step_of_a_weight_sync_is_back_with_the_new_weights(tmp_path, way, is_busy, has_router):
    async def work():
        options = {"is_busy": is_busy, "has_router": has_router}
        num_steps = await three_loads(tmp_path / "quiet", way, kill_at=None, **options)
        wrong = []
        for step in range(num_steps):
            try:
                await asyncio.wait_for(three_loads(tmp_path / f"{step}", way, kill_at=step, **options), PATIENCE_S)
            except Exception as error:  # noqa: BLE001 - all of them are told at once
                wrong.append(f"step {step}: {error!r}")
        assert not wrong, f"{len(wrong)} of {num_steps}:\n" + "\n".join(wrong)

    asyncio.run(work())
