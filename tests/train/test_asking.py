"""Benchmarks while a stage trains: which weights are asked, and what happens beside the trainer when it ends."""

import time
from types import SimpleNamespace

import pytest
import torch

from nanodag.config.pipeline import read_stage
from nanodag.train import validation
from nanodag.worker.job import Job
from tests.train import stages

SORT = {"url": 'python:nanodag.data.lists:sort?count=3&size=6&seed=7&split="test"', "adapter": "problem"}
SORTING = {"name": "sort", "form": "problems", "source": SORT, "max_new_tokens": 8}
ADAPTERS = {**stages.OPTIMIZER, "name": "adamw", "lora_rank": 4, "lora_save": "adapter"}


@pytest.mark.slow
def test_a_stage_that_leaves_adapters_alone_is_asked_as_the_whole_model(tmp_path):
    stages.with_inputs(tmp_path)
    stages.write_model(tmp_path / "base", tmp_path / "tokenizer")
    config = stages.sft(tmp_path, benchmarks=[SORTING], optimizer=ADAPTERS, patience=0, max_steps=2)
    workspace = stages.make_job(tmp_path / "sft", config, {"model": tmp_path / "base"})
    assert 0 <= stages.finish(workspace, fresh=True)["metrics"]["benchmark_sort"] <= 1
    assert {"adapter_model.safetensors"} == {path.name for path in (workspace / "output").glob("*.safetensors")}


class Engine:
    rank, device = 0, torch.device("cpu")

    def __init__(self, asked_until_lost=1_000_000):
        self._left = asked_until_lost

    def highest(self, value):
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("Connection closed by peer")
        return float(value)

    def barrier(self):
        pass

    def gathered(self, value):
        return [value]


def prepared(folder, **changes):
    config = read_stage(stages.sft(folder, benchmarks=[SORTING], **changes))
    job = Job(name="sft", run="test", config=config, inputs={}, workspace=folder)
    return SimpleNamespace(engine=Engine(), job=job, config=config, num_steps=9, export=lambda folder, **how: None)


def test_once_a_stop_was_asked_for_no_weights_are_written_and_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(validation, "stop_requested", lambda: True)
    monkeypatch.setattr(validation, "run_worker", lambda *args, **options: pytest.fail("it was started"))
    stage = prepared(tmp_path)
    stage.export = lambda *args, **options: pytest.fail("weights were written")
    assert validation.ask_benchmarks(stage, 5, lambda *args, **values: None) is None


def test_where_another_rank_is_lost_the_worker_is_ended_and_not_waited_for(tmp_path, monkeypatch):
    stopped = []
    monkeypatch.setattr(validation, "run_worker", lambda job, *, watch: stopped.append(watch.stop.wait(30)))
    stage = prepared(tmp_path)
    stage.engine = Engine(asked_until_lost=4)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="closed by peer"):
        validation.ask_benchmarks(stage, 5, lambda *args, **values: None)
    assert stopped == [True] and time.monotonic() - began < 20


def test_its_worker_is_named_as_the_stage_and_ends_in_time_for_a_checkpoint(tmp_path, monkeypatch):
    jobs = []
    monkeypatch.setattr(validation, "run_worker", lambda job, *, watch: jobs.append(job))
    with pytest.raises(FileNotFoundError):  # it left no results
        validation.ask_benchmarks(prepared(tmp_path, stop_timeout_s=60), 5, lambda *args, **values: None)
    assert (jobs[0].name, jobs[0].config.stop_timeout_s) == ("sft", 20)


def test_ranks_give_back_the_memory_that_they_freed_before_the_worker_starts(tmp_path, monkeypatch):
    order, stage = [], prepared(tmp_path)
    stage.export = lambda folder, **how: order.append("export")
    monkeypatch.setattr(validation, "give_back", lambda device: order.append(device.type))
    monkeypatch.setattr(validation, "run_worker", lambda job, *, watch: order.append("worker"))
    with pytest.raises(FileNotFoundError):  # it left no results
        validation.ask_benchmarks(stage, 5, lambda *args, **values: None)
    assert order == ["export", "cpu", "worker"]
