"""What a shell offers where TAB is pressed."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from nanodag.cli import app
from nanodag.cli.complete import complete_names

FILE = """
default: small
presets:
  small:
    stages:
      pretrain: {kind: pretrain}
      rl: {kind: rl}
  more:
    extends: small
    stages: {rl: drop, again: {kind: sft}}
"""


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """A function: words as typed -> the last one's completions, as bash gets them."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "day-1.json").write_text('{"stages": {"start": {}, "tune": {}}}')
    (tmp_path / "runs" / "day-2.json").write_text('{"stages": {}}')
    (tmp_path / "pipeline.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    environment = {"NANODAG_STORE": str(tmp_path), "_NANODAG_COMPLETE": "complete_bash"}

    def complete(*words):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("COMP_WORDS", "\n".join(("nanodag", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        from typer.testing import CliRunner

        return CliRunner().invoke(app, [], prog_name="nanodag").output.split()

    return complete


def test_runs_of_the_store_are_offered(offered):
    for words in (["stages"], ["report"], ["chat"], ["rerun"], ["diff", "day-1"], ["run", "--name"]):
        assert sorted(offered(*words, "d")) == ["day-1", "day-2"], words


def test_stages_are_those_of_the_run_that_stands_before_else_of_the_file(offered):
    assert offered("chat", "day-1", "") == ["start", "tune"]
    assert offered("rerun", "day-1", "--from", "p") == ["pretrain"]  # behind an option no word before it is known
    assert offered("sbatch", "") == ["pretrain", "rl", "again"]


def test_presets_of_the_file_are_offered(offered, tmp_path):
    assert offered("run", "--preset", "") == ["small", "more"]
    (tmp_path / "other.yaml").write_text("presets: {mine: {stages: {}}}")
    assert offered("plan", "--file", "other.yaml", "--preset", "") == ["mine"]


def test_settings_are_offered_by_long_and_short_names(offered):
    found = offered("run", "pretrain.opt")
    assert "pretrain.optimizer.learning_rate=" in found and len(found) == 10
    assert all(name.startswith("pretrain.optimizer.") for name in found)
    assert {"rl.clip_high=", "rl.clip_low="} < set(offered("run", "seed=1", "rl.cl"))
    assert "rl.algorithm.critic.gamma=" in offered("config", "rl.algorithm.critic.")
    assert {"store.url=", "store.local="} < set(offered("nightly", "run", "st"))


def test_the_only_setting_has_a_value_behind_it_so_that_no_space_follows(offered):
    assert offered("run", "pretrain.optimizer.learn") == [
        "pretrain.optimizer.learning_rate=",
        "pretrain.optimizer.learning_rate=VALUE",
    ]


def test_a_command_of_another_app_is_completed_by_the_names_of_its_parameters():
    parameter = SimpleNamespace(autocompletion=None)

    def command(preset): ...

    command.__annotations__ = {"preset": SimpleNamespace(__metadata__=(parameter,))}
    complete_names(SimpleNamespace(registered_commands=[SimpleNamespace(callback=command)]))
    assert parameter.autocompletion is not None


def test_completing_imports_neither_pydantic_nor_the_store():
    heavy = {"pydantic", "nanodag.config", "nanodag.store", "rich.console"}
    code = f"import sys, nanodag.cli; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("text", ["presets: [", "1", "presets: {a: 1}"])
def test_a_damaged_file_offers_nothing_and_shows_no_traceback(offered, tmp_path, text):
    (tmp_path / "pipeline.yaml").write_text(text)
    assert offered("run", "pretrain.opt") == [] == offered("sbatch", "")
