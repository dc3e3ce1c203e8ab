"""The shipped presets end to end, two steps a stage at small widths, with the real workers under a real server."""

import pytest
import yaml
from prefect.client.orchestration import get_client

from flows.nightly_eval import nightly_eval
from flows.speedrun import speedrun
from nanodag.host.folders import PROJECT
from nanodag.store import Store
from tests.flow.reduced import write_reduced
from tests.flow.tiny_mirror import write_mirror

PRESETS = list(yaml.safe_load((PROJECT / "pipeline.yaml").read_text())["presets"])

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(1200)]


@pytest.fixture
def folder(tmp_path, monkeypatch, no_settings):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANODAG_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="session")
def mirror(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mirror")
    write_mirror(folder)
    return folder


def test_pocket_runs_from_tokenizer_to_report_and_is_found_the_second_time(folder):
    names = write_reduced("pocket", folder / "pipeline.yaml", without=("eval_mid", "eval_sft"))
    state = speedrun("first", return_state=True)
    assert state.is_completed(), state.message
    store = Store(folder / "store")
    record = store.read_run("first")
    assert record.state == "completed" and list(record.stages) == names
    report = store.attempt(*record.stages["report"].artifact)
    text = (store.materialize(report) / "report.md").read_text()
    assert all(stage in text for stage in ("pretrain", "midtrain", "sft", "rl"))
    with get_client(sync_client=True) as client:
        assert any(artifact.data == text for artifact in client.read_artifacts() if artifact.type == "markdown")
    for name, stage in record.stages.items():
        overhead = stage.made.took_s - stage.made.cost["start_s"] - stage.made.cost["work_s"]
        assert 0 <= overhead < 5.0, name
    again = speedrun("second", return_state=True)
    assert again.message == f"{len(names)} stages, {len(names)} of them found in the store"


@pytest.mark.slow  # variations of the one above: minutes more
@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "pocket"])
def test_every_other_preset_runs_through_a_mirror(preset, folder, mirror):
    write_reduced(preset, folder / "pipeline.yaml")
    state = speedrun(preset, overrides=[f"mirror={mirror}"], return_state=True)
    assert state.is_completed(), state.message
    store = Store(folder / "store")
    stages = store.read_run(preset).stages.items()
    scored = {name for name, stage in stages if "core" in store.attempt(*stage.artifact).metrics}
    of_speedrun = {"pretrain", "eval_base", "eval_mid", "eval_sft", "eval_rl"}
    assert scored == (of_speedrun if preset in ("speedrun", "single-gpu") else set())


@pytest.mark.slow  # RL once more
def test_a_night_asks_a_real_rl_product_the_sets_that_rl_asks_itself_and_finds_them_the_next_night(folder):
    """Two sets, one of them sampled, beside those of its eval stage."""
    source = "python:nanodag.data.lists:sort?count=2&size=12&seed=3"
    own = [
        {"name": "greedy", "form": "problems", "source": {"url": source, "adapter": "problem"}, "max_new_tokens": 8},
        {"name": "sampled", "form": "problems", "source": {"url": source, "adapter": "problem"}, "max_new_tokens": 8}
        | {"num_samples": 3, "temperature": 1.0, "metrics": ["avg@3", "pass@2"]},
    ]
    evals = ("eval_base", "eval_mid", "eval_sft")
    write_reduced("pocket", folder / "pipeline.yaml", without=evals)
    path = folder / "pipeline.yaml"
    made = yaml.safe_load(path.read_text())
    made["presets"]["reduced"]["stages"]["rl"]["evaluation"]["benchmarks"] = own
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    state = speedrun("main-1", return_state=True)
    assert state.is_completed(), state.message
    overrides = ["nightly.runs={main: main-*}"]
    first = nightly_eval(name="nightly-1", overrides=overrides, return_state=True)
    assert first.is_completed(), first.message
    store = Store(folder / "store")
    assert {"greedy", "sampled"} < {one.benchmark for one in store.read_run("nightly-1").night.scores}
    second = nightly_eval(name="nightly-2", overrides=overrides, return_state=True)
    assert second.is_completed(), second.message
    assert {stage.state for name, stage in store.read_run("nightly-2").stages.items() if name != "trend"} == {"found"}
