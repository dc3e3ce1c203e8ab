"""A stage whose checkpoints are mirrored, stopped on one machine and resumed on another."""

import json
import shutil
import threading

import pytest

from nanodag.config import resolve
from nanodag.errors import ConfigError, StageFailed
from nanodag.run.build_stage import build_stage
from nanodag.run.record import open_run
from tests.fault.processes import wait_for_step


def test_another_machine_goes_on_from_the_mirrored_checkpoint(project, tell, monkeypatch):
    monkeypatch.setattr("nanodag.config.pipeline._NO_STORES", {})  # both machines are this process
    mirrored = [f"store.url=memory://{project.name}", "store.local=one", "store.mirror_checkpoints=true"]
    run = open_run("r", file="", preset="tiny", overrides=mirrored)
    tell("tokenizer", "wait")
    raised = []

    def body():
        try:
            build_stage(run, "tokenizer", {})
        except StageFailed as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    workspace = wait_for_step(run, "tokenizer", 2)
    run.stop.set()
    thread.join()
    assert raised and run.store.mirrored() == [workspace.name]
    shutil.rmtree(run.store.local)
    tell("tokenizer", "")
    again = open_run("r", file="", preset="tiny", overrides=[mirrored[0], "store.local=two", mirrored[2]])
    found = build_stage(again, "tokenizer", {})
    records = again.store.records(again.store.attempt(found.key, found.attempt))
    lines = [json.loads(line) for line in (records / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["resumed_from"]) for line in lines] == [(3, 2), (4, 2)]
    assert again.store.mirrored() == [], "what is published needs no checkpoints"


def test_a_local_store_is_told_that_it_has_nothing_to_mirror(project):
    with pytest.raises(ConfigError, match="mirror_checkpoints needs a remote store"):
        resolve(project / "pipeline.yaml", "tiny", ["store.mirror_checkpoints=true"])
