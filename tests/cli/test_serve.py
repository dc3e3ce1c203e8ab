"""`nanodag serve`: what the serving process is given."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from nanodag.cli import main
from nanodag.store import Store
from tests.run_records import built, run_record, stage_record
from tests.store.making import publish


@pytest.fixture
def store(tmp_path, monkeypatch) -> Store:
    """Two runs with finished models; the newer one has an RL stage under way."""
    monkeypatch.setenv("NANODAG_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "store")
    for number, run in enumerate(("older", "newer")):
        stages = {}
        for place, stage in enumerate(("pretrain", "sft")):
            files = tmp_path / f"{run}-{stage}"
            files.mkdir()
            (files / "config.json").write_text(f"{run} {stage}")
            stages[stage] = built(publish(store, files, f"{number}{place}" * 20, kind=stage, stage=stage))
        if run == "newer":
            stages["rl"] = stage_record("rl", state="running", key="ab" * 20)
        store.write_run(run_record(run, stages=stages, number=number, created=float(number)))
    return store


@pytest.fixture
def served(monkeypatch):
    """served(*arguments): the models, by name what is in their folder, and the other options."""

    def call(*arguments):
        given = []

        def hand_over(program, command, environment):  # the command gives its place to another program
            for one in command[3:]:
                name, _, path = one.partition("=")
                # Facts are a file that its successor has open: others read arguments, and they are not so long.
                read = partial(subprocess.check_output, ["cat", path], close_fds=False, text=True)
                given.append(f"{name}={read()}" if name == "--about" else one)
            sys.exit()

        monkeypatch.setattr(os, "execve", hand_over)
        monkeypatch.setattr(sys, "argv", ["nanodag", "serve", *arguments])
        with pytest.raises(SystemExit):
            main()
        models = [one.removeprefix("--model=").split("=") for one in given if one.startswith("--model=")]
        found = {name: (Path(folder) / "config.json").read_text() for name, folder in models}
        return found, [one for one in given if not one.startswith("--model=")]

    return call


def test_models_are_found_by_run_and_stage_and_a_folder_by_its_name(store, served, tmp_path):
    newest = {"sft": "newer sft"}
    assert served()[0] == newest
    assert served("older", "pretrain")[0] == {"pretrain": "older pretrain"}
    others = {"pretrain": "newer pretrain", "older:sft": "older sft"}
    assert served("--also", "pretrain", "--also", "older:sft")[0] == newest | others
    models, _ = served(str(tmp_path / "older-sft"), "--also", "newer:pretrain")
    assert models == {"older-sft": "older sft", "pretrain": "newer pretrain"}


def test_a_run_under_way_is_followed(store, served, tmp_path):
    models, options = served("newer", "rl", "--follow", "--also", "sft")
    assert models == {"sft": "newer sft"}
    store_options = [f"--store={tmp_path / 'store'}", f"--store-local={tmp_path / 'store'}"]
    assert options[2:6] == ["--follow=newer", "--follow-stage=rl", *store_options]
    about = json.loads(options[0].removeprefix("--about="))
    assert {name: facts["stage"] for name, facts in about.items()} == {"newer": "rl", "sft": "sft"}
    assert options[1] == f"--ratings={tmp_path / 'store' / 'ratings' / 'newer'}"


def test_options_reach_the_serving_process(store, served):
    named = ("--served-model-name", "gpt-x", "--no-access-log")
    _, options = served("--port", "0", "--engine", "sglang", "-o", "max-batch=8", "--cors", "https://a.example", *named)
    assert options[2:] == [
        *("--engine=sglang", "--replicas=1", "--host=127.0.0.1", "--port=0"),
        *("--served-model-name=gpt-x", "--no-access-log"),
        *("--cors=https://a.example", "--max-batch=8"),
    ]


def test_a_model_that_is_not_there_is_named(store, nanodag):
    nanodag("serve newer stf", "no finished model 'stf'; it has", code=1)
