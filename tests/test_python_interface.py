"""`import nanodag` in notebooks and programs: what is loaded when, and what stores, runs and stages give."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import nanodag as door  # `nanodag` is a fixture
from nanodag.errors import ArtifactNotFound, CorruptArtifact, StageFailed
from nanodag.host.folders import PROJECT
from nanodag.rl.rollouts.rollout import write_rollouts
from nanodag.store import stage_key
from nanodag.tokenizer.bpe import save_tokenizer
from tests.doc_pages import DOCS
from tests.rl.fakes import STOP
from tests.rl.models import save_tiny_model
from tests.rl.rollouts import rollout
from tests.rl.stages import BYTES, VOCABULARY
from tests.run_records import built, run_record, stage_record

SCORE = {"metric": "exact_match", "value": 0.5, "stderr": 0.1, "low": 0.3, "high": 0.7, "num_items": 2}
LINES = [{"event": "step", "step": step, "loss": 3.0 - step, "reward": step / 2} for step in (1, 2)]
NOTEBOOK = DOCS / "tutorial" / "reading-a-run.ipynb"


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def publish(store, tmp_path):
    """Puts files and records that lie in two folders into the store; returns what the run's record says of it."""

    def put(name, kind, inputs=None, lineage=None):
        about = {"config": {}, "sources": {}, "cost": {}, "environment": {}, "metrics": {}, "lineage": lineage or {}}
        key = stage_key(kind=kind, code_version=1, config={"name": name}, inputs={})
        files, records = tmp_path / name / "files", tmp_path / name / "records"
        artifact = store.publish(key, files, records=records, kind=kind, stage=name, **about)
        return built(artifact, inputs=inputs or {})

    return put


@pytest.fixture
def store(store, tmp_path, monkeypatch, no_settings):
    """A store that the environment names."""
    monkeypatch.setenv("NANODAG_STORE", store.url)
    return store


@pytest.fixture
def run(store, tmp_path, publish):
    """sft, an eval of it, rl with a step of rollouts, a second eval that has not been run, a stage under way."""
    entries = {}
    for name in ("sft", "rl"):
        save_tiny_model(tmp_path / name / "files", vocabulary=VOCABULARY)
        save_tokenizer(BYTES, tmp_path / name / "files")
        write_lines(tmp_path / name / "records" / "metrics.jsonl", LINES)
    records = tmp_path / "rl" / "records"
    write_lines(records / "ledger.jsonl", [])
    (records / "rollouts").mkdir()
    for step, text in ((1, "old"), (2, "new")):
        sampled = rollout("p@0", 0, b"p", [*text.encode(), STOP], logprob=-0.5, versions=[1] * 4, reward=1.0)
        write_rollouts(records / "rollouts" / f"step-{step:08d}.jsonl", [sampled])
    entries["sft"], entries["rl"] = publish("sft", "sft"), publish("rl", "rl", {"model": "sft"})
    evaluated = tmp_path / "eval_sft" / "files"
    items = [
        {"id": str(n), "prompt": "Sort", "target": "1", "output": "1", "scores": {"exact_match": n}} for n in (0, 1)
    ]
    write_lines(evaluated / "samples" / "sort.jsonl", items)
    (evaluated / "results.json").write_text(json.dumps({"benchmarks": {"sort": SCORE}, "samples": []}))
    write_lines(tmp_path / "eval_sft" / "records" / "metrics.jsonl", [])
    entries["eval_sft"] = publish("eval_sft", "eval", {"model": "sft"})
    entries["eval_rl"] = stage_record("eval", inputs={"model": "rl"}, state="not run")
    work = tmp_path / "work"
    write_lines(work / "metrics.jsonl", LINES)
    with (work / "metrics.jsonl").open("a") as stream:
        stream.write('{"event": "st')  # it is being written
    entries["more"] = stage_record("sft", inputs={"model": "rl"}, state="running", workspace=str(work))
    store.write_run(run_record("pocket-1", stages=entries))
    return door.open_store().run()


def loaded_after(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_two_empty_packages_and_no_other():
    said = "import json, sys; before = set(sys.modules); {}; print(json.dumps([*set(sys.modules) - before]))"
    new = loaded_after(said.format("import nanodag"))
    assert {name for name in new if name.startswith("nanodag")} == {"nanodag", "nanodag.run", "nanodag.plan"}
    assert {name.partition(".")[0] for name in new} - {"nanodag"} <= sys.stdlib_module_names
    more = loaded_after(said.format("import nanodag; nanodag.open_store"))
    assert more.isdisjoint({"torch", "transformers", "prefect"}) and "nanodag.store" in more


def test_the_promised_names_are_there_and_a_wrong_one_is_refused():
    assert all(callable(getattr(door, name)) for name in door.__all__)
    with pytest.raises(AttributeError, match=r"^module 'nanodag' has no attribute 'rnu'$"):
        door.rnu  # noqa: B018
    text, page = (PROJECT / "CHANGELOG.md").read_text(), (DOCS / "how-to" / "python.md").read_text()
    assert [name for name in door.__all__ if f"`{name}`" not in text or f"`{name}" not in page] == []


def test_run_and_plan_are_functions_although_packages_bear_their_names(tmp_path):
    import nanodag.plan.make
    import nanodag.run.record

    assert nanodag.run.record.Run and nanodag.plan.make.Plan
    found = door.plan("pocket", "rl.num_steps=9", f"store.url={tmp_path}/none", on="cpu:2:avx2:16GiB")
    (rl,) = [stage for stage in found.stages if stage.name == "rl"]
    assert rl.steps == 9 and found.preset == "pocket"


def test_a_run_is_started_as_the_command_starts_it_and_a_bad_end_raises(run, store):
    import nanodag.python_interface

    calls = []

    def started(overrides, **options):
        calls.append((tuple(overrides), options))
        return store, "pocket-1", len(calls) - 1

    options = {"preset": "pocket", "file": "", "name": "", "detach": False, "stale": False}
    with patch.object(nanodag.python_interface, "run_pipeline", started):
        assert door.run("pocket", "rl.num_steps=3").record.run == "pocket-1"
        assert calls == [(("rl.num_steps=3",), options)]
        with pytest.raises(StageFailed, match=r"^Run pocket-1 in .* has not completed; resume it with nanodag\.run\("):
            door.run("pocket")


def test_a_run_is_found_by_how_it_begins_and_in_the_store_that_is_named(run, store, monkeypatch):
    monkeypatch.delenv("NANODAG_STORE")
    found = door.open_store(store.url)
    assert found.runs() == ["pocket-1"] and list(found.run("po")) == ["sft", "rl", "eval_sft", "eval_rl", "more"]
    with pytest.raises(ArtifactNotFound, match="There is no run 'x'"):
        found.run("x")
    with pytest.raises(ArtifactNotFound, match="Run pocket-1 has no stage 'lr'; it has sft, rl, "):
        run["lr"]


def test_scores_of_a_run_are_those_of_its_finished_evals(run):
    expected = [{"stage": "eval_sft", "model": "sft", "benchmark": "sort", **SCORE}]
    assert run.scores().to_dict("records") == run["eval_sft"].scores().to_dict("records") == expected
    with pytest.raises(ArtifactNotFound, match="Stage rl makes model; name a stage that makes scores"):
        run["rl"].scores()
    with pytest.raises(ArtifactNotFound, match="Run pocket-1 has no finished stage 'eval_rl'"):
        run["eval_rl"].scores()


def test_metrics_of_a_stage_under_way_are_those_in_its_workspace(run):
    assert run["rl"].metrics().to_dict("records") == LINES
    assert run["more"].metrics().to_dict("records") == LINES
    with pytest.raises(ArtifactNotFound, match="no finished stage 'eval_rl'"):
        run["eval_rl"].metrics()


def test_samples_are_the_items_of_each_benchmark(run):
    rows = run["eval_sft"].samples()
    assert list(rows["benchmark"]) == ["sort", "sort"] and list(rows["id"]) == ["0", "1"]


def test_rollouts_are_those_of_the_newest_step_or_of_one_that_is_named(run):
    assert list(run["rl"].rollouts()["response"]) == ["new"]
    assert list(run["rl"].rollouts(step=1)["response"]) == ["old"]
    with pytest.raises(ArtifactNotFound, match="that step was not reached"):
        run["rl"].rollouts(step=7)


def test_the_folder_of_a_stage_is_verified(run):
    path = run["sft"].path / "config.json"
    path.chmod(0o600)
    path.write_text(path.read_text().replace("1", "2", 1))
    with pytest.raises(CorruptArtifact, match=r"config\.json"):
        run["sft"].path  # noqa: B018


def test_models_are_loaded_by_their_kind_and_never_run_code_of_their_own(run, tmp_path, publish):
    model, tokenizer = run["rl"].load_model()
    assert type(model).__name__ == "Qwen3ForCausalLM" and tokenizer("ab")["input_ids"][-2:] == [97, 98]
    with pytest.raises(ArtifactNotFound, match="Stage eval_sft makes scores; name a stage that makes a model"):
        run["eval_sft"].load_model()
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config.from_pretrained(run["sft"].path, num_labels=1)
    files = tmp_path / "judge" / "files"
    Qwen3ForSequenceClassification(config).save_pretrained(files)
    save_tokenizer(BYTES, files)
    settings = json.loads((files / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForSequenceClassification": "own.Own"}
    (files / "config.json").write_text(json.dumps(settings))
    (files / "own.py").write_text("raise SystemExit('code of the folder')")
    (tmp_path / "judge" / "records").mkdir()
    own = run.record.changed(run="own", stages={"judge": publish("judge", "reward_model")})
    door.open_store().write_run(own)
    scorer, _ = door.open_store().run("own")["judge"].load_model()
    assert type(scorer).__name__ == "Qwen3ForSequenceClassification"


def cells():
    return [c for c in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]


def test_the_notebook_runs_cell_by_cell_and_has_no_outputs(run):
    names: dict[str, object] = {}
    for number, cell in enumerate(cells()):
        assert not cell["outputs"] and cell["execution_count"] is None
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert len(cells()) > 5 and Path(str(names["folder"])).is_dir()
