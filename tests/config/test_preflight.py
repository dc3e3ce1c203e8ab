"""What a pipeline names is looked at before anything starts: functions, files, models, benchmarks, first rows."""

import gzip
import json
import os
import subprocess
import sys
import textwrap
from unittest.mock import Mock

import pytest
import yaml

from nanodag.cli.show import show_config
from nanodag.config import resolve
from nanodag.errors import ConfigError, MissingTool, StageKilled
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from nanodag.rewards import sandbox
from nanodag.rl.rollouts.rollout import Rollout, prompt_span, write_rollouts
from nanodag.run.preflight import check_before_start
from nanodag.run.preflight_checks import Checks
from nanodag.run.python_path import note_python_path
from nanodag.store import Store
from tests.config.stages import STAGES
from tests.core_bundle import write_bundle
from tests.flow.tiny_mirror import write_mirror
from tests.http_server import Quiet, serving

MODULE = """
    import helper_of_mine_pf
    NUMBER = 5
    def reward(prompt, completion):
        return 1.0
    def reward_of_one(completion):
        return 1.0
    def drop(group, *, lowest=0.0):
        return None
    def rows(n=3):
        return [{"question": f"{i}?", "answer": i} for i in range(n)]
    def failing_rows():
        raise KeyError("answer_column")
    async def generate(sampler, sample):
        return sample
    def loss(trainer, old, advantages, mask, ids, clip_low, clip_high):
        return advantages
    def short_loss(trainer, old, clip_low=0.2):
        return trainer
    class World:
        def __init__(self, *, rounds=2):
            self.rounds = rounds
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, no_settings):
    """A pipeline file with modules and data beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("mine_pf", "helper_of_mine_pf", "broken_pf"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "mine_pf.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "helper_of_mine_pf.py").write_text("")
    (tmp_path / "broken_pf.py").write_text("\nimport nothing_of_this_name\n")
    (tmp_path / "text.txt").write_text("A text.\n\nAnother.")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1", "answer": 2}\n')
    (tmp_path / "q.jsonl").write_text('{"question": "1+1", "choices": ["a", "b", "c", "d"]}\n')
    cut = gzip.compress(b'{"a": 1}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(cut[: len(cut) // 2])
    stages = json.loads(json.dumps(STAGES).replace("/x.txt", "text.txt").replace("/p.jsonl", "p.jsonl"))
    benchmarks = [{"name": "continuation", "source": "file:text.txt"}]
    stages["eval"] = {"kind": "eval", "inputs": {"model": "base"}, "benchmarks": benchmarks}
    stages["model"] = {"kind": "import", "model": "file:model"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 64}')
    (tmp_path / "model" / "model.safetensors").write_text("")
    presets = {"one": {"stages": stages}}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump({"presets": presets}, sort_keys=False))
    return tmp_path


def faults(folder, *overrides, **how):
    return faults_of(resolve(folder / "pipeline.yaml", "one", overrides).pipeline, folder, **how)


def faults_of(pipeline, folder, **how):
    checks = Checks(pipeline, folder / "doing", **how)
    checks.trackers()
    for name in pipeline.stages:
        checks.stage(name)
    return [fault.replace(f"{folder}/", "") for fault in checks.faults]


def test_a_pipeline_whose_everything_is_there_passes(folder):
    own = ["rl.reward=mine_pf:reward", "rl.filters=[{name: 'mine_pf:drop', options: {lowest: 1}}]"]
    data = ["rl.data=['python:mine_pf:rows']", "rl.data=[{url: 'python:mine_pf:rows', adapter: problem}]"]
    more = ["rl.generate=mine_pf:generate", "rl.inputs={model: model}", "rl.lora_rank=64"]
    loss = ["rl.policy_loss=mine_pf:loss", "rl.clip_low=0.1"]
    assert faults(folder, *own, *data, *more, *loss) == []


def test_one_fault_of_several_settings_is_said_once_with_all_of_them(folder):
    lost = "[{url: 'package:not-there-pf/x.json', adapter: %s}]"
    [fault] = faults(folder, f"base.data={lost % 'text'}", f"rl.data={lost % 'problem'}")
    assert fault.startswith("base.data.0, rl.data.0: Source 'package:not-there-pf/x.json'") and "pip install" in fault


def test_a_held_out_share_of_too_few_rows_to_hold_one_is_refused(folder):
    (folder / "few.jsonl").write_text("".join(json.dumps({"text": f"No. {n}"}) + "\n" for n in range(60)))
    held_out = "base.data=[{url: 'file:few.jsonl', held_out: %s}]"
    [fault] = faults(folder, held_out % 0.001)
    assert "held_out: 0.1 % of the 60 rows of file:few.jsonl is none, so nothing would be measured" in fault
    assert faults(folder, held_out % 0.3) == []
    assert faults(folder, held_out % 0.001, "base.validation_tokens=0") == []


@pytest.mark.parametrize(("override", "said"), [
    ("rl.reward=nomodule_pf:f", "stage rl names 'nomodule_pf:f': there is no module nomodule_pf beside "),
    ("rl.reward={'nomodule_pf:f': 1, gsm8k: 1}", "there is no module nomodule_pf beside "),
    ("rl.reward=os:system", "stage rl: 'os:system' names os, a module of Python's own, and no function of yours"),
])  # fmt: skip
def test_a_module_that_is_not_there_is_refused_when_the_config_is_read(folder, override, said):
    with pytest.raises(ConfigError, match=said):
        resolve(folder / "pipeline.yaml", "one", [override])


@pytest.mark.parametrize(("override", "said"), [
    ("rl.reward=mine_pf:f", "rl.reward.0: mine_pf:f: mine_pf.py has no function f"),
    ("rl.evaluation.benchmarks=[{name: arc_easy, source: 'file:q.jsonl'}]",
     "(form arc_easy) is scored by likelihood"),
    ("rl.evaluation.benchmarks=[{name: gsm8k, source: 'file:empty.jsonl'}]", "file:empty.jsonl is empty"),
    ("rl.reward=mine_pf:NUMBER", "rl.reward.0: mine_pf:NUMBER is no function: mine_pf.py has it as 5"),
    ("rl.reward=mine_pf:reward_of_one", "(prompt, completion): too many positional arguments"),
    ("rl.reward=group:mine_pf:f", "rl.reward.0: mine_pf:f: mine_pf.py has no function f"),
    ("rl.reward=model:/nowhere", "rl.reward.0: Model 'file:/nowhere': there is no folder /nowhere."),
    ("rl.reward=broken_pf:f", "(broken_pf.py, line 2, in <module>)"),
    ("rl.advantage=mine_pf:reward", "(rewards, group_ids, num_tokens): too many"),
    ("rl.policy_loss=mine_pf:short_loss", "mask, sequence_ids): too many positional"),
    ("rl.correction=mine_pf:short_loss", "mask, sequence_ids): too many positional"),
    ("rl.filters=['mine_pf:no']", "rl.rollout.filters.0: mine_pf:no: mine_pf.py has no function no"),
    ("rl.filters=[{name: 'mine_pf:drop', options: {lowst: 1}}]", "has no option 'lowst'; it takes lowest"),
    ("rl.generate=mine_pf:no", "rl.rollout.generate: mine_pf:no: mine_pf.py has no function no"),
    ("rl.generate={name: 'environment:mine_pf:World', options: {max_turns: 3, round: 1}}",
     "rl.rollout.generate: mine_pf:World is called with (): got an unexpected keyword argument"),
    ("rl.generate={name: 'agent:mine_pf:no', options: {python: /nowhere}}",
     "the agent's python /nowhere is no program"),
    ("rl.teacher={model: /nowhere}", "rl.algorithm.teacher.model: Model 'file:/nowhere': there is no folder"),
    ("model.model=file:/nowhere", "model.model: Model 'file:/nowhere': there is no folder /nowhere."),
    ("rl={inputs: {model: model}, lora_rank: 65}", "rl.optimizer.lora_rank: 65 is above 64, the width"),
    ("rl.data=['file:/nowhere.jsonl']", "rl.data.0: Source 'file:/nowhere.jsonl' matches no file"),
    ("rl.data=['file:empty.jsonl']", "rl.data.0: file:empty.jsonl is empty: it has no rows"),
    ("rl.reward=code", "rl.data.0: the reward code reads metadata.tests of a prompt, and row 0 of file:p.jsonl"),
    ("rl.data=['file:p.jsonl[5:]']", "rl.data.0: file:p.jsonl[5:] is empty: it has no rows"),
    ("rl.data=['file:q.jsonl']", "rl.data.0: Adapter 'prompt' cannot make a prompt of row 0 of file:q.jsonl: no"),
    ("rl.data=[{url: 'file:p.jsonl', columns: {answer: label}}]",
     "no column 'label'. The row's columns are answer"),
    ("rl.data=[{url: 'file:p.jsonl', columns: {question: prompt}}]", "`columns` names 'question', which it does"),
    ("base.data=[{url: 'file:text.txt', reward: math}]", "'math' means nothing to documents"),
    ("eval.benchmarks=[{name: gsm8k, source: {url: 'file:q.jsonl', columns: {answer: label}}}]",
     "eval.benchmarks.0: file:q.jsonl: there is no column 'label', only choices,"),
    ("eval.benchmarks=[{name: gsm8k, source: {url: 'file:q.jsonl', reward: math}}]",
     "eval.benchmarks.0: file:q.jsonl: reward 'math' means nothing to rows as they are; a benchmark reads"),
    ("rl.data=['python:mine_pf:no']", "rl.data.0: Source 'python:mine_pf:no': mine_pf.py has no function no."),
    ("rl.data=['python:mine_pf:failing_rows']", "KeyError: 'answer_column' (mine_pf.py, line 13, in"),
    ("rl.data=[{url: 'file:p.jsonl', weight: 1}, 'file:q.jsonl']", "a weight and file:q.jsonl has none"),
    ("base.data=['hub:a/b']", "base.data.0: Source 'hub:a/b' is not in the mirror: there is no"),
    ("base.data=['package:no-such-dist/x.json']", "no-such-dist, which is not installed"),
    ("eval.benchmarks=[{name: contination, source: 'file:text.txt'}]", "has no form 'contination'"),
    ("eval.benchmarks=[{name: gsm8k}]", "eval.benchmarks.0: Benchmark 'gsm8k' needs `source:`, where its items"),
    ("eval.benchmarks=[{name: gsm8k, source: 'file:p.jsonl'}]", "'question', which gsm8k_chat.yaml asks for"),
    ("base.data=['file:cut.jsonl.gz']", "base.data.0: "),
    ("tracking.trackers=[wandb]", "tracking.trackers: wandb is not installed; run: pip install 'nanodag[wandb]'"),
])  # fmt: skip
def test_what_is_not_there_is_one_line(folder, override, said):
    found = faults(folder, override, "mirror=/nowhere")
    assert found and said in found[0], found
    assert "\n" not in found[0] and (len(found) == 1 or "mixture" in found[0])


@pytest.mark.parametrize(("override", "said"), [
    ("base.data=['file:nowhere.txt']", "matches no file"),
    ("base.data=['hub:a/b']", "The mirror /nowhere is not a folder"),
])  # fmt: skip
def test_config_itself_refuses_what_is_not_there_unless_another_machine_is_named(folder, override, said):
    asked = {"preset": "one", "file": str(folder / "pipeline.yaml")}
    with pytest.raises(ConfigError, match=said):
        show_config([override, "mirror=/nowhere"], **asked)
    show_config([override, "mirror=/nowhere"], **asked, on="1x24GB")
    assert not (folder / "store").exists(), "who only looks makes no store"


def test_config_asks_neither_the_hub_nor_for_tools(folder, capsys):
    overrides = ["base.data=['hub:a/b']", "tracking.trackers=[wandb]", "model.model='hub:a/b'"]
    show_config(overrides, preset="one", file=str(folder / "pipeline.yaml"))
    assert "[hub:a/b]" in capsys.readouterr().out


def check(folder, *overrides, stage="rl"):
    pipeline = resolve(folder / "pipeline.yaml", "one", overrides).pipeline
    check_before_start(pipeline, Store(folder), file=folder / "pipeline.yaml", stages=[stage])


def test_what_does_not_fit_this_machine_is_refused_before_anything_is_looked_at(folder, monkeypatch):
    monkeypatch.setattr("nanodag.run.preflight.detect", lambda folder: machine_of("cpu:2:avx2:1GiB"))
    monkeypatch.setattr("nanodag.run.preflight._look", lambda asked: pytest.fail("it looked"))
    with pytest.raises(ConfigError, match=r"base.micro_batch_tokens: \d+ takes .* of memory, more than 1.0 GB"):
        check(folder, "base.depth=24", stage="base")


def test_nothing_of_the_users_is_imported_here_and_a_module_that_ends_its_process_is_named(folder):
    (folder / "ends_pf.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(ConfigError, match=r"preset 'one': rl.reward.0: .*ends_pf:f ended the process .* with code 7"):
        check(folder, "rl.reward=ends_pf:f")
    assert "ends_pf" not in sys.modules


def test_a_check_that_was_killed_says_so_and_what_memory_there_was_and_blames_no_value(folder):
    (folder / "killed_pf.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(StageKilled, match=r"check before the start was ended by SIGKILL, while .* GB of .* free") as at:
        check(folder, "rl.reward=killed_pf:f")
    assert len(str(at.value).splitlines()) == 1


def test_a_check_that_was_killed_before_it_looked_at_anything_is_no_traceback(folder, monkeypatch):
    (folder / "killed").write_text("#!/bin/sh\nkill -9 $$\n")
    (folder / "killed").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "killed"))
    with pytest.raises(StageKilled, match=r"^The check before the start was ended by SIGKILL \("):
        check(folder, "base.seed=77")


def test_what_passed_is_looked_at_again_only_when_it_has_changed(folder, monkeypatch):
    check(folder, "rl.reward=mine_pf:reward")
    with monkeypatch.context() as patched:
        patched.setattr("nanodag.run.preflight.subprocess.run", None)  # no process is started
        check(folder, "rl.reward=mine_pf:reward")
    (folder / "mine_pf.py").write_text("")
    with pytest.raises(ConfigError, match=r"mine_pf.py has no function reward"):
        check(folder, "rl.reward=mine_pf:reward")


def test_a_run_has_the_pythonpath_of_who_asked_for_it_and_not_the_servers(tmp_path, monkeypatch):
    callers, servers = tmp_path / "callers", tmp_path / "servers"
    for place in (callers, servers):
        place.mkdir()
        (place / "of_whom_pf.py").write_text(f"WHO = {place.name!r}")
    (servers / "only_there_pf.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(callers))
    note_python_path(tmp_path, "r1")
    code = """
        import os, subprocess, sys
        from pathlib import Path
        from nanodag.own_code.find import file_of
        from nanodag.run.python_path import take_python_path
        take_python_path(Path(sys.argv[1]), sys.argv[2])
        import of_whom_pf
        child = subprocess.run([sys.executable, "-c", "import of_whom_pf; print(of_whom_pf.WHO)"], stdout=-1, text=True)
        print(of_whom_pf.WHO, child.stdout.strip(), file_of("only_there_pf"))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    for run, said in (("r1", "callers callers None"), ("r2", f"servers servers {servers / 'only_there_pf.py'}")):
        environment = os.environ | {"PYTHONPATH": str(servers)}
        done = subprocess.run([*command, run], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == said


def test_programs_without_a_sandbox_are_refused_before_work_begins(folder, monkeypatch):
    row = {"prompt": "def f():\n", "canonical_solution": "    pass", "test": "assert f() is None", "entry_point": "f"}
    (folder / "he.jsonl").write_text(json.dumps(row) + "\n")
    asked = "eval.benchmarks=[{name: humaneval, source: {url: 'file:he.jsonl', adapter: humaneval}}]"
    monkeypatch.setattr(sandbox, "walls", Mock(side_effect=MissingTool("there is none")))
    assert faults(folder, asked) == ["eval.benchmarks.0: there is none"]
    monkeypatch.setattr(sandbox, "walls", lambda: None)
    assert faults(folder, asked) == []


def test_a_stage_without_samplers_asks_for_no_engine(folder, monkeypatch):
    failed = Rollout(group_id="p", prompt_id="p", sample_index=0, spans=(prompt_span([1]),), finish_reason="error")
    write_rollouts(folder / "saved.jsonl", [failed])
    monkeypatch.setenv("NANODAG_SGLANG_PYTHON", "/nowhere/python")
    assert faults(folder, "rl.sampler.engine=sglang", "rl.source=file:saved.jsonl") == []
    (fault,) = faults(folder, "rl.sampler.engine=sglang")
    assert fault.startswith("rl.sampler.python: ")


@pytest.mark.parametrize("preset", list(yaml.safe_load((PROJECT / "pipeline.yaml").read_text())["presets"]))
def test_every_shipped_preset_passes_on_a_mirror(preset, tmp_path, monkeypatch, no_settings):
    monkeypatch.setenv("NANODAG_CACHE", str(tmp_path / "cache"))
    write_mirror(tmp_path / "mirror")
    pipeline = resolve(PROJECT / "pipeline.yaml", preset, [f"mirror={tmp_path / 'mirror'}"]).pipeline
    assert faults_of(pipeline, tmp_path) == []


@pytest.mark.parametrize(
    ("overrides", "where"),
    [(["base.core_every=10"], "base.core_bundle"), (["eval.benchmarks=[{name: core}]"], "eval.benchmarks.0.source")],
)
def test_a_bundle_without_a_task_is_refused_by_the_names_of_its_files_and_with_what_to_do(folder, overrides, where):
    write_bundle(folder)
    given = [f"core_bundle={folder}", *overrides]
    assert faults(folder, *given) == []
    for name in ("squad", "copa"):
        next(folder.rglob(f"{name}.jsonl")).unlink()
    (said,) = faults(folder, *given)
    assert said.startswith(f"{where}: CORE needs all of its tasks; {folder} lacks copa.jsonl, squad.jsonl. Set ")
    assert said.endswith("or core_bundle=none to leave CORE out")


class Nothing(Quiet):
    """Has nothing that is asked for."""

    def do_HEAD(self):
        self.answer(status=404)

    do_GET = do_HEAD


def test_a_bundle_that_cannot_be_fetched_is_said_before_anything_starts_and_who_only_looks_fetches_none(
    folder, monkeypatch
):
    monkeypatch.setenv("NANODAG_CACHE", str(folder / "cache"))
    with serving(Nothing) as address:
        given = [f"core_bundle={address}/eval_bundle.zip", "base.core_every=10", "eval.benchmarks=[{name: core}]"]
        (said,) = faults(folder, *given)
        assert said.startswith(f"base.core_bundle: {address}/eval_bundle.zip cannot be fetched into ")
        assert said.endswith("or core_bundle=none to leave CORE out")
        assert faults(folder, *given, only_names=True) == []
    (said,) = faults(folder, "core_bundle=https://host/bundle.tar", "base.core_every=10")
    assert said.startswith(
        "base.core_bundle: Source 'https://host/bundle.tar' is not of the form https://host/path.zip."
    )
