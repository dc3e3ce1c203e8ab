"""Weights by broadcast and by shared memory: held to the bit, and what becomes of samplers that die, hang or refuse."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import multiprocessing

from nanodag.config.kinds.rl import RLStage
from nanodag.engines.fleet import Fleet
from nanodag.engines.start import start_engine
from nanodag.errors import SamplerError
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.model.folder import write_like
from nanodag.rl.sync import broadcast_sync
from nanodag.rl.sync.broadcast_sync import DistributedSync, SharedSync
from nanodag.rl.trainer.weight_sender import WeightGiver
from nanodag.sampler.fingerprints import Fingerprints
from nanodag.train.shares import in_buckets
from tests.engines.samplers import with_samplers
from tests.rl.models import save_tiny_model
from tests.rl.spread import BIG, two_shares
from tests.rl.stages import make_job, metrics, run

TIMEOUT_S = 20.0


class Weights:
    """What `Shares` is on one rank, over the tensors of a checkpoint. before(names): called at each bucket."""

    dtype = torch.float32

    def __init__(self, folder: Path) -> None:
        self.take(folder)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        self.num_bytes = {name: tensor.nbytes for name, tensor in self.tensors.items()}
        self.before = lambda names: None

    def take(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")

    def keep(self) -> None:
        self.kept = dict(self.tensors)

    def together(self, names, *, kept=False):
        if not kept:
            self.before(names)
        held = self.kept if kept else self.tensors
        return torch.cat([held[name].reshape(-1).view(torch.uint8) for name in names])


class Trainer:
    """Rank 0 of a trainer: answers what `ask` asks for."""

    def __init__(self, folder: Path, *, bucket_bytes: int = 2000, timeout_s: float = TIMEOUT_S) -> None:
        self.source = folder
        self.weights = Weights(folder)
        self.giver = WeightGiver(
            self.weights,
            rank=0,
            prefix="",
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            make_fingerprints=lambda: Fingerprints("checkpoint"),
        )
        self.asked: list[str] = []

    async def ask(self, do, **arguments):
        self.asked.append(do)
        return [await asyncio.to_thread(getattr(self, do, None) or getattr(self.giver, do), **arguments)]

    def export(self, folder, kept):
        assert kept
        write_like(self.source, Path(folder), self.giver.kept(), dtype=torch.float32)
        return {}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [save_tiny_model(tmp_path_factory.mktemp("model"), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def pair(models, tmp_path_factory):
    """Two servers that may end: each test begins with what is alive of them."""
    folder = tmp_path_factory.mktemp("log")

    def launch(number, path, version):
        return start_engine(
            EngineSettings(model=path, weight_version=version, max_batch=8), log_path=folder / f"log-{number}"
        )

    servers = [launch(0, models[0], 0), launch(1, models[0], 0)]
    yield launch, servers
    for server in servers:
        server.kill()


def with_sync(pair, model, trainer, work, *, check_every=1, way=DistributedSync, **options):
    """Run `work(sync, samplers)` on the two servers, which are replaced by what it leaves."""
    launch, servers = pair

    async def main():
        samplers = Fleet(servers, model=model, version=0, launch=launch, connect=SamplerClient, **options)
        sync = way(samplers, trainer.ask, check_every=check_every, timeout_s=TIMEOUT_S, is_beside=True)
        try:
            return await work(sync, samplers)
        finally:
            servers[:] = [member.server for member in await samplers.members()]
            trainer.giver.close()
            await samplers.disconnect()

    return asyncio.run(main())


def expected(folder):
    found = Fingerprints("checkpoint")
    for name, tensor in load_file(folder / "model.safetensors").items():
        found.add(name, tensor)
    return found.all()


async def logprobs(samplers):
    request = Request(input_ids=[1, 2, 3], params=SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True))
    ((found,),) = await samplers.generate([request])
    return found.logprobs


ASKED = {
    DistributedSync: ["layout", "open_group", "join_group", "broadcast", "broadcast"],  # no file, one group for both
    SharedSync: ["layout", *["share"] * 2 * 18],  # as many buckets,
}


@pytest.mark.parametrize("way", ASKED)
def test_every_sampler_has_the_trainers_weights_to_the_bit_and_samples_with_them(pair, models, tmp_path, way):
    trainer = Trainer(models[1])

    async def work(sync, samplers):
        before = await logprobs(samplers)
        await sync.load(tmp_path / "policy-1", 1)
        first, changed = await samplers.fingerprints(), await logprobs(samplers)
        trainer.weights.take(models[2])
        await sync.load(tmp_path / "policy-2", 2)
        return before, changed, first, await samplers.fingerprints(), await samplers.versions()

    before, changed, first, second, versions = with_sync(pair, models[0], trainer, work, way=way)
    assert first == [[expected(models[1])]] * 2 and second == [[expected(models[2])]] * 2
    assert before != changed and versions == ["2", "2"]
    assert trainer.asked == ASKED[way]


def test_one_weight_that_changed_on_its_way_is_noticed_and_named(pair, models, tmp_path):
    trainer = Trainer(models[1])
    name = "model.layers.1.mlp.down_proj.weight"

    class Spoiled(Fingerprints):
        def add(self, own, tensor):
            super().add(own, tensor + 2.0**-20 if own == name else tensor)

    trainer.giver._make_fingerprints = lambda: Spoiled("checkpoint")
    with pytest.raises(SamplerError, match=rf"Sampler 0 .*version 7: {name} has fingerprint"):
        with_sync(pair, models[0], trainer, lambda sync, samplers: sync.load(tmp_path / "policy-7", 7))


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_sampler_lost_in_mid_broadcast_is_replaced_and_none_keeps_a_mixture(pair, models, tmp_path, how):
    trainer = Trainer(models[1], timeout_s=TIMEOUT_S if how == signal.SIGKILL else 2.0)
    victim = pair[1][1]
    count = iter(range(100))

    def hit(names):
        if next(count) == 3:
            os.kill(victim.pid, how)

    trainer.weights.before = hit

    async def work(sync, samplers):
        began = time.monotonic()
        await sync.load(tmp_path / "policy-1", 1)
        held, took = await samplers.fingerprints(), time.monotonic() - began
        trainer.weights.take(models[2])
        trainer.giver._timeout_s = TIMEOUT_S
        await sync.load(tmp_path / "policy-2", 2)
        return held, took, await samplers.fingerprints(), samplers.num_restarts

    held, took, after, num_restarts = with_sync(pair, models[0], trainer, work)
    assert held == [[expected(models[1])]] * 2 and after == [[expected(models[2])]] * 2
    assert num_restarts == 1 and took < 100 and not victim.is_alive
    assert trainer.asked.count("export") == 1 and trainer.asked[-3:] == ["open_group", "join_group", "broadcast"]


@pytest.mark.slow
def test_a_sampler_that_stops_in_mid_broadcast_holds_up_no_other_of_three(models, tmp_path):
    """gloo sends along a tree, in which rank 3 waits for rank 1 or 2."""
    trainer = Trainer(models[1], timeout_s=2.0)
    launched: list[int] = []

    def launch(number, path, version):
        launched.append(number)
        return start_engine(
            EngineSettings(model=path, weight_version=version, max_batch=8), log_path=tmp_path / f"log-{number}"
        )

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
    assert held == [[expected(models[1])]] * 3


@pytest.mark.parametrize("way", ASKED)
def test_samplers_answer_while_buckets_are_on_their_way_and_stand_still_for_the_swap_alone(pair, models, tmp_path, way):
    trainer = Trainer(models[1])
    trainer.weights.before = lambda names: time.sleep(0.03)
    answered: list[float] = []

    async def ask(samplers):
        while True:
            await logprobs(samplers)
            answered.append(time.monotonic())

    async def work(sync, samplers):
        asking = asyncio.ensure_future(ask(samplers))
        await sync.load(tmp_path / "policy-1", 1)
        began = time.monotonic()
        await sync.load(tmp_path / "policy-2", 2)
        ended = time.monotonic()
        asking.cancel()
        return sync.costs.taken(), sum(began < when < ended for when in answered)

    costs, during = with_sync(pair, models[0], trainer, work, way=way, check_every=0, pause="in_place")
    seconds = costs["sync_bytes"] / 1e9 / costs["sync_gb_per_second"]
    assert costs["sync_bytes"] == 2 * sum(trainer.weights.num_bytes.values())
    assert during > 5 and costs["seconds_samplers_still"] < 0.5 * seconds


def test_a_sampler_on_another_machine_is_sent_what_was_given_last_or_a_folder_through_a_group_of_its_own(
    pair, models, tmp_path, monkeypatch
):
    trainer = Trainer(models[1])

    async def work(sync, samplers):
        await sync.load(tmp_path / "policy-1", 1)
        trainer.weights.take(models[0])  # it trained on
        monkeypatch.setattr(broadcast_sync, "is_here", lambda client: False)
        (_, second) = await samplers.members()
        await sync.give(second.client, models[2], 7)  # a folder that this machine has
        by_folder = await second.client.fingerprints()
        await sync.give(second.client, tmp_path / "policy-1", 1)
        again = await second.client.fingerprints()
        with pytest.raises(SamplerError, match="newer ones have replaced them"):
            await sync.give(second.client, tmp_path / "policy-0", 0)
        monkeypatch.undo()
        await sync.load(tmp_path / "policy-2", 2)  # all are in one group again
        return by_folder, again, await samplers.fingerprints()

    by_folder, again, after = with_sync(pair, models[0], trainer, work)
    assert (
        by_folder == [expected(models[2])] and again == [expected(models[1])] and after == [[expected(models[0])]] * 2
    )
    assert "export" not in trainer.asked


def test_a_sampler_that_refuses_is_given_the_weights_through_a_folder(pair, models, tmp_path):
    trainer = Trainer(models[1], timeout_s=2.0)

    async def work(sync, samplers):
        (_, member) = await samplers.members()
        await member.client.begin_weight_update()  # a second one is refused
        await sync.load(tmp_path / "policy-1", 1)
        return await samplers.fingerprints(), samplers.num_restarts

    held, num_restarts = with_sync(pair, models[0], trainer, work)
    assert held == [[expected(models[1])]] * 2 and num_restarts == 0


def test_a_sampler_lost_later_is_started_again_with_what_was_broadcast_not_what_the_trainer_has_by_then(
    pair, models, tmp_path
):
    trainer = Trainer(models[1])

    async def work(sync, samplers):
        await sync.load(tmp_path / "policy-1", 1)
        trainer.weights.take(models[2])  # it trained on
        os.kill(pair[1][0].pid, signal.SIGKILL)
        assert await samplers.versions() == ["1", "1"]
        held = await samplers.fingerprints()
        await sync.load(tmp_path / "policy-2", 2)
        return held, await samplers.fingerprints(), samplers.num_restarts

    held, after, num_restarts = with_sync(pair, models[0], trainer, work)
    assert held == [[expected(models[1])]] * 2 and after == [[expected(models[2])]] * 2 and num_restarts == 1


def test_weights_out_of_a_checkpoint_are_read_from_their_folder(pair, models, tmp_path):
    trainer = Trainer(models[1])

    async def work(sync, samplers):
        await sync.load(models[2], 4)
        return await samplers.fingerprints(), await samplers.versions()

    held, versions = with_sync(pair, models[0], trainer, work)
    assert held == [[expected(models[2])]] * 2 and versions == ["4", "4"] and trainer.asked == []


def test_only_the_first_and_every_nth_broadcast_is_verified(pair, models, tmp_path):
    trainer, asked = Trainer(models[1]), []
    send = trainer.giver.broadcast

    def broadcast(*, which, fingerprint):
        asked.append(fingerprint)
        return send(which=which, fingerprint=fingerprint)

    trainer.broadcast = broadcast

    async def work(sync, samplers):
        for version in range(1, 5):
            await sync.load(tmp_path / f"policy-{version}", version)

    with_sync(pair, models[0], trainer, work, check_every=3)
    assert asked == [True, False, False, True]


def test_buckets_keep_the_order_and_the_limit_and_a_large_tensor_is_alone():
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1, "e": 7}
    assert list(in_buckets(list(sizes), sizes, 8)) == [["a", "b"], ["c"], ["d", "e"]]


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
    resources = {"num_ranks": 2, "threads": 1, "device": "cpu"}
    sampler = {"context": 64, "max_batch": 16, "replicas": 2}
    job = make_job(folder, num_steps=4, sync_check_every=1, resources=resources, sampler=sampler, **config)
    run(job)
    lines = (job.workspace / "worker.log").read_text().splitlines()
    for line in metrics(job):
        assert line["seconds_sync"] > 0 and line["sync_bytes"] > 0 and line["sync_gb_per_second"] > 0
    left = {path.name: path.read_bytes() for path in sorted(job.output.iterdir())}
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


def test_what_cannot_work_is_refused_by_name(tmp_path):
    config = make_job(tmp_path, sampler={"context": 64, "deterministic": False}).config.model_dump()
    distributed = {"sync": "distributed", "sync_check_every": 0}
    with pytest.raises(ValidationError, match="sync_backend: nccl needs GPUs"):
        RLStage(**(config | {"weights": {**distributed, "sync_backend": "nccl"}, "resources": {"device": "cpu"}}))
    one = {"weights": {**distributed, "sync_backend": "nccl"}, "resources": {"device": "cuda"}, "placement": "beside"}
    with pytest.raises(ValidationError, match="NCCL refuses two processes on one GPU"):
        RLStage(**(config | one))
    two = {"device": "cuda", "num_ranks": 2}
    with pytest.raises(ValidationError, match="sync: ipc with 2 GPUs"):
        RLStage(**(config | {"weights": {"sync": "ipc", "sync_check_every": 0}, "resources": two}))
    with pytest.raises(ValidationError, match="sync_address lo means nothing with sync: ipc"):
        RLStage(**(config | {"weights": {"sync": "ipc", "sync_address": "lo"}}))
    with pytest.raises(ValidationError, match="sync_bucket_bytes 1 means nothing with sync: disk"):
        RLStage(**(config | {"weights": {"sync_bucket_bytes": 1}}))
    RLStage(**(config | {"weights": {"sync": "distributed", "sync_bucket_bytes": 1}}))
