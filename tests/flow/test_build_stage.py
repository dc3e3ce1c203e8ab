"""One stage, without Prefect: found or built, stopped and resumed, also on another machine."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import psutil
import pytest

from nanodag.cli.show import show_status
from nanodag.config import resolve
from nanodag.errors import ConfigError, StageFailed, StageKilled, StageStopped, StoreBusy
from nanodag.run.build_stage import build_stage
from nanodag.run.progress import progress_of
from nanodag.run.retention import plan
from nanodag.worker.launch import Watch, begin_try, usage_of
from tests.fault.processes import pids_in, wait_for_step, wait_until
from tests.flow.tiny_runs import opened


def test_a_stage_is_built_once_then_found_and_equal_bytes_of_a_forced_attempt_keep_the_digest(run):
    first, second, forced = (build_stage(run, "tokenizer", {}, force=force) for force in (False, False, True))
    assert (first.was_found, second.was_found) == (False, True)
    assert (first.key, first.attempt, first.digest) == (second.key, second.attempt, second.digest)
    assert (forced.attempt, forced.digest) == ("0002", first.digest)


def test_the_manifest_tells_lineage_sources_cost_and_environment(run):
    tokenizer = build_stage(run, "tokenizer", {})
    base = build_stage(run, "pretrain", {"tokenizer": tokenizer})
    artifact = run.store.attempt(base.key, base.attempt)
    assert artifact.lineage["tokenizer"]["digest"] == tokenizer.digest
    assert [identity["kind"] for identity in artifact.sources.values()] == ["file"]
    assert artifact.cost["tokens"] == 100 and artifact.cost["num_attempts"] == 1
    assert 0 < artifact.cost["cpu_seconds"] < 30 and artifact.cost["peak_bytes"] > 1_000_000
    assert artifact.cost["start_s"] > 0 and artifact.cost["orchestration_s"] >= 0
    assert artifact.environment["revision"] and artifact.environment["versions"]
    assert {"metrics.jsonl", "worker.log", "job.json", "result.json"} <= set(artifact.records)
    given = json.loads((run.store.materialize(artifact) / "made.json").read_text())["given"]
    assert given == {"tokenizer": ["made.json", "report.md"]}
    job = json.loads((run.store.verified(artifact, "records") / "job.json").read_text())
    assert job["context"]["bases"] == {"tokenizer": {"key": tokenizer.key, "digest": tokenizer.digest}}


def test_a_stage_that_takes_too_long_is_ended_and_says_so(project, tell):
    tell("tokenizer", "wait")
    with pytest.raises(StageFailed, match=r"took longer than its timeout_s of 2 s\nWhat to do: .*timeout_s=3"):
        build_stage(opened("tokenizer.timeout_s=1.5"), "tokenizer", {})


def test_two_runs_that_want_the_same_key_build_it_once(project, tell, begun):
    first, second, third = (opened(name=name) for name in "rst")
    builder, _, _ = begun(first)
    results = []
    waiter = threading.Thread(target=lambda: results.append(build_stage(second, "tokenizer", {})))
    waiter.start()
    time.sleep(0.5)
    assert waiter.is_alive() and second.entry("tokenizer").state == "waiting"
    third.stop.set()
    with pytest.raises(StageStopped, match="while it waited for another run that builds the same"):
        build_stage(third, "tokenizer", {})
    assert third.entry("tokenizer").state == "stopped"
    tell("tokenizer", "")
    for thread in (builder, waiter):
        thread.join(300)
    assert (results[0].was_found, results[0].attempt) == (False, "0001")
    assert first.entry("tokenizer").made.attempt == second.entry("tokenizer").made.attempt == "0001"


def test_a_builder_that_is_killed_frees_its_key_for_the_one_that_waits(project, tell):
    """The lock is the watchdog's too: it goes when the killed builder's worker is gone, and the other goes on from
    the checkpoint it left."""
    tell("tokenizer", "wait")
    code = "from nanodag.run.record import open_run; from nanodag.run.build_stage import build_stage\n"
    code += "build_stage(open_run('s', file='', preset='tiny', overrides=[]), 'tokenizer', {})"
    builder = subprocess.Popen([sys.executable, "-c", code])
    run = opened()
    workspace = wait_for_step(run, "tokenizer", 2, of="s")
    seen = []
    thread = threading.Thread(target=lambda: build_stage(run, "tokenizer", {}, watch=Watch(on_metrics=seen.append)))
    thread.start()
    builder.kill()
    builder.wait()
    wait_until(lambda: len(pids_in(workspace)) == 2)
    tell("tokenizer", "")
    thread.join(300)
    assert [line["step"] for line in seen] == [3, 4]
    assert run.entry("tokenizer").made.cost["num_attempts"] == 2


def test_a_stopped_stage_goes_on_from_its_checkpoint(run, tell, begun, capsys):
    thread, raised, workspace = begun(run)
    run.stop.set()
    thread.join(300)
    assert [type(e) for e in raised] == [StageStopped]
    assert not any(psutil.pid_exists(pid) for pid in pids_in(workspace))
    assert run.store.read_run("r").stages["tokenizer"].state == "stopped"
    tell("tokenizer", "")
    run.stop.clear()
    seen = []
    result = build_stage(run, "tokenizer", {}, watch=Watch(on_metrics=seen.append))
    assert [line["step"] for line in seen] == [3, 4] and seen[0]["resumed_from"] == 2
    cost, entry = run.store.attempt(result.key, result.attempt).cost, run.entry("tokenizer")
    assert cost["num_attempts"] == 2 and 0 < cost["earlier_seconds"] < cost["seconds"]
    assert entry.earlier_s == cost["earlier_seconds"], "what it took is more than the last try"
    shown = progress_of(run.store, run.store.read_run("r"))[0]
    assert shown.elapsed_s == pytest.approx(entry.ended - entry.started + entry.earlier_s)
    run.note("tokenizer", earlier_s=62.0, made=entry.made.changed(took_s=10.0))
    show_status("r", file="", all_runs=False)
    assert "  1 min 12 s (2 tries, the last 10 s)  " in capsys.readouterr().out
    build_stage(run, "tokenizer", {})
    assert run.entry("tokenizer").earlier_s == 0.0, "it was found: that took no other try"


def test_a_try_that_was_killed_with_its_watchdog_still_counts(tmp_path):
    assert begin_try(tmp_path) == 0.0
    (tmp_path / "began").write_text("1000.0")
    (tmp_path / "worker.log").write_text("step 7\n")
    os.utime(tmp_path / "worker.log", (1030.0, 1030.0))  # the last that was heard of it; no line of usage was left
    assert begin_try(tmp_path) == 30.0
    with (tmp_path / "usage.jsonl").open("a") as stream:  # the second one left its line, as it began after `began`
        stream.write(json.dumps({"began": time.time(), "seconds": 5.0, "cpu_s": 4.0, "peak_bytes": 9}) + "\n")
    assert begin_try(tmp_path) == 35.0
    took = {"seconds": 35.0, "earlier_seconds": 30.0, "cpu_seconds": 4.0, "peak_bytes": 9, "num_attempts": 2}
    assert usage_of(tmp_path) == took


def test_what_a_full_disk_cut_of_a_try_hinders_no_later_one(tmp_path):
    (tmp_path / "began").write_text("")
    (tmp_path / "usage.jsonl").write_text('{"began": 1000.0, "sec')
    assert begin_try(tmp_path) == 0.0
    (tmp_path / "began").write_text("1000.0")
    (tmp_path / "worker.log").write_text("step 7\n")
    os.utime(tmp_path / "worker.log", (1030.0, 1030.0))
    assert begin_try(tmp_path) == 30.0, "its line begins on a line of its own"
    assert usage_of(tmp_path)["num_attempts"] == 1


def test_a_killed_worker_is_told_apart_from_one_that_failed(run, begun):
    thread, raised, workspace = begun(run)
    psutil.Process(pids_in(workspace)[0]).kill()
    thread.join(300)
    assert [type(e) for e in raised] == [StageKilled] and "SIGKILL" in str(raised[0])


def test_what_a_worker_leaves_behind_ends_with_it(run, tell):
    tell("tokenizer", "orphan")
    artifact = run.store.lookup(build_stage(run, "tokenizer", {}).key)
    # The workspace is gone with its list of pids; the artifact's job did run, so look for the orphan by its argument.
    job = json.loads((run.store.verified(artifact, "records") / "job.json").read_text())
    orphan = f"orphan of {job['workspace']}"
    assert not [p for p in psutil.process_iter(["cmdline"]) if orphan in (p.info["cmdline"] or [])]


def test_changed_data_is_seen_and_moved_data_is_not(project, run):
    before = build_stage(run, "tokenizer", {})
    (project / "elsewhere").mkdir()
    (project / "elsewhere" / "text.txt").write_text("hello\n" * 100)
    moved = opened("tokenizer.data=['file:elsewhere/text.txt']", name="b")
    assert build_stage(moved, "tokenizer", {}).key == before.key
    (project / "text.txt").write_text("other\n" * 100)
    assert build_stage(run, "tokenizer", {}).key != before.key


def test_a_run_resumed_that_fails_early_keeps_what_it_had_finished_and_begun(run, tell):
    tokenizer = build_stage(run, "tokenizer", {})
    tell("pretrain", "fail-late")
    with pytest.raises(StageFailed):
        build_stage(run, "pretrain", {"tokenizer": tokenizer})
    run.close()
    tell("tokenizer", "fail")
    for seed in (1, 2):  # resumed twice, with other values
        again = opened(f"tokenizer.seed={seed}")
        with pytest.raises(StageFailed):
            build_stage(again, "tokenizer", {})
        again.close()
    assert [item.name for item in plan(run.store).items] == []
    tell("tokenizer", "")
    assert opened().entry("tokenizer").state == "waiting"
    again = opened("tokenizer.seed=2")
    build_stage(again, "tokenizer", {})
    again.store.change_run("r", lambda record: record.changed(stages={"tokenizer": record.stages["tokenizer"]}))
    again.close()
    gone = {(item.what, item.name.partition("/")[0]) for item in plan(run.store).items}
    assert gone == {("attempt", tokenizer.key), ("workspace", "work")}, "it has completed: what was before can go"


def test_a_key_is_in_the_record_before_it_is_looked_up(run, monkeypatch):
    noted = []
    lookup = run.store.lookup
    monkeypatch.setattr(run.store, "lookup", lambda key: noted.append(run.entry("tokenizer").key == key) or lookup(key))
    first = build_stage(run, "tokenizer", {})
    assert noted[0] and run.entry("tokenizer").made.attempt == first.attempt
    again = opened("tokenizer.seed=1", only=("tokenizer",))
    again.note_key("tokenizer", "b" * 40)
    assert again.entry("tokenizer").made is None, "an attempt of another key is not this one's"


def test_who_waits_for_another_builder_waits_as_long_as_the_stage_may_take(run, monkeypatch):
    build_stage(run, "tokenizer", {})
    waited = []

    def building(key, *, timeout_s, give_up):
        waited.append(timeout_s)
        raise StoreBusy("held")

    monkeypatch.setattr(run.store, "building", building)
    with pytest.raises(StoreBusy):
        build_stage(run, "tokenizer", {}, force=True)
    assert waited[0] > run.pipeline.stages["tokenizer"].timeout_s > 24 * 3600


def test_another_machine_goes_on_from_the_mirrored_checkpoint(project, tell, begun, monkeypatch):
    monkeypatch.setattr("nanodag.config.pipeline._NO_STORES", {})  # both machines are this process
    mirrored = [f"store.url=memory://{project.name}", "store.mirror_checkpoints=true"]
    run = opened(*mirrored, "store.local=one")
    thread, raised, workspace = begun(run)
    run.stop.set()
    thread.join()
    assert raised and run.store.keys("checkpoints") == [workspace.name]
    shutil.rmtree(run.store.local)
    tell("tokenizer", "")
    again = opened(*mirrored, "store.local=two")
    found = build_stage(again, "tokenizer", {})
    records = again.store.verified(again.store.attempt(found.key, found.attempt), "records")
    lines = [json.loads(line) for line in (records / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["resumed_from"]) for line in lines] == [(3, 2), (4, 2)]
    assert again.store.keys("checkpoints") == [], "what is published needs no checkpoints"


def test_a_local_store_is_told_that_it_has_nothing_to_mirror(project):
    with pytest.raises(ConfigError, match="mirror_checkpoints needs a remote store"):
        resolve(project / "pipeline.yaml", "tiny", ["store.mirror_checkpoints=true"])
