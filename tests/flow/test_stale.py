"""What stands on a result that is the run's no more: said, and built again only when asked for."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from nanodag.cli.run import choose_stale
from nanodag.cli.show import show_stages, show_status
from nanodag.config import resolve
from nanodag.errors import ConfigError
from nanodag.run.build_stage import build_stage, report_context
from nanodag.run.diff import compare
from nanodag.run.record import recorded_inputs, recorded_run, state_of
from nanodag.run.stale_stages import left_alone, stale_stages
from nanodag.store import Store
from nanodag.store.run_record import Made
from tests.fake_stages import STAGES
from tests.flow.tiny_runs import opened
from tests.run_records import run_record, stage_record


def entry(digest, *inputs, made_of=None, state="built", **fields):
    made = {"digest": digest, "inputs": dict.fromkeys(inputs, "old") if made_of is None else made_of, "config": "c"}
    about = {"inputs": {name: name for name in inputs}, "state": state, "config": "c", "key": "a" * 40, **fields}
    return stage_record(made=made if digest else None, **about)


@pytest.mark.parametrize(
    ("stages", "stale"),
    [
        (
            {"base": entry("old"), "sft": entry("new", "base"), "rl": entry("old", "sft"), "eval_rl": entry("x", "rl")},
            {"rl": "sft was built since", "eval_rl": "rl is stale"},
        ),
        ({"sft": entry("old"), "rl": entry("x", "sft")}, {}),  # made of equal bytes
        ({"sft": entry("", state="failed"), "rl": entry("old", "sft")}, {"rl": "sft is failed"}),
        ({"rl": entry("x", config="d")}, {"rl": "its config is another one now"}),
        ({"rl": entry("old"), "report": entry("x", "rl", made_of={})}, {"report": "rl was built since"}),
        ({"eval": entry("x", "model-newest-sft")}, {}),  # a night's, whose model is another run's
    ],
)
def test_what_was_made_of_another_result_or_config_is_stale_and_so_is_all_that_was_made_of_it(stages, stale):
    assert stale_stages(run_record("r", stages=stages)) == stale


def test_after_one_stage_alone_the_run_is_stale_and_its_report_says_so(completed):
    store = completed("r")
    with pytest.raises(ConfigError, match="Nothing of run r is stale"):
        recorded_run(store, "r", stale=True)
    run = opened("sft.seed=9", only=("sft",))
    build_stage(run, "sft", recorded_inputs(run, "sft", ["model"]))
    run.close()
    record = store.read_run("r")
    stale = {"eval_sft": "sft was built since", "report": "sft was built since"}
    assert stale_stages(record) == stale and state_of(record) == "stale"
    stages, recorded = recorded_run(store, "r", stale=True)
    assert stages == ("eval_sft", "report") and recorded.overrides == ("sft.seed=9",)
    run = opened("sft.seed=9", only=("report",))
    context = report_context(run, "report", recorded_inputs(run, "report", list(run.pipeline.stages["report"].inputs)))
    assert context["stale"] == {"eval_sft": "sft was built since"}
    new, old = context["stages"]["sft"], context["stages"]["eval_sft"]["lineage"]["model"]
    assert new["digest"] != old["digest"], "the old scores are not said to be of the new model"
    assert context["stages"]["eval_base"]["lineage"]["model"]["digest"] == context["stages"]["pretrain"]["digest"]


@pytest.fixture
def stale_record(project):
    """The record of a run whose sft was built again alone; nothing is in the store."""
    run = opened("sft.seed=9")
    said = {"attempt": "0001", "cost": {"seconds": 61.0}}
    for stage, config in run.pipeline.stages.items():
        of = {label: f"old {source}" for label, source in config.inputs.items()}
        digest = "new" if stage == "sft" else f"old {stage}"
        made = Made(**said, digest=digest, inputs=of, config=run.entry(stage).config)
        run.note(stage, state="built", key="ab" * 20, made=made)
    run.close()
    return run.store.read_run("r")


def pipeline_with(*overrides):
    return resolve(Path("pipeline.yaml"), "tiny", overrides).pipeline


def test_what_a_run_leaves_alone_is_what_nothing_else_asks_for(stale_record):
    assert list(left_alone(stale_record, pipeline_with("sft.seed=9"))) == ["eval_sft", "report"]
    with_another = left_alone(stale_record, pipeline_with("sft.seed=9", "eval_base.seed=2"))
    assert list(with_another) == ["eval_sft"], "the report follows eval_base"
    assert left_alone(stale_record, pipeline_with("sft.seed=3")) == {}, "sft is built, and both follow it"
    assert opened("sft.seed=9", keeps_stale=True).to_do == ["tokenizer", "pretrain", "eval_base", "sft"]
    assert opened("sft.seed=9").to_do == list(STAGES)


def test_a_stale_run_says_so_in_status_stages_and_diff(stale_record, project, capsys):
    show_status("", file="", all_runs=False)
    said = capsys.readouterr().out
    assert "preset tiny  stale" in said
    assert "stale: eval_sft (sft was built since), report (sft was built since)" in said
    assert "nanodag rerun r --stale" in said
    cells = [line.split() for line in said.splitlines() if line.startswith(tuple(STAGES))]
    states = {stage: state for stage, _, state, *_ in cells}
    assert [stage for stage in STAGES if states[stage] == "stale"] == ["eval_sft", "report"]
    show_stages("r", file="")
    said = capsys.readouterr().out
    assert "r  preset tiny  stale" in said and "eval_sft (eval) stale: sft was built since" in said
    rows = {row.name: row.before for row in compare(Store(project / "store"), stale_record, stale_record)}
    assert (rows["sft"], rows["eval_sft"]) == ("abababababab/0001", "abababababab/0001, stale")


@pytest.mark.parametrize(
    ("build", "answer", "choice", "words"),
    [
        (False, "y", "build", "Build them again? [y/N]"),
        (False, "", "keep", "nanodag rerun r --stale"),
        (False, None, "keep", "nanodag rerun r --stale"),  # there is no terminal to ask on
        (True, None, "build", "They are built again."),
    ],
)
def test_what_is_stale_is_built_again_when_asked_for(stale_record, monkeypatch, build, answer, choice, words):
    said = io.StringIO()
    monkeypatch.setattr("builtins.input", lambda: answer)
    how = {"build": build, "may_ask": answer is not None}
    console = Console(file=said, width=200)
    assert choose_stale(console, stale_record, pipeline_with("sft.seed=9"), **how) == choice
    assert "  eval_sft: sft was built since; it took 1 min 1 s when it was built" in said.getvalue()
    assert words in said.getvalue()
