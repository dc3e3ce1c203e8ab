"""Weights by broadcast and by shared memory: held to the bit, and what becomes of samplers that die, hang or refuse."""

import asyncio
import os
import signal
import time
from base64 import b64decode
from contextlib import asynccontextmanager

import pytest
import torch
from torch import multiprocessing

from nanodag.config.kinds.rl import RLStage
from nanodag.engines.fleet import Fleet
from nanodag.engines.start import start_engine
from nanodag.errors import SamplerError
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.inference.weight_bodies import largest_bucket
from nanodag.rl.sync import broadcast_sync
from nanodag.rl.sync.broadcast_sync import DistributedSync, SharedSync
from nanodag.sampler.fingerprints import Fingerprints
from nanodag.sampler.shared_tensors import opened
from nanodag.train.shares import in_buckets
from tests.engines.samplers import with_samplers
from tests.rl.broadcasts import TIMEOUT_S, Trainer, expected
from tests.rl.models import save_tiny_model
from tests.rl.spread import BIG, shared_by, two_shares
from tests.rl.stages import make_job, metrics, on, run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [save_tiny_model(tmp_path_factory.mktemp("model"), seed=seed) for seed in range(3)]


@pytest.fixture
def trainer(models):
    return Trainer(models[1])


def launch_in(folder):
    """launch(number, model, version) of a fleet whose logs lie in this folder."""

    def launch(number, path, version):
        settings = EngineSettings(model=path, weight_version=version, max_batch=8)
        return start_engine(settings, log_path=folder / f"log-{number}")

    return launch


@pytest.mark.parametrize(
    ("num_bytes", "bucket"),
    [(10**8, 64 << 20), (2 * 494_000_000, 64 << 20), (2 * 7_616_000_000, 952_000_000), (1 << 40, 1 << 30)],
)
def test_a_bucket_is_a_sixteenth_of_the_model_within_bounds(num_bytes, bucket):
    assert largest_bucket(num_bytes) == bucket


@pytest.fixture(scope="module")
def pair(models, tmp_path_factory):
    """Two servers that may end: each test begins with what is alive of them."""
    launch = launch_in(tmp_path_factory.mktemp("log"))
    servers = [launch(number, models[0], 0) for number in range(2)]
    yield launch, servers
    for server in servers:
        server.kill()


@pytest.fixture
def syncing(pair, models, trainer, tmp_path):
    """A context of the two servers, which are replaced by what it leaves: load, samplers, sync. load(version): the
    trainer's weights into them, which may need a folder."""
    launch, servers = pair

    @asynccontextmanager
    async def syncing(way=DistributedSync, check_every=1, **options):
        samplers = Fleet(servers, model=models[0], version=0, launch=launch, connect=SamplerClient, **options)
        sync = way(samplers, trainer.ask, check_every=check_every, timeout_s=TIMEOUT_S, is_beside=True)
        try:
            yield lambda version: sync.load(tmp_path / f"policy-{version}", version), samplers, sync
        finally:
            servers[:] = [member.server for member in await samplers.members()]
            trainer.giver.close()
            await samplers.disconnect()

    return syncing


async def logprobs(samplers):
    request = Request(input_ids=[1, 2, 3], params=SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True))
    ((found,),) = await samplers.generate([request])
    return found.logprobs


ASKED = {
    DistributedSync: ["layout", "open_group", "join_group", "broadcast", "broadcast"],  # no file, one group for both
    SharedSync: ["layout", *["share"] * 2 * 18],  # as many buckets,
}


@pytest.mark.parametrize("way", ASKED)
async def test_every_sampler_has_the_trainers_weights_to_the_bit_and_samples_with_them(syncing, trainer, models, way):
    async with syncing(way) as (load, samplers, _):
        before = await logprobs(samplers)
        await load(1)
        assert await samplers.fingerprints() == expected(models[1]) and await logprobs(samplers) != before
        trainer.weights.take(models[2])
        await load(2)
        assert await samplers.fingerprints() == expected(models[2]) and await samplers.versions() == ["2", "2"]
    assert trainer.asked == ASKED[way]


async def test_one_weight_that_changed_on_its_way_is_noticed_and_named(syncing, trainer):
    name = "model.layers.1.mlp.down_proj.weight"

    class Spoiled(Fingerprints):
        def add(self, own, tensor):
            super().add(own, tensor + 2.0**-20 if own == name else tensor)

    trainer.giver._make_fingerprints = lambda: Spoiled("checkpoint")
    with pytest.raises(SamplerError, match=rf"Sampler 0 .*version 7: {name} has fingerprint"):
        async with syncing() as (load, _, _):
            await load(7)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_a_sampler_lost_in_a_broadcast_is_replaced_and_none_keeps_a_mixture(pair, syncing, trainer, models, how):
    trainer.giver._timeout_s = TIMEOUT_S if how == signal.SIGKILL else 2.0
    victim = pair[1][1]
    count = iter(range(100))

    def hit(names):
        if next(count) == 3:
            os.kill(victim.pid, how)

    trainer.weights.before = hit

    async with syncing() as (load, samplers, _):
        began = time.monotonic()
        await load(1)
        assert await samplers.fingerprints() == expected(models[1]) and time.monotonic() - began < 100
        trainer.weights.take(models[2])
        trainer.giver._timeout_s = TIMEOUT_S
        await load(2)
        assert await samplers.fingerprints() == expected(models[2]) and samplers.num_restarts == 1
    assert not victim.is_alive
    assert trainer.asked.count("export") == 1 and trainer.asked[-3:] == ["open_group", "join_group", "broadcast"]


@pytest.mark.slow
def test_a_sampler_that_stops_in_mid_broadcast_holds_up_no_other_of_three(trainer, models, tmp_path):
    """gloo sends along a tree, in which rank 3 waits for rank 1 or 2."""
    trainer.giver._timeout_s = 2.0
    launched: list[int] = []

    def launch(number, path, version):
        launched.append(number)
        return launch_in(tmp_path)(number, path, version)

    async def work(samplers, servers):
        sync = DistributedSync(samplers, trainer.ask, check_every=1, timeout_s=2.0, is_beside=True)
        for victim in servers[:2]:
            count = iter(range(100))
            trainer.weights.before = lambda names, pid=victim.pid, n=count: (
                next(n) == 3 and os.kill(pid, signal.SIGSTOP)
            )
            await sync.load(tmp_path / f"policy-{len(launched)}", len(launched))
        trainer.giver.close()
        return [server.is_alive for server in servers], await samplers.fingerprints()

    alive, held = with_samplers(launch, models[0], work, count=3)
    assert alive == [False, False, True] and launched == [0, 1, 2, 0, 1]
    assert held == expected(models[1], 3)


@pytest.mark.parametrize("way", ASKED)
async def test_samplers_answer_while_buckets_are_on_their_way_and_stand_still_for_the_swap_alone(syncing, trainer, way):
    trainer.weights.before = lambda names: time.sleep(0.03)
    answered: list[float] = []

    async def ask(samplers):
        while True:
            await logprobs(samplers)
            answered.append(time.monotonic())

    async with syncing(way, check_every=0, pause="in_place") as (load, samplers, sync):
        asking = asyncio.ensure_future(ask(samplers))
        await load(1)
        began = time.monotonic()
        await load(2)
        ended = time.monotonic()
        asking.cancel()
        assert sum(began < when < ended for when in answered) > 5
        costs = sync.taken()
        seconds = costs["sync_bytes"] / 1e9 / costs["sync_gb_per_second"]
        assert costs["sync_bytes"] == 2 * sum(trainer.weights.num_bytes.values())
        assert costs["seconds_samplers_still"] < 0.5 * seconds


async def test_a_sampler_on_another_machine_is_sent_what_was_given_last_or_a_folder_through_a_group_of_its_own(
    syncing, trainer, models, tmp_path, monkeypatch
):
    async with syncing() as (load, samplers, sync):
        await load(1)
        trainer.weights.take(models[0])  # it trained on
        monkeypatch.setattr(broadcast_sync, "is_here", lambda client: False)
        (_, second) = await samplers.members()
        await sync.give(second.client, models[2], 7)  # a folder that this machine has
        assert [await second.client.fingerprints()] == expected(models[2], 1)
        await sync.give(second.client, tmp_path / "policy-1", 1)
        assert [await second.client.fingerprints()] == expected(models[1], 1)
        with pytest.raises(SamplerError, match="newer ones have replaced them"):
            await sync.give(second.client, tmp_path / "policy-0", 0)
        monkeypatch.undo()
        await load(2)  # all are in one group again
        assert await samplers.fingerprints() == expected(models[0])
    assert "export" not in trainer.asked


async def test_a_sampler_that_refuses_is_given_the_weights_through_a_folder(syncing, trainer, models):
    trainer.giver._timeout_s = 2.0
    async with syncing() as (load, samplers, _):
        (_, member) = await samplers.members()
        await member.client.begin_weight_update()  # a second one is refused
        await load(1)
        assert await samplers.fingerprints() == expected(models[1]) and samplers.num_restarts == 0


async def test_a_sampler_lost_later_is_started_again_with_what_was_broadcast_not_what_the_trainer_has_by_then(
    pair, syncing, trainer, models
):
    async with syncing() as (load, samplers, _):
        await load(1)
        trainer.weights.take(models[2])  # it trained on
        os.kill(pair[1][0].pid, signal.SIGKILL)
        assert await samplers.versions() == ["1", "1"] and await samplers.fingerprints() == expected(models[1])
        await load(2)
        assert await samplers.fingerprints() == expected(models[2]) and samplers.num_restarts == 1


async def test_weights_out_of_a_checkpoint_are_read_from_their_folder(syncing, trainer, models):
    async with syncing() as (_, samplers, sync):
        await sync.load(models[2], 4)
        assert await samplers.fingerprints() == expected(models[2]) and await samplers.versions() == ["4", "4"]
    assert trainer.asked == []


async def test_only_the_first_and_every_nth_broadcast_is_verified(syncing, trainer):
    async with syncing(check_every=3) as (load, _, _):
        for version in range(1, 5):
            await load(version)
    assert trainer.checked == [True, False, False, True]


def test_buckets_keep_the_order_and_the_limit_and_a_large_tensor_is_alone():
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1, "e": 7}
    assert list(in_buckets(list(sizes), sizes, 8)) == [["a", "b"], ["c"], ["d", "e"]]


def test_each_of_two_ranks_shares_a_whole_bucket_with_the_sampler_on_its_gpu(tmp_path):
    """In shared memory, which stands for the GPU's: the handles of one rank alone are opened for each sampler."""
    context = multiprocessing.get_context("spawn")
    done, may_end = context.SimpleQueue(), context.Event()
    args = (tmp_path / "store", done, may_end)
    processes = [context.Process(target=shared_by, args=(rank, *args)) for rank in range(2)]
    for process in processes:
        process.start()
    shared = dict(done.get() for _ in processes)
    opened_by = {
        rank: [{n: t.tolist() for n, t in opened(b64decode(h), torch.device("cpu")).items()} for h in bucket["handles"]]
        for rank, buckets in shared.items()
        for bucket in buckets[:1]
    }
    may_end.set()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    whole = {"a": [1.0, 2.0, 3.0], "b": [[4.0, 5.0], [6.0, 7.0]]}
    assert opened_by == {0: [whole], 1: [whole, whole]}
    found = Fingerprints("checkpoint")
    for name, values in whole.items():
        found.add(name, torch.tensor(values))
    assert [shared[rank][0]["fingerprints"] for rank in range(2)] == [found.all(), {}]
    assert [len(shared[rank][1]["handles"]) for rank in range(2)] == [2, 0], "rank 0 alone, where no other is to share"


def test_what_is_spread_over_two_ranks_comes_together_in_a_bucket_and_one_ranks_part(tmp_path):
    context = multiprocessing.get_context("spawn")
    done = context.SimpleQueue()
    processes = [context.Process(target=two_shares, args=(rank, tmp_path / "store", done)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    (first, second, kept), peak = done.get()
    assert BIG < peak < 1.6 * BIG  # it was 3.5 times as much when all parts lay beside the whole
    assert first == kept == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0] and second == [11.0, 12.0, 13.0]


def stage(folder, **config):
    """A stage of four steps, run; its lines about weights, and what it left."""
    folder.mkdir()
    sampler = {"context": 64, "max_batch": 16, "replicas": 2}
    job = make_job(folder, num_steps=4, sync_check_every=1, sampler=sampler, **on(2), **config)
    run(job)
    lines = (job.workspace / "worker.log").read_text().splitlines()
    for line in metrics(job):
        assert line["seconds_sync"] > 0 and line["sync_bytes"] > 0 and line["sync_gb_per_second"] > 0
    left = {path.name: path.read_bytes() for path in sorted(job.output.rglob("*")) if path.is_file()}
    return [line for line in lines if ": weights " in line], left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "staleness", "lora_rank"), [("distributed", 0, 0), ("distributed", 1, 2), ("ipc", 1, 0), ("ipc", 0, 2)]
)
def test_two_zero_3_ranks_that_give_buckets_end_on_the_same_bytes_as_with_files(tmp_path, sync, staleness, lora_rank):
    config = {"max_staleness": staleness, "correction": "tis"}
    if lora_rank:
        config |= {"lora_rank": lora_rank, "lora_alpha": 8}
    _, by_files = stage(tmp_path / "disk", **config)
    lines, left = stage(tmp_path / "buckets", sync=sync, sync_bucket_bytes=4000, **config)
    assert left == by_files
    how = "broadcast" if sync == "distributed" else "shared"
    for version in range(5):
        assert any(f"weights {version}: {how} in 9 buckets" in line and "25 tensors ver" in line for line in lines)


NCCL = {"sync": "distributed", "sync_backend": "nccl"}
TWO_RANKS = {"resources": {"device": "cuda", "num_ranks": 2}}
SPLIT = {"engine": "sglang", "replicas": 2, "tensor_parallel": 2}
OTHERS = {"urls": ["http://127.0.0.1:30000"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**NCCL, "resources": {"device": "cpu"}}, "sync_backend: nccl needs GPUs"),
        ({**NCCL, "resources": {"device": "cuda"}, "placement": "beside"}, "NCCL refuses two processes on one GPU"),
        ({"sync": "ipc", **TWO_RANKS, "sampler": {"replicas": 3}}, "ipc with samplers on 3 GPUs and ranks on 2"),
        ({"sync": "ipc", **TWO_RANKS, "sampler": SPLIT}, "ipc with samplers on 4 GPUs and ranks on 2"),
        ({"sync": "ipc", **TWO_RANKS, "sampler": {"replicas": 1, **OTHERS}}, "ipc with 2 ranks and servers of others"),
        ({"sync": "ipc", "sync_address": "lo"}, "sync_address lo means nothing with sync: ipc"),
        ({"sync_backend": "nccl"}, "sync_backend nccl means nothing with sync: auto"),
        ({"sync": "disk", "sync_bucket_bytes": 1}, "sync_bucket_bytes 1 means nothing with sync: disk"),
    ],
)
def test_what_cannot_work_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        RLStage.of(**{"kind": "rl", "data": ["file:x"], **values})
