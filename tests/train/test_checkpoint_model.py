"""The model of a stage under way, out of its checkpoint."""

import sys

import pytest
import torch

from nanodag.config.pipeline import read_stage
from nanodag.model.build import initialise
from nanodag.model.decoder import Decoder
from nanodag.model.folder import load
from nanodag.train import checkpoint_model
from nanodag.train.optimizer import Segment
from nanodag.train.setup import architecture_of
from nanodag.train.state import Common, key, write_state
from nanodag.worker.job import Job, write_job
from tests.train.stages import pretrain, write_tokenizer


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A pretrain stage's job in its workspace."""
    folder = tmp_path_factory.mktemp("stage")
    write_tokenizer(folder / "tokenizer")
    config = read_stage(pretrain(folder))
    job = Job(name="pretrain", run="r", config=config, inputs={"tokenizer": folder / "tokenizer"}, workspace=folder)
    write_job(job)
    return job


def save_halves(model, folder, prefix):
    """A checkpoint of two ranks, each with half of every parameter."""
    named = {prefix + name: parameter.detach() for name, parameter in model.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    common = Common(num_updates=3, num_files=2, shapes=shapes)
    for rank in range(2):
        pieces = {}
        for name, parameter in named.items():
            half = parameter.numel() // 2
            begin, end = (0, half) if rank == 0 else (half, parameter.numel())
            segment = Segment(name=name, shape=shapes[name], flat=0, start=0, offset=begin, length=end - begin)
            pieces[key("weights", segment)] = parameter.reshape(-1)[begin:end].clone()
        write_state(folder, rank, common, pieces)


def convert(monkeypatch, job, checkpoint, folder):
    monkeypatch.setattr(sys, "argv", ["-", str(job.workspace), str(checkpoint), str(folder)])
    return checkpoint_model.main()


@pytest.mark.parametrize("prefix", ["", "decoder."])  # of RL's policy
def test_a_checkpoint_becomes_the_model_that_its_ranks_hold(monkeypatch, tmp_path, job, prefix):
    model = Decoder(architecture_of(job, job.inputs["tokenizer"]))
    initialise(model, 5)
    checkpoint = tmp_path / "step-00000003"
    checkpoint.mkdir()
    save_halves(model, checkpoint, prefix)
    assert convert(monkeypatch, job, checkpoint, tmp_path / "model") == 0
    written = dict(load(tmp_path / "model").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(written[name], parameter), name
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_a_checkpoint_of_adapters_is_refused(monkeypatch, tmp_path, job, capsys):
    checkpoint = tmp_path / "step-00000003"
    checkpoint.mkdir()
    save_halves(torch.nn.Linear(2, 2), checkpoint, "model.layers.0.lora.")
    assert convert(monkeypatch, job, checkpoint, tmp_path / "model") == 1
    assert "trains adapters" in capsys.readouterr().err
