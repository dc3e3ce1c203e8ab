"""Which models a night evaluates."""

import pytest

from nanodag.config import Pipeline
from nanodag.config.kinds.rl import RLStage
from nanodag.errors import ArtifactNotFound, ConfigError
from nanodag.host.machine import detect
from nanodag.nightly.nights import choose, night_pipeline
from tests.nightly.made_nights import STAGES, write_run
from tests.run_records import stage_record


def pipeline_with(**nightly):
    return Pipeline.model_validate({"preset": "p", "stages": STAGES, "nightly": nightly})


def test_the_newest_run_that_has_the_stage_is_chosen(store):
    write_run(store, "main-1")
    write_run(store, "main-2")
    write_run(store, "main-3", sft="failed")
    (subject,) = choose(store, pipeline_with(runs={"main": "main-*"})).subjects
    about = (subject.label, subject.run, subject.stage, subject.input_name)
    assert about == ("main", "main-2", "sft", "model-main-sft")
    assert list(subject.evals) == ["main-sft-eval_sft"]


def test_an_rl_stages_own_benchmarks_are_asked_as_it_asks_them(store):
    write_run(store, "main-1")
    asked = {"name": "sort", "source": "file:x.txt", "num_samples": 4, "temperature": 0.7}
    config = {"kind": "rl", "inputs": {"model": "sft"}, "data": ["file:x"], "seed": 7}
    made = RLStage.of(**config, rollout={"max_new_tokens": 96}, evaluation={"benchmarks": [asked | {"every": 3}]})

    def with_rl(record):
        stages = {**record.pipeline["stages"], "rl": made.model_dump(mode="json")}
        rl = record.stages["sft"].changed(kind="rl")
        return record.changed(pipeline={**record.pipeline, "stages": stages}, stages={**record.stages, "rl": rl})

    store.change_run("main-1", with_rl)
    pipeline = pipeline_with()
    choice = choose(store, pipeline)
    assert [(subject.stage, list(subject.evals)) for subject in choice.subjects] == [
        ("sft", ["newest-sft-eval_sft"]),
        ("rl", ["newest-rl-own"]),
    ]
    stage = night_pipeline(pipeline, choice, detect()).stages["newest-rl-own"]
    (one,) = stage.benchmarks
    assert (one.name, one.num_samples, one.temperature) == ("sort", 4, 0.7)
    assert (stage.inputs, stage.seed, stage.max_new_tokens) == ({"model": "model-newest-rl"}, 7, 96)


def test_nights_and_points_of_a_sweep_are_no_newest_run(store):
    write_run(store, "plain")
    write_run(store, "nightly-1", nightly={"by_schedule": True, "due": 0.0})
    write_run(store, "s-001", sweep={"stage": "sft", "points": []})
    assert choose(store, pipeline_with()).subjects[0].run == "plain"
    assert choose(store, pipeline_with(runs={"s": "s-001"})).subjects[0].run == "s-001"


def test_what_is_missing_is_said_and_the_rest_evaluated(store):
    write_run(store, "plain")
    choice = choose(store, pipeline_with(runs={"a": "plain", "b": "gone"}, stages=["sft", "rl"]))
    assert [subject.label for subject in choice.subjects] == ["a"]
    said = ["a/rl: no run that fits 'plain' has finished that stage", "b: no run is called 'gone'"]
    assert list(choice.missing[:2]) == said
    with pytest.raises(ArtifactNotFound, match=r"Choose runs with nightly.runs=.*there are plain"):
        choose(store, pipeline_with(runs={"b": "gone"}))


def test_runs_that_read_from_different_mirrors_are_not_mixed(store):
    for name in ("a", "b"):
        write_run(store, name)
    store.change_run("b", lambda record: record.changed(pipeline={**record.pipeline, "mirror": "/elsewhere"}))
    with pytest.raises(ConfigError, match="different mirrors: a from none, b from /elsewhere"):
        choose(store, pipeline_with(runs={"a": "a", "b": "b"}))
    assert choose(store, pipeline_with(runs={"b": "b"})).mirror == "/elsewhere"


def test_long_names_stay_apart_and_within_what_a_stage_name_may_be(store):
    write_run(store, "plain")
    labels = ["A.very-long-label-of-forty-characters-one", "A.very-long-label-of-forty-characters-two"]
    pipeline = pipeline_with(runs=dict.fromkeys(labels, "plain"))
    choice = choose(store, pipeline)
    assert len(night_pipeline(pipeline, choice, detect()).stages) == 4


def test_a_model_that_is_stale_in_its_run_is_evaluated_and_named(store):
    write_run(store, "plain")

    def stale(record):
        base = stage_record("pretrain", {"digest": "new"}, state="built", key="b" * 40)
        made = record.stages["sft"].made.changed(inputs={"model": "old"})
        sft = record.stages["sft"].changed(inputs={"model": "pretrain"}, made=made)
        return record.changed(stages={"pretrain": base, **record.stages, "sft": sft})

    store.change_run("plain", stale)
    choice = choose(store, pipeline_with())
    assert [subject.stage for subject in choice.subjects] == ["sft"]
    assert choice.stale == ("newest/sft: stale in run plain, pretrain was built since; nanodag rerun plain --stale",)
