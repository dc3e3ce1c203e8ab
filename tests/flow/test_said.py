"""Which store a command looks into, and that `nanodag run` waits for a run that is being stopped."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from nanodag.cli import parameters
from nanodag.cli.live_table import make_console
from nanodag.cli.run import run_pipeline, take_over
from nanodag.cli.show import how_to_build_stale
from nanodag.errors import StoreBusy
from tests.flow.tiny_runs import opened


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    monkeypatch.setattr(parameters, "_TYPED", [])
    for name in ("NANODAG_STORE", "NANODAG_STORE_LOCAL", "NANODAG_MIRROR"):
        monkeypatch.setenv(name, "")  # so that what is set is taken back


def test_every_command_takes_the_store_wherever_it_stands():
    given = ["stages", "store.url=/else where", "mine", "-f", "my.yaml"]
    assert parameters.take(given) == ["stages", "mine", "-f", "my.yaml"]
    assert os.environ["NANODAG_STORE"] == "/else where"
    assert parameters.command("server stop") == "nanodag server stop 'store.url=/else where' --file my.yaml"
    assert how_to_build_stale("mine") == "nanodag rerun mine --stale 'store.url=/else where' --file my.yaml"


def test_what_goes_on_to_the_flow_stays_an_override():
    given = ["run", "store.url=s3://b/x", "store.local=/fast", "rl.seed=1"]
    assert parameters.take(given) == given
    assert (os.environ["NANODAG_STORE"], os.environ["NANODAG_STORE_LOCAL"]) == ("s3://b/x", "/fast")


@pytest.mark.parametrize("command", [("server", "status"), ("stages",), ("gc",)])
def test_commands_look_into_the_store_that_is_named(project, command):
    opened(f"store.url={project}/other", name="other")
    code = "from nanodag.cli import main; main()"
    environment = {name: value for name, value in os.environ.items() if value or not name.startswith("NANODAG")}
    arguments = [sys.executable, "-c", code, *command, f"store.url={project}/other"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment, timeout=100)
    output = " ".join((done.stdout + done.stderr).split())
    assert "No such command" not in output and "unexpected extra argument" not in output, output
    assert "No runs" not in output and "no runs in" not in output, output
    assert (project / "other" / "prefect").exists() == (command[0] == "server") and not (project / "store").exists()


def test_a_run_is_looked_up_by_name_in_the_store_that_is_named(project, monkeypatch):
    elsewhere = f"store.url={project}/other"
    opened(elsewhere, "tokenizer.seed=5", name="mine").close()

    def server_of(pipeline, store, path):
        raise AssertionError(f"reached with seed {pipeline.stages['tokenizer'].seed} in {store.url}")

    monkeypatch.setattr(sys.modules["nanodag.cli.run"], "server_of", server_of)
    with pytest.raises(AssertionError, match=f"reached with seed 5 in {project}/other$"):
        run_pipeline([elsewhere], preset="auto", file="", name="mine", detach=True)


def server_that_says(state):
    api = SimpleNamespace(run_state=lambda flow_run: {"type": state})
    return SimpleNamespace(running=lambda: SimpleNamespace(api=lambda: api), has_left_flows=lambda: False)


def test_a_run_that_is_being_stopped_is_waited_for_and_one_under_way_is_not(project):
    run = opened(flow_run="f")  # this process is alive
    with pytest.raises(StoreBusy, match=f"is under way in process {os.getpid()}"):
        take_over(run.store, "r", server_that_says("RUNNING"), make_console())
    began = time.monotonic()
    threading.Timer(0.5, run.close).start()
    take_over(run.store, "r", server_that_says("CANCELLING"), make_console())
    assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize("has_left_flows", [False, True])
def test_a_run_whose_server_is_gone_is_waited_for_and_ended(project, capsys, monkeypatch, has_left_flows):
    run = opened(flow_run="f")
    gone = SimpleNamespace(running=lambda: None, has_left_flows=lambda: has_left_flows)
    signals = []
    monkeypatch.setattr(os, "kill", lambda *sent: signals.append(sent))
    threading.Timer(0.5, run.close).start()
    began = time.monotonic()
    take_over(run.store, "r", gone, make_console())
    assert time.monotonic() - began >= 0.5
    assert signals == [(os.getpid(), signal.SIGTERM)] * has_left_flows
    said = " ".join(capsys.readouterr().out.split())
    assert f"r has lost its Prefect server; waiting for its process {os.getpid()} to end" in said
