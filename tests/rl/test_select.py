"""Best of n as a stage: what it leaves, what reads it, and what names it."""

import json
from dataclasses import replace

import pytest

from nanodag.config.kinds.rl import SelectStage
from nanodag.config.pipeline import Pipeline
from nanodag.data.records import check_record
from nanodag.report.__main__ import training_urls
from nanodag.rl.rollouts.rollout import read_rollouts
from nanodag.rl.rollouts.rollout_files import shelf_of
from nanodag.store.artifacts import Store
from nanodag.worker.job import ROWS, Job, read_job, write_job
from tests.config.stages import STAGES
from tests.rl.stages import make_job, metrics, run
from tests.run_records import built, run_record

SELECT = {"kind": "select", "inputs": {"model": "base"}, "data": ["file:/p.jsonl"]}
SFT = {"kind": "sft", "inputs": {"model": "base", "conversations": "best"}, "data": ["input:conversations"]}


def select_job(folder, **values):
    """A job of kind select on the prompts, the reward and the sampler of a tiny RL stage."""
    job = make_job(folder)
    shared = ("inputs", "data", "seed", "resources", "reward", "sampler", "num_steps", "checkpoint_every")
    settings = {name: getattr(job.config, name) for name in shared}
    settings |= {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 8}
    job = replace(job, config=SelectStage.of(kind="select", **(settings | values)))
    write_job(job)
    return job


def test_the_stage_leaves_the_best_finished_answer_to_each_prompt_as_a_conversation(tmp_path):
    job = select_job(tmp_path, lowest_reward=-1.0)
    run(job)
    rows = [json.loads(line) for line in (job.output / ROWS).read_text().splitlines()]
    best: dict[str, float] = {}
    for path in (job.records / "rollouts").glob("step-????????.jsonl"):
        for rollout in read_rollouts(path):
            if rollout.finish_reason == "stop":
                best[rollout.prompt_id] = max(best.get(rollout.prompt_id, -1.0), rollout.reward)
    assert {row["prompt_id"]: row["reward"] for row in rows} == best and best
    for row in rows:
        check_record(row, "conversation")
        assert row["messages"][0]["content"].startswith("word ")
    found = json.loads((job.workspace / "result.json").read_text())["metrics"]
    assert found["conversations"] == len(rows) and not list(job.output.glob("*.safetensors"))
    assert "loss" not in metrics(job)[0]


def test_a_stage_without_a_good_answer_fails_and_says_what_was_left_out(tmp_path):
    job = select_job(tmp_path, lowest_reward=100.0, num_steps=1)
    with pytest.raises(AssertionError, match="No answer was good enough"):
        run(job)


def test_sources_of_several_inputs_become_their_files_in_the_worker_with_their_slices(tmp_path):
    inputs, data = {"conversations": "best", "conversations_new": "newer"}, ["input:conversations[:50]"]
    sft = {**SFT, "inputs": {"model": "base", **inputs}, "data": [*data, "input:conversations_new"]}
    config = Pipeline(preset="p", stages={**STAGES, "best": SELECT, "newer": SELECT, "sft": sft}).stages["sft"]
    folders = {label: tmp_path / stage for label, stage in inputs.items()}
    job = Job(name="sft", run="r", config=config, inputs=folders, workspace=tmp_path)
    urls = [source.url for source in read_job(write_job(job)).config.data]
    assert urls == [f"file:{tmp_path}/best/{ROWS}[:50]", f"file:{tmp_path}/newer/{ROWS}"]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"best": SELECT, "sft": {**SFT, "inputs": {"model": "base"}}}, "needs an input 'conversations'"),
        ({"sft": {**SFT, "inputs": {"model": "base", "conversations": "base"}}}, "is not a conversations"),
        ({"best": {**SELECT, "data": ["input:conversations"]}}, "needs an input 'conversations'"),
        ({"best": SELECT, "sft": {**SFT, "inputs": {"model": "base", "conversations2": "best"}}}, "no input 'convers"),
        ({"best": {**SELECT, "inputs": {"model": "base", "conversations_2": "best"}}}, "no input 'conversations_2'"),
        ({"sft": {**SFT, "inputs": {"model": "base", "conversations_2": "base"}}}, "is not a conversations"),
        ({"best": {**SELECT, "rollout": {"generate": "calculator"}}}, "rollout.generate"),
        ({"best": {**SELECT, "rollout": {"over_sampling": 8}}}, "over_sampling 8 is below prompts_per_step 32"),
        ({"best": {**SELECT, "reward": {"f1": 0}}}, "weights of 0 alone"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_work_begins(stages, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(preset="p", stages={**STAGES, **stages})


def test_what_a_finished_stage_sampled_is_read_with_the_tokenizer_of_its_input(tmp_path):
    store, made = Store(tmp_path / "store"), tmp_path / "made"
    made.mkdir()
    (made / "file").write_text("x")
    facts = {"files": made, "records": made, "environment": {}, "config": {}, "sources": [], "metrics": {}, "cost": {}}
    base = store.publish("a" * 40, kind="sft", stage="base", lineage={}, **facts)
    lineage = {"model": {"key": base.key, "attempt": base.attempt}}
    best = store.publish("b" * 40, kind="select", stage="best", lineage=lineage, **facts)
    found = shelf_of(store, run_record("r", stages={"base": built(base), "best": built(best)}))
    assert (found.stage, found.model) == ("best", store.materialize(base))


def test_a_reports_training_sources_hold_the_prompts_that_answers_were_selected_for():
    config = SelectStage.of(kind="select", data=["file:/p.jsonl"]).model_dump(mode="json")
    sft = {"data": [{"url": "input:conversations"}, {"url": "file:/q.jsonl"}]}
    stages = {"best": {"kind": "select", "config": config}, "sft": {"kind": "sft", "config": sft}}
    assert training_urls(stages) == ["file:/p.jsonl", "file:/q.jsonl"]
