"""The model of a stage under way, out of its checkpoint."""

import sys

import pytest
import torch

from nanodag.config.pipeline import read_stage
from nanodag.model.build import initialise
from nanodag.model.decoder import Decoder
from nanodag.model.folder import load
from nanodag.train import checkpoint_model
from nanodag.train.checkpoint import key, write_state
from nanodag.train.optimizer import Segment
from nanodag.train.setup import architecture_of
from nanodag.worker.job import Job, write_job
from tests.train.stages import pretrain, write_tokenizer


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage")
    write_tokenizer(folder / "tokenizer")
    config = read_stage(pretrain(folder))
    job = Job(name="pretrain", run="r", config=config, inputs={"tokenizer": folder / "tokenizer"}, workspace=folder)
    write_job(job)
    return job


def convert(monkeypatch, job, folder, model, prefix):
    """Write a checkpoint of two ranks, each with half of every parameter, and make a model of it; the exit code."""
    checkpoint = folder / "step-00000003"
    checkpoint.mkdir()
    named = {prefix + name: parameter.detach() for name, parameter in model.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    for rank in range(2):
        pieces = {}
        for name, parameter in named.items():
            halves = parameter.reshape(-1).tensor_split(2)
            place = {"offset": rank * len(halves[0]), "length": len(halves[rank])}
            segment = Segment(name=name, shape=shapes[name], flat=0, start=0, **place)
            pieces[key("weights", segment)] = halves[rank].clone()
        write_state(checkpoint, rank, dict(num_updates=3, num_files=2, shapes=shapes), pieces)
    monkeypatch.setattr(sys, "argv", ["-", str(job.workspace), str(checkpoint), str(folder / "model")])
    return checkpoint_model.main()


@pytest.mark.parametrize("prefix", ["", "decoder."])  # of RL's policy
def test_a_checkpoint_becomes_the_model_that_its_ranks_hold(monkeypatch, tmp_path, job, prefix):
    model = Decoder(architecture_of(job, job.inputs["tokenizer"]))
    initialise(model, 5)
    assert convert(monkeypatch, job, tmp_path, model, prefix) == 0
    written = dict(load(tmp_path / "model").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(written[name], parameter), name
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_a_checkpoint_of_adapters_is_refused(monkeypatch, tmp_path, job, capsys):
    assert convert(monkeypatch, job, tmp_path, torch.nn.Linear(2, 2), "model.layers.0.lora.") == 1
    assert "trains adapters" in capsys.readouterr().err
