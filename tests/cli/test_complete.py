"""What a shell offers where TAB is pressed."""

import subprocess
import sys

import pytest

from nanodag.completion import main

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
def offered(tmp_path, monkeypatch, capsys):
    """A function: words as typed -> the last one's completions, as bash gets them."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "day-1.json").write_text('{"stages": {"start": {}, "tune": {}}}')
    (tmp_path / "runs" / "day-2.json").write_text('{"stages": {}}')
    (tmp_path / "runs" / "$(touch evil).json").write_text('{"stages": {}}')
    (tmp_path / "pipeline.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANODAG_STORE", str(tmp_path))

    def complete(*words, shell="bash"):
        monkeypatch.setenv("_NANODAG_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("nanodag", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(("nanodag", *words)))
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr().out.splitlines()
        assert bool(end.value.code) == (said in ([""], ["_files"]))
        return [line for line in said if line]

    return complete


def test_runs_of_the_store_are_offered(offered):
    for words in (["stages"], ["report"], ["chat"], ["rerun"], ["diff", "day-1"], ["run", "--name"], ["verify", "x"]):
        assert sorted(offered(*words, "d")) == ["day-1", "day-2"] == sorted(offered(*words, "")), words
    assert offered("stages", "day-1", "") == []


def test_stages_are_those_of_the_run_that_stands_before_else_of_the_file(offered):
    assert offered("chat", "day-1", "") == ["start", "tune"]
    assert offered("rerun", "day-1", "--from", "t") == ["tune"]
    assert offered("chat", "--port", "1", "--web", "day-1", "--also", "") == ["start", "tune"]
    assert offered("sbatch", "") == ["pretrain", "rl", "again"]


def test_presets_of_the_file_are_offered(offered, tmp_path):
    assert offered("run", "--preset", "") == ["small", "more"]
    (tmp_path / "other.yaml").write_text("presets: {mine: {stages: {}}}")
    assert offered("plan", "--file", "other.yaml", "--preset", "") == ["mine"]
    assert offered("plan", "--file=other.yaml", "-p", "m") == ["mine"]


def test_settings_are_offered_by_long_and_short_names(offered):
    found = offered("run", "pretrain.opt")
    assert "pretrain.optimizer.learning_rate=" in found and len(found) == 12
    assert all(name.startswith("pretrain.optimizer.") for name in found)
    assert {"rl.clip_high=", "rl.clip_low="} < set(offered("run", "seed=1", "rl.cl"))
    assert "rl.algorithm.critic.gamma=" in offered("config", "rl.algorithm.critic.")
    assert {"store.url=", "store.local="} < set(offered("nightly", "run", "st"))


def test_the_only_setting_has_a_value_behind_it_so_that_no_space_follows(offered):
    assert offered("run", "pretrain.optimizer.learn") == [
        "pretrain.optimizer.learning_rate=",
        "pretrain.optimizer.learning_rate=VALUE",
    ]


def test_commands_and_options_are_offered_with_what_the_shell_shows_of_them(offered):
    assert offered("r") == ["run", "rerun", "report", "rollouts", "reproduce"]
    assert offered("nightly", "") == ["run", "on", "off", "show"] and offered("no", "") == [] == offered(
        "nightly", "no", ""
    )
    assert offered("nightly", "run", "--") == ["--preset", "--file", "--detach", "--help"] and "--version" in offered(
        "--"
    )
    assert offered("nightly", "of", shell="fish") == ["off\tTurn the schedule off."]
    assert offered("ver", shell="zsh") == [
        """_arguments '*: :(("verify":"Compare every byte of artifacts with what was published."))'"""
    ]
    assert offered("run", "--preset", "m", shell="zsh") == ["""_arguments '*: :(("more"))'"""]
    assert offered("run", "--file", "p", shell="zsh") == ["_files"] == offered("run", "'", shell="zsh")


def test_completing_imports_neither_typer_nor_the_config():
    heavy = {"typer", "pydantic", "nanodag.config", "nanodag.store", "rich"}
    code = f"import sys, nanodag.completion as c; c._offered(['run'], 'rl'); print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("text", ["presets: [", "1", "presets: {a: 1}"])
def test_a_damaged_file_offers_nothing_and_shows_no_traceback(offered, tmp_path, text):
    (tmp_path / "pipeline.yaml").write_text(text)
    assert offered("run", "pretrain.opt") == [] == offered("sbatch", "")
