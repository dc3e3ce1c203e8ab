"""Weights on their way from the trainer to the samplers: verified by name, and by the sampler's own memory."""

import asyncio
import hashlib
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanodag.engines.fleet import Fleet
from nanodag.engines.start import start_engine
from nanodag.errors import SamplerError
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.model.folder import write_like
from nanodag.rl.sync.weight_sync import DiskSync, differing
from nanodag.sampler.fingerprints import Fingerprints
from tests.rl.models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    with start_engine(EngineSettings(model=model, weight_version=0), log_path=log) as process:
        yield process


def trainer_that_writes(source, *, spoil=lambda folder: None):
    """An `ask` that exports the weights in `source` as the trainer's rank 0 does; spoil(folder) comes after it."""

    async def ask(do, folder, fingerprint):
        found = Fingerprints("checkpoint")
        tensors, add = load_file(source / "model.safetensors"), found.add if fingerprint else None
        write_like(source, Path(folder), tensors.items(), dtype=torch.float32, on_tensor=add)
        spoil(Path(folder))
        return [{"fingerprints": found.all()}]

    return ask


def synced(server, model, folder, versions, *, ask, check_every=1):
    """Publish and load versions, one after the other; returns the sampler's fingerprints."""

    async def run():
        samplers = Fleet([server], model=model, version=0, launch=lambda *which: None, connect=SamplerClient)
        sync = DiskSync(samplers, ask, check_every=check_every)
        try:
            for turn, version in enumerate(versions):
                await sync.publish(folder / f"turn-{turn}", version)
                await sync.load(folder / f"turn-{turn}", version)
                if turn:
                    shutil.rmtree(folder / f"turn-{turn - 1}")
            return await samplers.fingerprints()
        finally:
            await samplers.disconnect()

    return asyncio.run(run())


def flip_one_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 2.0**-20
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_what_the_sampler_holds_is_what_the_trainer_gave_away_also_where_no_step_changed_it(server, tmp_path):
    other = save_tiny_model(tmp_path / "other", seed=3)
    ((found,),) = synced(server, other, tmp_path, [1, 1, 1], ask=trainer_that_writes(other))
    tensors = load_file(other / "model.safetensors")
    assert found.keys() == tensors.keys()
    raw = tensors["model.norm.weight"].numpy().tobytes()
    assert found["model.norm.weight"] == hashlib.sha256(raw).hexdigest()[:16]


def test_one_flipped_weight_is_noticed_and_named(server, model, tmp_path):
    ask = trainer_that_writes(model, spoil=flip_one_weight)
    wanted = r"Sampler 0 \(pid \d+, http.*version 7: model\.layers\.1\.mlp\.down_proj\.weight has fingerprint"
    with pytest.raises(SamplerError, match=wanted) as error:
        synced(server, model, tmp_path, [7], ask=ask)
    assert "gate_proj" not in str(error.value)


def test_only_the_first_and_every_nth_sync_is_verified(server, model, tmp_path):
    asked = []
    write = trainer_that_writes(model)

    async def ask(do, folder, fingerprint):
        asked.append(fingerprint)
        return await write(do, folder, fingerprint)

    synced(server, model, tmp_path, [1, 2, 3, 4], ask=ask, check_every=3)
    synced(server, model, tmp_path, [5], ask=ask, check_every=0)
    assert asked == [True, False, False, True, False]


def test_the_checksum_is_answered_in_sglangs_words_and_of_the_weights_in_memory_alone(server, model, tmp_path):
    def checked(**body):
        return httpx.post(server.url + "/weights_checker", json=body, timeout=60, trust_env=False)

    synced(server, model, tmp_path, [1], ask=trainer_that_writes(model))
    answer = checked().json()
    (rank,) = answer["ranks"]
    assert answer["success"] is True and rank["checksums"]
    assert (rank["parallelism_info"][0]["tp_rank"], rank["parallelism_info"][0]["tp_size"]) == (0, 1)
    assert checked(action="compare").status_code == 400
    flip_one_weight(tmp_path / "turn-0")  # of a checkpoint that was loaded
    changed = checked(action="checksum")
    assert changed.status_code == 500 and "layers.1.down differ" in changed.json()["error"]["message"]


def test_missing_and_additional_tensors_are_named():
    assert differing({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == [
        "a has fingerprint none instead of 1",
        "b has fingerprint 3 instead of 2",
        "c has fingerprint 4 instead of none",
    ]


def test_sglangs_layout_fuses_and_fills_up_as_its_tensors_are():
    query, key, value = torch.randn(4, 8), torch.randn(2, 8), torch.randn(2, 8)
    down, embedding = torch.randn(8, 24), torch.randn(70, 8)
    found, whole = Fingerprints("sglang", torch.bfloat16), Fingerprints("checkpoint")
    layer, words = "model.layers.0", "model.embed_tokens.weight"
    for name, tensor in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
        found.add(f"{layer}.self_attn.{name}.weight", tensor)
    whole.add(f"{layer}.self_attn.qkv_proj.weight", torch.cat([query, key, value]).bfloat16())
    found.add(f"{layer}.mlp.down_proj.weight", down)
    whole.add(f"{layer}.mlp.down_proj.weight", torch.cat([down, torch.zeros(8, 8)], dim=1).bfloat16())
    found.add(words, embedding)
    whole.add(words, torch.cat([embedding, torch.zeros(58, 8)]).bfloat16())
    assert found.all() == whole.all()
