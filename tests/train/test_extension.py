"""Stages that declare a model for more positions: its file, its numbers beside transformers', kills, refusals."""

import json
import shutil
import signal
import sys

import pytest
import torch
import transformers

from nanodag.errors import ConfigError
from nanodag.model.extension import extended
from nanodag.model.folder import load
from nanodag.train import checkpoint_model
from tests.train import forks, stages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return stages.with_inputs(tmp_path_factory.mktemp("extension"))


@pytest.fixture(scope="module")
def model(folder):
    short = stages.pretrain(folder, shape={**stages.SHAPE, "tied_embeddings": True, "max_positions": 64})
    workspace = stages.make_job(folder / "short", short, {"tokenizer": folder / "tokenizer"})
    stages.finish(workspace)
    return workspace / "output"


def longer(folder, by, **changes):
    shape = {"extend_to": 256, "extend_by": by}
    sizes = {"sequence_length": 256, "batch_tokens": 512, "micro_batch_tokens": 256, "horizon_tokens": 512 * 6}
    changes = {"inputs": {"model": "short"}, "shape": shape, "checkpoint_every": 2, **sizes, **changes}
    return stages.pretrain(folder, **changes)


@pytest.mark.parametrize(("by", "num_ranks"), [("yarn", 1), ("ntk", 2)])
def test_a_stage_that_extends_leaves_a_model_that_transformers_computes_alike_and_a_kill_the_same(
    folder, model, by, num_ranks, monkeypatch
):
    settings = longer(folder, by, resources={**stages.RESOURCES, "num_ranks": num_ranks})
    whole, killed = (stages.make_job(folder / f"{by}-{n}", settings, {"model": model}) for n in ("whole", "killed"))
    stages.finish(whole, num_ranks=num_ranks)
    forks.interrupt(killed, after_step=3, with_signal=signal.SIGKILL, num_ranks=num_ranks)
    newest = max((killed / "checkpoints").glob("step-????????"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["-", str(killed), str(newest), str(killed / "followed")])
        assert checkpoint_model.main() == 0
    stages.finish(killed, num_ranks=num_ranks)
    assert stages.content(killed / "output") == stages.content(whole / "output")
    config = json.loads((whole / "output" / "config.json").read_text())
    assert json.loads((killed / "followed" / "config.json").read_text()) == config
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
    found = config["rope_parameters"]
    assert config["max_position_embeddings"] == 256
    assert (found == rope) if by == "yarn" else found["rope_theta"] == pytest.approx(10_000 * 4 ** (16 / 14))
    ids = torch.randint(0, 256, (1, 250), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(whole / "output", trust_remote_code=False)
    ours, places = load(whole / "output"), torch.arange(250)[None]
    with torch.no_grad():
        expected = torch.log_softmax(theirs(ids).logits, -1)
        found = torch.log_softmax(ours(ids, places, torch.zeros_like(ids), want="logits"), -1)
    assert (found - expected).abs().max() < 1e-5
    [links] = killed.glob("extended-*")
    assert {path.name for path in links.iterdir()} == {path.name for path in model.iterdir()}
    assert (links / "model.safetensors").is_symlink()


def test_the_angles_of_a_short_text_are_the_models_where_they_turn_often(folder, model, tmp_path):
    """Untrained, YaRN changes a short text little and a plain model's numbers beyond its positions are others."""
    longer_model = extended(model, tmp_path / "yarn", positions=256, by="yarn")
    ids, places = torch.arange(40)[None] + 60, torch.arange(40)[None]
    batch = ids, places, torch.zeros_like(ids)
    with torch.no_grad():
        plain, stretched = (load(each)(*batch, want="hidden") for each in (model, longer_model))
    assert 0 < (plain - stretched).norm() / plain.norm() < 0.3
    assert extended(model, tmp_path / "yarn", positions=256, by="yarn") == longer_model  # there already
    assert [*tmp_path.iterdir()] == [longer_model]
    shutil.copytree(model, tmp_path / "moved")
    assert extended(tmp_path / "moved", tmp_path / "yarn", positions=256, by="yarn") != longer_model  # its links' place
    with pytest.raises(ConfigError, match="has angles of kind 'yarn'"):
        extended(longer_model, tmp_path / "again", positions=512, by="ntk")
    with pytest.raises(ConfigError, match="64 is no more than the 64 positions"):
        extended(model, tmp_path / "same", positions=64, by="ntk")


@pytest.mark.parametrize(
    ("settings", "theta", "wanted"),
    [({"model_type": "phi", "partial_rotary_factor": 0.5, "rope_theta": 1e4}, "rope_theta", 1e4 * 4 ** (8 / 6)),
     ({"model_type": "llama", "head_dim": 16}, "rope_theta", 1e4 * 4 ** (16 / 14))],
)  # fmt: skip
def test_ntk_counts_the_part_of_a_head_that_turns_and_a_base_that_is_not_said(tmp_path, settings, theta, wanted):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    code = {} if settings["model_type"] == "llama" else {"nanodag_model_code": "transformers"}
    (tmp_path / "m").mkdir()
    config = {**sizes, **settings, **code, "vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": 0}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"original_max_position_embeddings": 16}))
    found = json.loads((extended(tmp_path / "m", tmp_path / "e", positions=256, by="ntk") / "config.json").read_text())
    assert found["rope_parameters"][theta] == pytest.approx(wanted) and "original_max_position_embeddings" not in found
