"""Weights to samplers on GPUs, with engines that refuse what CUDA refuses: NCCL's groups, and handles of each GPU."""

import pytest

from nanodag.errors import SamplerError
from nanodag.rl.control.services import places_of
from nanodag.rl.sync.broadcast_sync import DistributedSync, SharedSync
from tests.engines.fake_samplers import PATIENCE_S, World

EIGHT = tuple("01234567")


async def given(world, sync, version):
    """Weights of this version given to all, who then say that they have them."""
    world.trainer.weights = str(version)
    await sync.load(world.folder / f"policy-{version}", version)
    assert await world.samplers.versions() == [str(version)] * world.size
    assert await world.samplers.fingerprints() == [[{"w": str(version)}]] * world.size


def by_nccl(world):
    return DistributedSync(world.samplers, world.trainer.ask, check_every=1, timeout_s=PATIENCE_S, backend="nccl")


async def test_each_rank_of_each_engine_has_a_place_in_a_group_of_nccl_which_stays(tmp_path):
    async with World(tmp_path, trainer_gpus=["0"], gpus=[["1", "2"], ["3"], ["4", "5"]]) as world:
        sync = by_nccl(world)
        await given(world, sync, 1)
        await given(world, sync, 2)
        assert [server.rank_offset for server in world.servers] == [1, 3, 4]
    assert world.trainer.asked == ["layout", "open_group", "join_group", "broadcast", "broadcast"]


async def test_two_versions_of_nccl_end_the_stage_with_both_named_before_anything_is_sent(tmp_path):
    async with World(tmp_path, trainer_gpus=["0"], gpus=[["1"], ["2"]]) as world:
        world.trainer.nccl = "2.29.7"
        with pytest.raises(
            SamplerError, match=r"refuses ranks of two versions: .*2\.29\.7, the sampler's 2\.30\.7.*disk"
        ):
            await by_nccl(world).load(tmp_path / "policy-1", 1)
    assert world.trainer.asked == ["layout", "open_group", "join_group", "leave_group"]


async def test_a_group_that_lacks_a_member_is_left_and_formed_anew_with_the_next_weights(tmp_path):
    async with World(tmp_path, trainer_gpus=["0"], gpus=[["1"], ["2"]]) as world:
        sync, well = by_nccl(world), world.servers[1].init_weights_update_group

        async def refuse(body):
            raise ValueError("no memory for a communicator")

        world.servers[1].init_weights_update_group = refuse
        await given(world, sync, 1)
        assert world.trainer.asked[-2:] == ["broadcast", "export"], "kept, and written"
        world.servers[1].init_weights_update_group = well
        await given(world, sync, 2)
    assert world.trainer.asked[-3:] == ["open_group", "join_group", "broadcast"]
    assert "leave_group" in world.trainer.asked


async def test_two_ranks_on_one_gpu_get_the_weights_by_their_folder(tmp_path):
    async with World(tmp_path, trainer_gpus=["0"], gpus=[["1"], ["1"]]) as world:
        await given(world, by_nccl(world), 1)
    assert "export" in world.trainer.asked


@pytest.mark.parametrize(
    ("gpus", "num_ranks", "replicas", "tensor_parallel"),
    [
        (EIGHT, 8, 8, 1),
        (EIGHT, 8, 4, 2),
        (EIGHT, 8, 1, 8),
        (EIGHT[:4], 4, 2, 1),
        (("5",), 1, 2, 1),
        (EIGHT[:3], 3, 1, 3),
    ],
)
async def test_each_engine_gets_handles_from_the_ranks_on_its_gpus_alone(
    tmp_path, gpus, num_ranks, replicas, tensor_parallel
):
    places = places_of(gpus, own=(), num_ranks=num_ranks, replicas=replicas, tensor_parallel=tensor_parallel)
    engines = [own.split(",") for own in places.samplers]
    async with World(tmp_path, trainer_gpus=gpus[:num_ranks], gpus=engines) as world:
        senders = places.senders(num_ranks)
        sync = SharedSync(world.samplers, world.trainer.ask, senders=senders, check_every=1, timeout_s=PATIENCE_S)
        await given(world, sync, 1)
        await given(world, sync, 2)
    assert world.trainer.asked == ["layout", *["share"] * 4], "no folder was needed"


async def test_a_handle_of_another_gpu_is_refused_and_the_weights_come_by_their_folder(tmp_path):
    async with World(tmp_path, trainer_gpus=["0", "1"], gpus=[["0"], ["1"]]) as world:
        sync = SharedSync(world.samplers, world.trainer.ask, check_every=1, timeout_s=PATIENCE_S)  # rank 0 for both
        await given(world, sync, 1)
    assert world.trainer.asked[-1] == "export"
