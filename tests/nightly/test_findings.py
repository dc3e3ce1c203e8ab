"""A night from its beginning to its page, its evals published by hand."""

import json
from importlib import import_module

import pytest
import yaml

from nanodag.cli.composed import run_night, turn_on
from nanodag.config import resolve
from nanodag.errors import ConfigError
from nanodag.nightly.findings import conclude
from nanodag.nightly.nights import begin_night, check_choice, check_night
from nanodag.run.record import StageResult
from nanodag.store import Store
from tests.nightly.made_nights import STAGES, publish_eval, write_run


@pytest.fixture
def project(tmp_path, monkeypatch, no_settings):
    presets = {"p": {"stages": STAGES, "nightly": {"runs": {"main": "main-*"}, "timezone": "UTC"}}}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump({"default": "p", "presets": presets}))
    monkeypatch.chdir(tmp_path)
    write_run(Store(tmp_path / "store"), "main-1")
    return tmp_path


def begun(name="", *, by_schedule=True, flow_run="one"):
    return begin_night(name=name, flow_run=flow_run, by_schedule=by_schedule, file="", preset="p", overrides=[])


def night_of(project, name, answers, flow_run=""):
    night = begun(name, by_schedule=False, flow_run=flow_run)
    score = publish_eval(night.run.store, project / "made" / name, name, answers)
    where = {field: getattr(score, field) for field in ("key", "attempt", "digest")}
    results = {"main-sft-eval_sft": StageResult(stage="eval", kind="eval", was_found=False, **where)}
    found = conclude(night, results)
    night.run.close()
    return found


def test_a_night_is_kept_with_its_scores_comparisons_and_page(project):
    first = night_of(project, "nightly-1", [1] * 100)
    assert (first.num_scores, first.worse) == (1, ())
    second = night_of(project, "nightly-2", [1] * 80 + [0] * 20)
    assert second.worse == (
        "main/sft sort exact_match 80.0 %, 100.0 % before: −20.0 points (−28.0 to −12.0, adjusted p < 0.001) "
        "against last night (nightly-1)",
    )
    record = Store(project / "store").read_run("nightly-2")
    assert [score.value for score in record.night.scores] == [0.8]
    assert list(record.stages) == ["main-sft-eval_sft", "trend"] and record.stages["trend"].state == "built"
    assert "sft" not in record.stages, "the model is its own run's"
    model = Store(project / "store").read_run("main-1").stages["sft"].artifact
    assert record.uses == (model,), "and stays as long as the night may be resumed"
    assert second.page.name == "trend.html" and "data-panel=" in second.page.read_text()
    night = json.loads((second.page.parent / "night.json").read_text())
    assert night["scores"][0]["value"] == 0.8 and [c["is_worse"] for c in night["comparisons"]] == [True]
    assert second.as_json()["text"].startswith("nanodag nightly-2: 1 of 1 score got worse\nmain/sft sort")


def test_a_night_that_is_retried_goes_on_under_its_name(project):
    night_of(project, "", [1] * 100, flow_run="abc")
    night_of(project, "", [1] * 90 + [0] * 10, flow_run="abc")
    store = Store(project / "store")
    (name,) = [run for run in store.runs() if run.startswith("nightly-")]
    assert [score.value for score in store.read_run(name).night.scores] == [0.9]


def test_a_pinned_models_folder_is_told_from_the_pipeline_file(project, monkeypatch):
    monkeypatch.chdir(project / "made")
    here = f"file:{project}/made/hf"
    models = "nightly.models={yardstick: {model: 'file:hf', evals: [eval_sft]}}"
    assert resolve(project / "pipeline.yaml", "p", [models]).pipeline.nightly.models["yardstick"].model == here
    pipeline = yaml.safe_load((project / "pipeline.yaml").read_text())
    pipeline["presets"]["p"]["nightly"]["models"] = {"yardstick": {"model": "file:hf", "evals": ["eval_sft"]}}
    (project / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    found = resolve(project / "pipeline.yaml", "p").pipeline.nightly.models["yardstick"].model
    assert found == f"file:{project}/hf"


@pytest.fixture
def no_server(monkeypatch):
    def started(*unused):
        raise AssertionError("a server is started")

    monkeypatch.setattr(import_module("nanodag.cli.run"), "server_of", started)


def test_a_night_whose_data_is_gone_fails_before_it_evaluates_and_says_so(project, no_server):
    def changed(record):
        stages = record.pipeline["stages"]
        benchmarks = [{"name": "continuation", "source": f"file:{project}/x.txt"}]
        stages = {**stages, "eval_sft": {**stages["eval_sft"], "benchmarks": benchmarks}}
        return record.changed(pipeline={**record.pipeline, "stages": stages})

    Store(project / "store").change_run("main-1", changed)
    missing = f"preset 'p': main-sft-eval_sft.benchmarks.0: Source 'file:{project}/x.txt' matches no file"
    night = begun()
    with pytest.raises(ConfigError, match=missing):
        check_night(night)
    assert missing in Store(project / "store").read_run(night.run.name).reason
    with pytest.raises(ConfigError, match=missing):
        turn_on(overrides=[], preset="p", file="")
    (project / "x.txt").write_text("A document of some words.")  # now everything is there
    check_choice(Store(project / "store"), resolve(project / "pipeline.yaml", "p").pipeline, project / "pipeline.yaml")


@pytest.mark.parametrize("turn", [run_night, turn_on])
def test_a_wrong_eval_stage_is_refused_before_a_server_is_started(project, no_server, turn):
    models = "nightly.models={yardstick: {model: 'file:hf', evals: [eval_stf]}}"
    said = r"models.yardstick.evals names 'eval_stf', .* those are eval_sft\. Did you mean 'eval_sft'\?"
    with pytest.raises(ConfigError, match=said):
        turn(overrides=[models], preset="p", file="")


def test_a_schedule_may_be_turned_on_before_there_is_a_model(project, no_server, capsys):
    with pytest.raises(AssertionError, match="a server is started"):
        turn_on(overrides=["nightly.runs={main: later-*}"], preset="p", file="")
    assert "For now: Nothing in" in capsys.readouterr().out


def test_a_name_that_is_no_nights_is_refused(project):
    with pytest.raises(ConfigError, match="its name begins with 'nightly-'"):
        begun("tuesday", by_schedule=False)
