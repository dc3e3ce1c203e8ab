"""Kinds of a user's own, one file each: beside the pipeline file, and of an installed package."""

import json
import os
import re
import sys
from dataclasses import replace

import pytest
import yaml

from nanodag.cli.serve import chat
from nanodag.cli.show import show_status
from nanodag.config import resolve
from nanodag.config.kinds import installed, recorded_kind, shipped
from nanodag.errors import ConfigError, SourceError
from nanodag.host.machine import machine_of
from nanodag.nightly.nights import choose
from nanodag.plan.make import plan_of
from nanodag.run.build_stage import build_stage, key_of
from nanodag.run.preflight_checks import Checks
from nanodag.worker.job import load_job, read_job
from tasks.stage_task import task_of
from tests.fake_stages import NO_TRACKERS, STAGES
from tests.flow.tiny_runs import opened

MERGE = """
import json
from nanodag.config.kind import MODEL, Kind
from nanodag.config.stage_base import StageBase


class MergeStage(StageBase):
    share: float = 0.5


NEEDS = {"model": MODEL, "other": MODEL}
KIND = Kind(name="merge", config=MergeStage, module="merging", makes=MODEL, needs=NEEDS, label="MERGED")


def main():
    from nanodag.worker.job import finish, load_job

    job = load_job()
    seeds = [json.loads((job.inputs[name] / "made.json").read_text())["seed"] for name in ("model", "other")]
    job.output.mkdir(exist_ok=True)
    (job.output / "made.json").write_text(json.dumps({"seed": sum(seeds), "share": job.config.share}))
    finish(job, metrics={"share": job.config.share}, cost={})


if __name__ == "__main__":
    main()
"""

JUDGE = """
from nanodag.config.kind import MODEL, SCORES, Kind
from nanodag.config.stage_base import StageBase

class JudgeStage(StageBase):
    rounds: int = 3

KIND = Kind(name="judge", config=JudgeStage, module="fake_judge", makes=SCORES, needs={"model": MODEL}, code_version=4)
"""

MERGED = {"kind": "merging:KIND", "inputs": {"model": "pretrain", "other": "pretrain"}, "share": 0.25}
WITH_MERGE = {
    **{name: STAGES[name] for name in ("tokenizer", "pretrain")},
    "merged": MERGED,
    "eval_merged": {"kind": "eval", "inputs": {"model": "merged"}, "benchmarks": [{"name": "x"}]},
    "report": {"kind": "report", "inputs": ["merged", "eval_merged"]},
}


def write(project, stages, **fields):
    preset = {"stages": stages, "tracking": NO_TRACKERS, **fields}
    (project / "pipeline.yaml").write_text(yaml.safe_dump({"default": "tiny", "presets": {"tiny": preset}}))


@pytest.fixture
def merge(project, monkeypatch):
    """A project with a stage of a kind whose one file lies beside the pipeline file, with scores and a true report."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder of the test before has a module of that name too
    (project / "merging.py").write_text(MERGE)
    write(project, WITH_MERGE, nightly={"runs": {"now": "r"}})
    for kind, module in (("eval", "fake_eval"), ("report", "nanodag.report")):
        monkeypatch.setitem(shipped(), kind, replace(shipped()[kind], module=module))
    return project


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that offers the kind `judge`; its module is `judging`."""
    site = tmp_path / "site"
    about = site / "judging-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "judging.py").write_text(JUDGE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: judging\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[nanodag.kinds]\njudge = judging:KIND\n")
    monkeypatch.syspath_prepend(str(site))
    installed.cache_clear()
    yield site
    installed.cache_clear()


def test_a_kind_in_one_file_of_the_users_own_works_everywhere(merge, monkeypatch, capsys):
    run, results = opened(), {}
    for name in run.order:
        inputs = {label: results[source] for label, source in run.pipeline.stages[name].inputs.items()}
        results[name] = build_stage(run, name, inputs)
    run.close()
    of = {name: run.store.materialize(run.store.attempt(r.key, r.attempt)) for name, r in results.items()}
    assert json.loads((of["merged"] / "made.json").read_text()) == {"seed": 0, "share": 0.25}

    report = (of["report"] / "report.md").read_text()
    assert "MERGED" in report and "| merged | merge |" in report
    show_status(file="", all_runs=False)
    assert re.search(r"^merged +merge +built ", capsys.readouterr().out, re.MULTILINE)
    assert task_of("merging:KIND").name == "merge"

    started = []
    monkeypatch.setattr(os, "execve", lambda program, command, environment: started.append(command))
    chat("r", "merged")
    assert str(of["merged"]) in started[0]
    [subject] = choose(run.store, run.pipeline).subjects
    assert (subject.stage, [name for name, _ in subject.evals.values()]) == ("merged", ["eval_merged"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("merged.share=x", "merged.share: must be a number (found 'x')"),
        ("merged.shares=1", "merged.shares: there is no such key. Did you mean 'share'?"),
        ("merged.inputs={model: pretrain}", "merged of kind merging:KIND needs the input other; found model"),
        ("merged.inputs={model: pretrain, other: tokenizer}", "merged.inputs.other: stage tokenizer, of kind"),
        ("merged.resources.nodes=2", "merged.resources.nodes 2: a stage of kind merging:KIND runs on one machine"),
    ],
)
def test_what_an_own_kind_says_of_itself_is_checked_as_of_ours(merge, override, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(merge / "pipeline.yaml", "tiny", [override])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("os:path", "kind: 'os:path' names os, a module of Python's own"),
        ("nowhere:KIND", "kind names 'nowhere:KIND': there is no module nowhere beside"),
        ("yaml:KIND", "kind names 'yaml:KIND', and the module yaml neither stands beside"),
        ("broken:KIND", "the kind 'broken:KIND' cannot be imported: ZeroDivisionError"),
        ("broken_too:KIND", "the kind 'broken_too:KIND' must be a nanodag.config.kind.Kind; found 5"),
        ("jugde", "there is no kind 'jugde'; kinds are .*, report, judge. Did you mean 'judge'"),
    ],
)
def test_a_kind_that_cannot_be_had_is_refused_in_one_line(project, package, kind, said):
    (project / "broken.py").write_text("1 / 0")
    (project / "broken_too.py").write_text("KIND = 5")
    write(project, {"tokenizer": {**STAGES["tokenizer"], "kind": kind}})
    with pytest.raises(ConfigError, match=said) as caught:
        resolve(project / "pipeline.yaml")
    assert "tokenizer: " in str(caught.value) and "\n" not in str(caught.value)


def test_a_kind_of_an_installed_package_has_a_name_and_is_imported_when_it_is_named(project, package):
    resolve(project / "pipeline.yaml")
    assert "judging" not in sys.modules
    judge = {"kind": "judge", "inputs": {"model": "pretrain"}, "rounds": 5}
    write(project, {**STAGES, "judged": judge, "report": {"kind": "report", "inputs": ["judged"]}})
    run = opened()
    assert run.pipeline.stages["judged"].rounds == 5
    assert recorded_kind("judge").is_about_others and task_of("judge").name == "judge"
    key, sources = key_of(run, run.pipeline.stages["judged"], {})
    assert sources == {} and key != key_of(run, run.pipeline.stages["judged"].model_copy(update={"rounds": 6}), {})[0]


def test_a_kind_whose_worker_is_not_there_is_found_before_anything_starts(merge):
    (merge / "astray.py").write_text(MERGE.replace('module="merging"', 'module="mergin"'))
    write(merge, {**WITH_MERGE, "merged": {**MERGED, "kind": "astray:KIND"}})
    checks = Checks(resolve(merge / "pipeline.yaml").pipeline, merge / "doing")
    checks.stage("merged")
    [fault] = checks.faults
    assert fault.startswith("merged.kind: mergin: there is no module mergin beside the pipeline file")
    assert str(merge / "astray.py") in checks.relied_on


SCORER = """
from typing import ClassVar

from nanodag.config.kind import Kind
from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.config.rl_parts import RewardConfig
from nanodag.config.stage_base import ExternalInput, StageBase
from nanodag.plan.case import Formula

class ScoreStage(StageBase):
    plan_formula: ClassVar[str] = f"{__name__}:FORMULA"
    reward: RewardConfig = RewardConfig(name="exact")
    benchmarks: tuple[BenchmarkConfig, ...] = ()
    judge: str = "none"

    def external_inputs(self):
        if self.judge != "none":
            yield ExternalInput("judge", "model", self.judge)

FORMULA = Formula(lambda case: case.plan(seconds=3.0))
KIND = Kind(name="score", config=ScoreStage, module="scoring_work")
"""


@pytest.fixture
def scorer(project, monkeypatch):
    """A project with a stage of an own kind that names a reward, and its worker, a package."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"scoring_{project.parent.name}".replace("-", "_")  # Python keeps a module by its name
    (project / f"{name}.py").write_text(SCORER)
    (project / "scoring_work").mkdir()
    for file in ("__init__.py", "__main__.py"):
        (project / "scoring_work" / file).write_text("")
    (project / "my_r.py").write_text("def f(): ...")
    stage = {"kind": f"{name}:KIND", "resources": {"threads": 2}}
    write(project, {"tokenizer": STAGES["tokenizer"], "scored": stage})
    return project


def test_functions_that_a_stage_of_an_own_kind_names_are_trusted_and_keyed_as_those_of_ours(scorer):
    with pytest.raises(ConfigError, match="yaml neither stands beside"):
        resolve(scorer / "pipeline.yaml", "tiny", ["scored.reward=yaml:load"])
    form = [{"name": "x", "form": "/elsewhere/form.yaml"}]
    with pytest.raises(ConfigError, match="lies elsewhere"):
        resolve(scorer / "pipeline.yaml", "tiny", [f"scored.benchmarks={json.dumps(form)}"])
    (scorer / "mine.yaml").write_text("process_results: !function my_judge.f")
    form = [{"name": "x", "form": str(scorer / "mine.yaml")}]
    run = opened("scored.reward=my_r:f", f"scored.benchmarks={json.dumps(form)}")
    stage = run.pipeline.stages["scored"]
    keys = [key_of(run, stage, {})[0]]
    of_kind = f"{stage.kind.partition(':')[0]}.py"
    for changed in ("my_r.py", "scoring_work/__main__.py", "mine.yaml", "my_judge.py", of_kind):
        (scorer / changed).write_text("f: !function my_judge.f" if changed == "mine.yaml" else "def f(): return 1")
        keys.append(key_of(run, stage, {})[0])
    assert len(set(keys)) == 6


def test_an_own_kind_brings_the_formula_of_its_plan_and_what_its_key_and_the_check_beforehand_name(scorer):
    run = opened("scored.judge=/nowhere")
    plan = plan_of(run.pipeline, machine_of("cpu:2:avx2:8GiB"), stages=["scored"])
    assert [stage.seconds for stage in plan.stages] == [3.0]
    checks = Checks(run.pipeline, scorer / "doing")
    checks.stage("scored")
    assert checks.faults == ["scored.judge: Model 'file:/nowhere': there is no folder /nowhere."]
    with pytest.raises(SourceError, match="no folder /nowhere"):
        key_of(run, run.pipeline.stages["scored"], {})


def test_a_short_name_means_the_setting_of_an_own_kind_in_the_first_process_that_reads_it(scorer):
    found = resolve(scorer / "pipeline.yaml", "tiny", ["scored.threads=1"])
    assert found.pipeline.stages["scored"].resources.threads == 1
    assert found.origins["scored.resources.threads"] == "override"


def test_a_job_imports_no_kind_that_is_not_trusted_and_one_that_is_gone_stops_nobody(tmp_path, monkeypatch):
    """The stages that a report is over come from manifests, which others may have written."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "evilmod.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "evil"))
    job = {"name": "report", "run": "r", "config": {"kind": "report"}, "inputs": {}, "workspace": str(tmp_path)}
    job["context"] = {"code": str(tmp_path), "stages": {"x": {"kind": "evilmod:KIND"}}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    read_job(tmp_path / "job.json")
    gone = recorded_kind("evilmod:KIND")
    assert (gone.name, gone.makes, gone.trains) == ("evilmod:KIND", "nothing", False)


def test_a_worker_that_gets_no_job_says_how_it_is_started():
    with pytest.raises(SystemExit, match=r"usage: python -m nanodag.<module> job.json"):
        load_job(["--local_rank=1"])
