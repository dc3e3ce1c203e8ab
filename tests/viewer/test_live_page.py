"""The page of a run under way: for whom it is, and what it says as the run goes on."""

import json

import pytest
from starlette.testclient import TestClient

from nanodag.run import record as record_module
from nanodag.store import Store, stage_key
from nanodag.viewer.live_page import make_app
from tests.run_records import built, run_record, stage_record


@pytest.fixture
def client(store):
    pipeline = {"stages": {"sft": {"kind": "sft", "seed": 1}}}
    store.write_run(run_record("r", state="running", host="another", pipeline=pipeline, stages={"sft": stage_record()}))
    return TestClient(make_app(store, ["r"]), base_url="http://127.0.0.1", raise_server_exceptions=False)


def test_it_answers_this_machine_alone_and_says_what_it_cannot_show(client, store):
    page = client.get("/")
    assert page.status_code == 200 and "data-live" in page.text
    assert "connect-src &#39;self&#39;" in page.text and "frame-ancestors" in page.headers["content-security-policy"]
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/sections", headers={"Host": "evil.example"}).status_code == 400
    store.remove_run("r")
    lost = client.get("/sections")
    assert lost.status_code == 503 and "There is no run 'r'" in lost.text and "<" not in lost.text


def test_a_stage_that_is_built_while_the_page_is_open_is_on_it(client, store, tmp_path):
    assert ">waiting</text>" in client.get("/sections").text
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "weights").write_text("weights")
    key = stage_key(kind="sft", code_version=1, config={}, inputs={})
    about = {"kind": "sft", "stage": "sft", "config": {}, "sources": {}, "environment": {}, "lineage": {}}
    artifact = store.publish(key, tmp_path / "made", metrics={"loss": 0.25}, cost={"seconds": 90.0}, **about)
    store.change_run("r", lambda record: record.changed(stages={"sft": built(artifact)}))
    sections = client.get("/sections").text
    assert "loss 0.25" in sections and "1 min 30 s" in sections and "waiting" not in sections
    assert "<main" not in sections and "<script" not in sections


@pytest.mark.parametrize("most", [10_000, 10])
def test_a_remote_store_gives_a_page_curves_of_small_records_and_never_the_model(tmp_path, monkeypatch, most):
    monkeypatch.setattr(record_module, "MOST_RECORDS", most)
    store, key = Store(f"memory://{tmp_path.name}", local=tmp_path / "local"), "a" * 40
    for part, name, text in (("made", "weights", "weights"), ("records", "metrics.jsonl", "")):
        (tmp_path / part).mkdir()
        (tmp_path / part / name).write_text(text)
    steps = [{"event": "step", "step": n, "total": 4, "time": float(n), "loss": 1 / n} for n in range(1, 5)]
    (tmp_path / "records" / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    about = {"kind": "sft", "stage": "sft", "config": {}, "sources": {}, "environment": {}, "lineage": {}}
    made = store.publish(key, tmp_path / "made", records=tmp_path / "records", metrics={}, cost={}, **about)
    stages = {"sft": built(made)}
    store.write_run(run_record("r", state="completed", pipeline={"stages": {"sft": {"kind": "sft"}}}, stages=stages))
    sections = TestClient(make_app(store, ["r"]), base_url="http://127.0.0.1").get("/sections").text
    assert ("data-panel" in sections) == (most > 10)
    assert not [*(tmp_path / "local").rglob("weights")]
