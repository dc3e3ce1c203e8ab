"""A sampler killed at every step of giving it weights: none of these ends the stage or leaves other weights."""

import asyncio
import gc
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest

from benchmarks.sync_kills import Bench, Case
from nanodag.engines.watch import ServerWatch
from nanodag.errors import SamplerLost
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Request
from nanodag.rl.sync.broadcast_sync import DistributedSync, SharedSync
from nanodag.rl.sync.weight_sync import DiskSync
from tests.engines.fake_samplers import PATIENCE_S, World

BESIDE = {"timeout_s": PATIENCE_S, "is_beside": True}
ON_THREE_GPUS = {"trainer_gpus": ["0", "1", "2"], "gpus": [["0"], ["1", "2"]]}
SYNCS = {
    "disk": DiskSync,
    "distributed": partial(DistributedSync, **BESIDE),
    "nccl": partial(DistributedSync, backend="nccl", **BESIDE),
    "ipc": partial(SharedSync, **BESIDE),
    "handles": partial(SharedSync, senders=[[0], [1, 2]], **BESIDE),
}
WORLDS = {"nccl": {"trainer_gpus": ["0"], "gpus": [["1"], ["2", "3"]]}, "handles": ON_THREE_GPUS}


async def three_loads(folder, way, *, is_busy, kill_at):
    """Weights 1 to 3 given to two samplers, one of which is killed at a step of the first two; which one that was."""
    folder.mkdir()
    pause = {"pause": "in_place"} if is_busy else {}
    async with World(folder, kill_at=kill_at, **pause, **WORLDS.get(way, {})) as world:
        sync = SYNCS[way](world.samplers, world.trainer.ask, check_every=1)
        asked = [asyncio.ensure_future(world.samplers.generate([Request(input_ids=[n])])) for n in range(2 * is_busy)]
        last = 2 if kill_at is None else 3
        for version in range(1, last + 1):
            world.trainer.weights = str(version)
            await sync.publish(folder / f"policy-{version}", version)
            await sync.load(folder / f"policy-{version}", version)
            assert await world.samplers.versions() == [str(version)] * 2
            assert await world.samplers.fingerprints() == [[{"w": str(version)}]] * 2
        num_steps = len(world.steps)
        world.may_answer.set()
        ((late,),) = await world.samplers.generate([Request(input_ids=[9])])
        assert late.weight_version == str(last)
        await asyncio.gather(*asked)
        await world.samplers.members()  # waits for one that is being started
        assert world.samplers.num_restarts == (kill_at is not None), world.killed
        return num_steps


# A connection that is just being made when its client or the fake server is closed is left to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize(
    ("way", "is_busy", "every"),
    [
        ("distributed", True, 5),
        ("disk", True, 5),
        ("ipc", True, 5),
        ("nccl", True, 5),
        ("handles", True, 5),
        *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in product(SYNCS, (False, True))),
    ],
)
def test_a_sampler_killed_at_any_step_of_a_sync_is_back_with_the_new_weights(tmp_path, way, is_busy, every):
    async def work():
        num_steps = await three_loads(tmp_path / "quiet", way, is_busy=is_busy, kill_at=None)
        wrong = []
        for step in range(0, num_steps, every):
            try:
                run = three_loads(tmp_path / f"{step}", way, is_busy=is_busy, kill_at=step)
                await asyncio.wait_for(run, PATIENCE_S)
            except Exception as error:  # noqa: BLE001 - all of them are told at once
                wrong.append(f"step {step}: {error!r}")
        assert not wrong, f"{len(wrong)} of {num_steps}:\n" + "\n".join(wrong)

    asyncio.run(work())
    gc.collect()  # while such connections are expected


def both(client, call, timeout_s):
    """A broadcast to one sampler, of which call is its half, by a trainer whose half has ended."""

    async def trainer():
        return [{"failure": ""}]

    sync = DistributedSync(SimpleNamespace(), trainer, check_every=0, timeout_s=timeout_s)
    return asyncio.ensure_future(sync._both(trainer(), [SimpleNamespace(client=client)], [call]))


async def test_a_broadcast_that_is_left_while_a_sampler_receives_leaves_no_call_of_its():
    receives = asyncio.ensure_future(asyncio.sleep(PATIENCE_S))
    under_way = both(SimpleNamespace(), receives, timeout_s=PATIENCE_S)
    await asyncio.sleep(0.01)
    under_way.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under_way
    assert receives.cancelled()


async def test_a_group_that_a_sampler_was_told_to_leave_is_of_no_use_even_if_it_answers_just_then():
    told = asyncio.Event()

    async def leave(name):
        told.set()

    async def receive():
        await told.wait()

    _, failure = await both(SimpleNamespace(leave_weight_group=leave), receive(), timeout_s=0.001)
    assert failure == "a sampler was told to leave the group"


async def test_a_client_that_was_closed_says_that_its_sampler_is_lost_however_it_is_asked():
    request = Request(input_ids=[1])
    client = SamplerClient("http://127.0.0.1:1")
    await client.close()
    calls = [client.health, client.end_weight_update, partial(client.generate, [request])]
    for call in (*calls, partial(anext, client.stream(request))):
        with pytest.raises(SamplerLost, match="was closed"):
            await call()


async def test_a_watch_that_is_left_while_an_answer_is_there_already_ends():
    """A cancellation that came with the answer was swallowed, and whoever left waited for ever."""
    answer, is_asked = asyncio.get_running_loop().create_future(), asyncio.Event()

    async def health(*, generates):
        is_asked.set()
        return await answer

    server, client = SimpleNamespace(url="http://x", is_alive=True), SimpleNamespace(health=health)
    watch = ServerWatch(server, client, every_s=0.001, timeout_s=60.0)
    under_way = asyncio.ensure_future(watch.over(asyncio.sleep(60)))
    await is_asked.wait()
    answer.set_result(True)
    await asyncio.sleep(0)  # health has its answer, the look has not
    await asyncio.wait_for(watch.leave(), 5)
    under_way.cancel()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("way", "is_busy", "step"),
    [
        ("distributed", True, (0, "/end_weight_update answered")),
        ("distributed", False, (1, "/update_weights_from_distributed under way")),
        ("ipc", True, (1, "/update_weights_from_tensor under way")),
        ("disk", True, (1, "/update_weights_from_disk about to be sent")),
    ],
)
async def test_a_sampler_killed_in_the_midst_of_a_sync_is_back_with_the_trainers_weights(tmp_path, way, is_busy, step):
    async with Bench(tmp_path, "embedded") as bench:
        await bench.sync(Case(way, is_busy), None)
        for _ in range(50):  # a quick answer comes before the kill: then nothing was killed
            if (await bench.sync(Case(way, is_busy), step)).is_done:
                break
        else:
            pytest.fail(f"{step} was never reached")
        await bench.sync(Case(way, is_busy), None)
