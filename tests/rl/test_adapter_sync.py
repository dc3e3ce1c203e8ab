"""Adapters alone on their way to the samplers: merged to the trainer's bits, by each way, also by one that is started
again; and stages that end as with merged weights."""

import json
import os
import re
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_sections import WeightsSection
from nanodag.engines.fleet import Fleet
from nanodag.engines.start import start_engine
from nanodag.errors import BadRequest, SamplerError
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.model.folder import load
from nanodag.model.lora import BETWEEN, PEFT, add_lora, merged, save_adapter
from nanodag.rl.sync import broadcast_sync
from nanodag.rl.sync.broadcast_sync import DistributedSync, SharedSync
from nanodag.rl.sync.weight_sync import DiskSync
from nanodag.rl.trainer.weight_sender import WeightGiver
from nanodag.sampler.fingerprints import Fingerprints, fingerprints_of
from tests.model.adapters import ALPHA, RANK, leave_both
from tests.rl import broadcasts, stages
from tests.rl.models import save_tiny_model
from tests.sampler.reference import make_engine

SCALE = ALPHA / RANK
LAYER = "model.layers.1.mlp.down_proj"


def weights_of(folder, seed):
    """A model's weights with adapters that are not zero, by a trainer's names."""
    model, draw = load(folder), torch.Generator().manual_seed(seed)
    add_lora(model, rank=RANK, alpha=ALPHA, seed=seed)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, tensor in weights.items():
        if name.endswith(".up"):
            tensor.normal_(0, 0.1, generator=draw)
    return weights


def expected(weights, count=2):
    return [[fingerprints_of(merged(weights.items(), scale=SCALE))]] * count


class AdapterTrainer(broadcasts.Trainer):
    """Rank 0 that gives the adapters of weights alone."""

    def __init__(self, folder):
        super().__init__(folder)
        self.take(weights_of(folder, 1))
        self.weights.shapes = {name: tuple(tensor.shape) for name, tensor in self.weights.tensors.items()}
        self.weights.num_bytes = {name: tensor.nbytes for name, tensor in self.weights.tensors.items()}
        timeout_s = broadcasts.TIMEOUT_S
        weights = WeightsSection(sync_bucket_bytes=2000, sync_timeout_s=timeout_s, lora_sync="adapter")
        options = {"rank": 0, "prefix": "", "lora_scale": SCALE}
        self.giver = WeightGiver(self.weights, weights, **options, make_fingerprints=lambda: Fingerprints("checkpoint"))

    def take(self, weights):
        self.weights.tensors = weights

    def export_adapter(self, folder, fingerprint=False, kept=False):
        found = fingerprints_of(self.giver.tensors(merged=True)) if fingerprint else {}
        save_adapter(Path(folder), dict(self.giver.tensors(kept=kept)), alpha=ALPHA, dtype=torch.float32)
        return {"fingerprints": found}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tied model whose file holds its head too, as some do."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), tied=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def pair(base, tmp_path_factory):
    """Two servers that may end: each test begins with what is alive of them."""
    logs = tmp_path_factory.mktemp("log")

    def launch(number, path, version):
        settings = EngineSettings(model=path, base=base, weight_version=version, max_batch=8)
        return start_engine(settings, log_path=logs / f"log-{number}")

    servers = [launch(number, base, 0) for number in range(2)]
    yield launch, servers
    for server in servers:
        server.kill()


@pytest.fixture
def syncing(pair, base, tmp_path):
    launch, servers = pair

    @asynccontextmanager
    async def syncing(way, trainer):
        samplers = Fleet(servers, model=base, version=0, launch=launch, connect=SamplerClient)
        options = {} if way is DiskSync else {"timeout_s": broadcasts.TIMEOUT_S, "is_beside": True}
        sync = way(samplers, trainer.ask, check_every=1, gives_adapters=True, **options)

        async def give(version):
            await sync.publish(tmp_path / f"policy-{version}", version)
            await sync.load(tmp_path / f"policy-{version}", version)

        try:
            yield give, samplers, sync
        finally:
            servers[:] = [member.server for member in await samplers.members()]
            trainer.giver.close()
            await samplers.disconnect()

    return syncing


@pytest.mark.parametrize("way", [DiskSync, DistributedSync, SharedSync])
async def test_samplers_merge_what_the_trainer_merges_and_one_that_was_lost_is_started_with_the_same(
    syncing, base, pair, way
):
    trainer = AdapterTrainer(base)
    async with syncing(way, trainer) as (give, samplers, sync):
        first, second = trainer.weights.tensors, weights_of(base, 2)
        await give(1)
        assert await samplers.fingerprints() == expected(first) and await samplers.versions() == ["1", "1"]
        num_bytes = sum(tensor.nbytes for name, tensor in first.items() if BETWEEN in name and "original" not in name)
        assert num_bytes <= sync.taken()["sync_bytes"] < num_bytes + 4000, "a file has a header"
        trainer.take(second)  # it trained on
        os.kill(pair[1][0].pid, signal.SIGKILL)
        assert await samplers.versions() == ["1", "1"] and await samplers.fingerprints() == expected(first)
        await give(2)
        assert await samplers.fingerprints() == expected(second) and samplers.num_restarts == 1


async def test_a_sampler_lost_in_a_broadcast_of_adapters_is_replaced_and_none_keeps_a_mixture(syncing, base, pair):
    trainer, victim, count = AdapterTrainer(base), pair[1][1], iter(range(1000))
    trainer.giver._timeout_s = broadcasts.TIMEOUT_S
    num_merged = len(trainer.giver._merged_buckets)
    assert len(trainer.giver._buckets) > 2
    trainer.weights.before = lambda names: next(count) == num_merged + 1 and os.kill(victim.pid, signal.SIGKILL)
    async with syncing(DistributedSync, trainer) as (give, samplers, _):
        await give(3)
        assert await samplers.fingerprints() == expected(trainer.weights.tensors) and samplers.num_restarts == 1
    assert trainer.asked.count("export_adapter") == 1


async def test_a_sampler_on_another_machine_is_sent_the_adapters_given_last_or_those_of_a_folder(
    syncing, base, tmp_path, monkeypatch
):
    trainer, earlier = AdapterTrainer(base), weights_of(base, 5)
    save_adapter(tmp_path / "earlier", earlier, alpha=ALPHA, dtype=torch.float32)
    async with syncing(DistributedSync, trainer) as (give, samplers, sync):
        last = trainer.weights.tensors
        await give(1)
        trainer.take(weights_of(base, 6))  # it trained on
        monkeypatch.setattr(broadcast_sync, "is_here", lambda client: False)
        (_, second) = await samplers.members()
        await sync.give(second.client, tmp_path / "earlier", 7)
        assert [await second.client.fingerprints()] == expected(earlier, 1)
        await sync.give(second.client, tmp_path / "policy-1", 1)
        assert [await second.client.fingerprints()] == expected(last, 1)
    assert "export_adapter" not in trainer.asked


async def test_a_base_that_differs_by_one_weight_is_noticed_and_named(syncing, base, tmp_path):
    trainer = AdapterTrainer(base)
    trainer.weights.tensors = {name: tensor.clone() for name, tensor in trainer.weights.tensors.items()}
    trainer.weights.tensors[f"{LAYER}{BETWEEN}original"][3, 5] += 2.0**-10
    with pytest.raises(SamplerError, match=rf"version 4: {LAYER}.weight has fingerprint"):
        async with syncing(SharedSync, trainer) as (give, _, _):
            await give(4)


async def test_adapters_of_which_the_last_have_not_come_leave_the_old_weights(pair, base):
    weights = weights_of(base, 3)
    async with SamplerClient(pair[1][0].url) as client:
        await client.update_weights_from_disk(str(base), 0)
        before = await client.fingerprints()
        giver = AdapterTrainer(base).giver
        giver._shares.tensors = weights
        await client.begin_weight_update(SCALE)
        reply = giver.share(0, counts=[1], fingerprint=False)
        await client.take_weights(reply["handles"])
        with pytest.raises(BadRequest, match="old weights are kept: the last bucket of adapters has not come"):
            await client.end_weight_update()
        giver.close()
        assert await client.fingerprints() == before and (await client.model_info())["weight_version"] == "0"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("code", ["own", "transformers"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_engine_with_a_base_and_adapters_holds_what_one_of_the_merged_model_holds(tmp_path, dtype, code, tied):
    """Also of a sampler in another precision than the trainer's, which rounds the merged weights."""
    base = save_tiny_model(tmp_path / "base", vocabulary=64, tied=tied)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "nanodag_model_code": code}))
    whole, _ = leave_both(tmp_path, base, dtype=getattr(torch, dtype))
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(whole / "adapter" / PEFT).items()}
    save_file(tensors, whole / "adapter" / PEFT, metadata={"format": "pt"})
    for precision in ("float32", "bfloat16"):
        options = {"dtype": precision, "max_batch": 1, "context_length": 64}
        engine = make_engine(whole / "adapter", base=base, **options)
        other = make_engine(whole, **options)
        assert not engine.model.weights.differing(other.model.weights)
        assert engine.model.weights.named().keys() == other.model.weights.named().keys()
        before = make_engine(base, **options)
        assert before.model.weights.differing(other.model.weights)
        before.update_weights(before.load(whole / "adapter"), whole / "adapter", "1")
        assert not before.model.weights.differing(other.model.weights)


def test_adapters_of_another_model_are_refused_and_named(tmp_path):
    base, deeper = save_tiny_model(tmp_path / "base"), save_tiny_model(tmp_path / "deeper", num_layers=3)
    _, alone = leave_both(tmp_path, deeper)
    engine = make_engine(base, max_batch=1, context_length=64)
    with pytest.raises(BadRequest, match=r"alone adapts model\.layers\.2\.\S+, which the model lacks"):
        engine.load(alone)
    save_file({}, alone / PEFT)
    with pytest.raises(BadRequest, match="holds nothing, which is no part of LoRA"):
        engine.load(alone)


AHEAD = {"max_staleness": 1, "correction": "tis"}
STAGES = {
    "disk, two ranks": {"sync": "disk", **stages.on(2)},
    "disk, bf16": {"sync": "disk", "precision": "bf16", **AHEAD},
    "disk, transformers": {"sync": "disk"},
    "distributed, two ranks": {"sync": "distributed", "sync_bucket_bytes": 1000, **stages.on(2)},
    "ipc, ahead": {"sync": "ipc", **AHEAD},
    "ipc, transformers": {"sync": "ipc"},
    "ipc, in turns": {"sync": "ipc", "placement": "shared", "lends_states": True},
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_sends_adapters_ends_on_the_bytes_of_one_that_sends_merged_weights(tmp_path, name):
    common = {"num_steps": 2, "lora_rank": 2, "lora_alpha": 8, "sync_check_every": 1, **STAGES[name]}
    folders = {way: tmp_path / way for way in ("merged", "adapter")}
    whole, alone = (stages.make_job(folder, lora_sync=way, **common) for way, folder in folders.items())
    for job in (whole, alone):
        path = job.inputs["model"] / "config.json"
        code = "transformers" if name.endswith("transformers") else "own"
        path.write_text(json.dumps({**json.loads(path.read_text()), "nanodag_model_code": code}))
        stages.run(job)
    stages.same_in_the_end(alone, whole)
    log = (alone.workspace / "worker.log").read_text()
    assert len(re.findall(r"weights [012]: .*, 25 tensors verified", log)) == 3
    for line, of_whole in zip(stages.metrics(alone), stages.metrics(whole), strict=True):
        assert 0 < line["sync_bytes"] < of_whole["sync_bytes"] / 5


SGLANG = {"lora_rank": 2, "sampler": {"engine": "sglang", "deterministic": False}}
LOOSE = {"sync_mode": "in_place", "max_staleness": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "lora_sync adapter means nothing with lora_rank 0; leave it out"),
        ({"lora_rank": 2, "only": "rollouts"}, "lora_sync adapter means nothing with only: rollouts; leave it out"),
        (SGLANG | {"resources": {"device": "cpu"}}, "lora_sync adapter with sampler.engine sglang on a CPU"),
        (SGLANG | {"sync": "ipc"}, "sampler.engine sglang, which takes adapters as a folder"),
        (SGLANG | LOOSE, "sampler.engine sglang, which takes adapters as a folder"),
        (SGLANG | {"placement": "shared"}, "sampler.engine sglang, which takes adapters as a folder"),
        ({"lora_rank": 2, "sampler": {"urls": ["http://127.0.0.1:1"]}}, "lora_sync adapter needs samplers of"),
    ],
)
def test_samplers_that_cannot_merge_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        RLStage.of(**{"kind": "rl", "data": ["file:x"], "lora_sync": "adapter", **values})
