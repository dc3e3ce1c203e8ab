"""Benchmarks while a stage trains: which weights are asked, and what happens beside the trainer when it ends."""

import pytest

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
