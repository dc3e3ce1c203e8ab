"""A sweep as a run: looked up in the store, compared, its page. Stages are published by hand."""

import json
import os

import psutil
import pytest
import yaml

from nanodag.errors import ConfigError, StoreBusy
from nanodag.run.build_stage import key_of
from nanodag.run.record import result_of
from nanodag.store import Store
from nanodag.store.provenance import process_started
from nanodag.sweep.scaling import size_of
from nanodag.sweep.sweep_run import begin_sweep, conclude, find_built
from tests.fake_stages import STAGES
from tests.nightly.made_nights import publish_eval
from tests.run_records import run_record
from tests.store.making import publish

SWEEP = {"points": [], "stage": "", "preset": "tiny", "overrides": [], "file": "", "flow_run": ""}


@pytest.fixture
def project(tmp_path, monkeypatch, no_settings):
    (tmp_path / "text.txt").write_text("hello\n" * 100)
    held_out = {**STAGES["pretrain"], "data": [{"url": "file:text.txt", "held_out": 0.1}]}
    presets = {"tiny": {"stages": {**STAGES, "pretrain": held_out}}}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump({"default": "tiny", "presets": presets}, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANODAG_CACHE", str(tmp_path / "cache"))
    return tmp_path


def build(run, project, answers, measured=lambda stage: {}):
    """Publish every stage of a run under its key; an eval has the answers that are given for its model's seed, and a
    stage the metrics that `measured` says."""
    results = {}
    for stage in run.to_do:
        config = run.pipeline.stages[stage]
        inputs = {label: results[source] for label, source in config.inputs.items()}
        key, _ = key_of(run, config, inputs)
        folder = project / "made" / key
        (folder / "files").mkdir(parents=True)
        if config.kind == "eval":
            model = run.pipeline.stages[config.inputs["model"]]
            publish_eval(Store(project / "other"), folder / "files", stage, answers[model.seed])
        else:
            (folder / "files" / "made.txt").write_text(f"{config.kind} {config.seed} {key}")
        (folder / "records").mkdir()
        lines = [json.dumps({"step": n, "loss": 3.0 / n + config.seed}) for n in range(1, 20)]
        (folder / "records" / "metrics.jsonl").write_text("\n".join(lines))
        about = {"cost": {"seconds": 2.0, "tokens": getattr(config, "horizon_tokens", 0)}, "kind": config.kind}
        about["metrics"] = {"loss": 1.0 + config.seed, "steps": 4, **measured(stage)}
        artifact = publish(run.store, folder / "files", key, records=folder / "records", stage=stage, **about)
        results[stage] = result_of(stage, artifact, was_found=False)
    return results


def begun(name, seeds="[1,2]"):
    return begin_sweep(name, grid=[f"sft.seed={seeds}"], **SWEEP)


def test_what_another_run_built_is_found_and_the_rest_is_to_do(project):
    _, first = begun("first")
    assert find_built(first) == {}
    build(first, project, {1: [1] * 10, 2: [1] * 10})
    first.close()
    _, second = begun("second", "[2,3]")
    found = find_built(second)
    assert set(second.to_do) - set(found) == {"sft-2", "eval_sft-2"}, "point 2 is seed 3"
    record = second.store.read_run("second").stages
    assert record["sft-1"].state == "found" and record["sft-2"].state == "waiting"
    assert found["sft-1"].digest == record["sft-1"].made.digest and all(result.was_found for result in found.values())


def test_the_page_ranks_points_compares_on_the_same_items_and_is_found_the_next_time(project):
    sweep, run = begun("s", "[1,2,3]")
    answers = {1: [1] * 50 + [0] * 50, 2: [1] * 90 + [0] * 10, 3: [1] * 40 + [0] * 60}
    results = build(run, project, answers)
    page = conclude(sweep, run, results)
    table = page.with_suffix(".md").read_text()
    rows = [line for line in table.splitlines() if line.startswith(("| 1", "| 2", "| 3"))]
    assert [row[2] for row in rows] == ["2", "1", "3"], "best first"
    assert "90.0 (+40.0, +30" in rows[0] and "50.0 (48.0 to 52.0)" in rows[1]
    assert "sft.seed" in table and "3 stages" not in table
    text = page.read_text()
    assert text.count("data-panel=") == 2 and "What the options do" in text and "Training loss" in text
    entry = run.store.read_run("s").stages["comparison"]
    assert conclude(sweep, run, results) == page
    assert run.store.read_run("s").stages["comparison"].artifact == entry.artifact, "not drawn again"


def test_a_point_that_failed_is_a_row_that_says_so(project):
    sweep, run = begun("s")
    results = build(run, project, {1: [1] * 10, 2: [1] * 10})
    del results["sft-2"], results["eval_sft-2"]
    text = conclude(sweep, run, results).with_suffix(".md").read_text()
    assert "| 2 | 2 |  | failed |" in text and "points, 1 of them failed" in text


def test_a_runs_name_is_no_sweeps(project):
    Store(project / "store").write_run(run_record("r"))
    for name, said in (("r", "that is no sweep"), ("nightly-x", "Sweep name 'nightly-x'")):
        with pytest.raises(ConfigError, match=said):
            begun(name)


def test_a_sweep_that_another_process_is_at_is_left_to_it_also_by_a_retry(project):
    _, run = begun("s")
    other = psutil.Process(os.getppid())
    theirs = {"pid": other.pid, "pid_started": process_started(other)}
    run.store.change_run("s", lambda record: record.changed(**theirs))
    with pytest.raises(StoreBusy, match=f"under way in process {other.pid}"):
        begun("s")


def test_a_scaling_law_is_on_the_page_with_its_prediction_and_the_runs_it_comes_from(project):
    points = [
        [f"pretrain.shape.depth={n}", f"pretrain.horizon_tokens={d}"] for n in (1, 2, 3) for d in (4000, 8000, 16000)
    ]
    arguments = {**SWEEP, "points": points, "stage": "pretrain", "grid": []}

    def loss(pipeline, stage):
        parameters, tokens = size_of(pipeline, stage)
        return 1.0 + 20 / parameters**0.3 + 30 / tokens**0.4

    def measured(stage):
        bits = loss(run.pipeline, stage) if stage.startswith("pretrain") else 0.0
        return {"validation_bits_per_byte": bits, "core": 0.5 - bits / 10}

    sweep, run = begin_sweep("s", predict=4, **arguments)
    results = build(run, project, {run.pipeline.stages["pretrain-1"].seed: [1] * 10}, measured)
    page = conclude(sweep, run, results)
    law = json.loads((page.parent / "scaling.json").read_text())
    tokens = size_of(sweep.predicted, "pretrain")[1]
    value, low, high = law["predicted"]["loss"]
    assert value == pytest.approx(loss(sweep.predicted, "pretrain"), rel=1e-4) and low <= value <= high
    assert law["predicted"]["core"][0] == pytest.approx(0.5 - value / 10, abs=1e-4)
    assert law["predicted"]["depth"] == 4 and (tokens, law["run"], law["is_fitted"]) == (64, "s", True)
    assert law["points"][8]["key"] == results["pretrain-9"].key and law["points"][8]["tokens"] == 16000
    assert "parameters, 64 tokens: " in law["lines"][0]
    assert "and 0.004 times the tokens of the largest point: far for a law." in law["lines"][-1], (
        "a 62nd of the shortest"
    )
    assert "The dial would take 0.1323 (" in page.with_suffix(".md").read_text()
    assert "Held out (bits a byte)" in page.read_text()
    near = {**arguments, "overrides": ["pretrain.horizon_tokens=12000"]}
    sweep, run = begin_sweep("s", predict=4, **near)
    page = conclude(sweep, run, results)
    assert "far for a law" not in json.loads((page.parent / "scaling.json").read_text())["lines"][-1]
    sweep, run = begin_sweep("s", predict=4, **arguments)
    lost = {stage: result for stage, result in results.items() if stage != "pretrain-9"}
    page = conclude(sweep, run, lost)
    assert "No scaling law: Point 9 failed" in page.with_suffix(".md").read_text()
    assert json.loads((page.parent / "scaling.json").read_text())["is_fitted"] is False
