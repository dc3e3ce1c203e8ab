"""A run's record is read whole or refused by name, and says itself what `gc` must keep."""

import json

import pytest

from nanodag.errors import CorruptArtifact, StoreError
from nanodag.run.retention import free, plan
from nanodag.store.run_record import ArtifactReference, references_in
from tests.run_records import built, run_record, stage_record
from tests.store.making import key, publish, read_file, write_file

SCORE = {
    **{"label": "l", "stage": "sft", "eval": "e", "benchmark": "sort", "run": "r", "metric": "m", "digest": "d"},
    **{"higher_is_better": True, "form": "f", "chat": True, "num_fewshot": 0, "num_items": 1, "was_found": False},
    **{"value": 0.5, "stderr": 0.0, "low": 0.4, "high": 0.6},
}


def rewrite(store, run, change):
    """Change a record's file as no nanodag does."""
    raw = json.loads(read_file(store, f"runs/{run}.json"))
    change(raw)
    write_file(store, f"runs/{run}.json", json.dumps(raw))


def test_a_record_comes_back_as_it_was_written_also_a_nights_and_a_sweeps(store):
    stage = stage_record("rl", {"cost": {"mfu": float("inf")}}, key=key("a"), forced=("flow", key("a")), state="built")
    night = {"by_schedule": True, "due": 5.0, "scores": [{**SCORE, "key": key("b"), "attempt": "0001-0123abcd"}]}
    sweep = {"stage": "sft", "points": [{"number": 1, "overrides": ["sft.seed=1"], "stages": {"sft": "sft-1"}}]}
    for number, about in enumerate(({}, {"nightly": night}, {"sweep": sweep}), start=1):
        written = store.write_run(run_record(f"r{number}", stages={"z": stage, "a": stage_record()}, **about))
        assert store.read_run(f"r{number}") == written and written.number == number
        assert list(store.read_run(f"r{number}").stages) == ["z", "a"], "in the DAG's order"


@pytest.mark.parametrize("found", [0, 1, 3, "2", None])
def test_a_record_of_another_format_is_refused_with_file_format_found_and_wanted(store, found):
    store.write_run(run_record("r"))
    rewrite(store, "r", lambda raw: raw.pop("format") if found is None else raw.update(format=found))
    said = rf"runs/r\.json in .* has format {'none' if found is None else found}; this nanodag reads format 2"
    for read in (lambda: store.read_run("r"), lambda: store.write_run(run_record("r"))):
        with pytest.raises(StoreError, match=said):
            read()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw["stages"]["s"].update(state="done"), r"stages\.s\.state: Input should be 'waiting'"),
        (lambda raw: raw["stages"]["s"].update(key="ab"), r"stages\.s\.key.*: String should match"),
        (lambda raw: raw["stages"]["s"]["made"].update(attempt="1"), r"stages\.s\.made\.attempt: String should match"),
        (lambda raw: raw["stages"]["s"].update(key=""), r"stages\.s: .*an attempt and no key"),
        (lambda raw: raw.update(before=[["ab", None]]), r"before\.0\.0: String should match"),
        (lambda raw: raw.update(pid=None), "pid: Input should be a valid integer"),
        (lambda raw: raw.update(atempt="0001"), "atempt: Extra inputs are not permitted"),
        (lambda raw: raw.pop("file"), "file: Field required"),
        (lambda raw: raw.update(run="q"), "it is the record of run 'q'"),
    ],
)
def test_a_damaged_record_is_named_with_its_field(store, change, said):
    store.write_run(run_record("r", stages={"s": stage_record(made={}, key=key("a"), state="built")}))
    rewrite(store, "r", change)
    with pytest.raises(CorruptArtifact, match=rf"runs/r\.json in .* is damaged: {said}"):
        store.read_run("r")


@pytest.mark.parametrize("text", ['{"format": 1', "", "[1]", "\udcff{}"])
def test_a_record_that_is_no_record_is_named_and_hides_no_other(store, text):
    store.write_run(run_record("good"))
    write_file(store, "runs/bad.json", text.encode(errors="surrogateescape"))
    assert store.runs() == ["good"] and list(store.unreadable_runs()) == ["bad"]
    with pytest.raises(StoreError, match=r"runs/bad\.json"):
        store.read_run("bad")


def test_gc_removes_nothing_while_a_record_cannot_be_read(store, product):
    artifact = publish(store, product, key("a"))
    (store.workspace(key("b")) / "state").write_text("abc")
    store.write_run(run_record("r", stages={"s": built(artifact)}))
    store.write_run(run_record("late"))
    rewrite(store, "r", lambda raw: raw.update(format=3))
    with pytest.raises(StoreError, match=r"runs/r\.json in .* has format 3"):
        plan(store)
    rewrite(store, "r", lambda raw: raw.update(format=2, stages={}))
    found = plan(store)
    assert {item.what for item in found.items} == {"attempt", "workspace"}
    rewrite(store, "late", lambda raw: raw.update(format=3))  # between the plan and doing it
    with pytest.raises(StoreError, match="format 3"):
        free(store, found, settle_s=0)
    assert store.lookup(key("a")) == artifact and (store.workspace(key("b")) / "state").exists()


def test_a_record_keeps_what_its_stages_scores_pipeline_and_predecessor_name():
    finished, failed = stage_record(made={}, key=key("a"), state="found"), stage_record(made={}, key=key("b"))
    night = {"by_schedule": True, "due": 0.0, "scores": [{**SCORE, "key": key("c"), "attempt": "0002"}]}
    record = run_record("r", stages={"s": finished, "t": failed, "u": stage_record()}, nightly=night)
    record = record.changed(before=[(key("d"), None)], uses=[(key("e"), "0003")])
    assert set(record.references()) == {
        ArtifactReference(key("a"), "0001"),
        ArtifactReference(key("b")),  # not finished: all that is there
        ArtifactReference(key("c"), "0002"),
        ArtifactReference(key("d")),
        ArtifactReference(key("e"), "0003"),
    }


def test_a_path_into_a_store_is_a_reference_wherever_a_pipeline_has_it():
    model, rollouts = f"file:/s/artifacts/{key('a')}/0001/files", f"s3://b/artifacts/{key('b')}/0002-0123abcd/records/x"
    found = references_in({"mirror": f"/x/{key('c')}/1", "stages": {"m": {"model": model}, "n": [{"url": rollouts}]}})
    assert list(found) == [(key("a"), "0001"), (key("b"), "0002-0123abcd")]
