"""A stage and what follows it, again, on what the run's record says comes before."""

import pytest

from nanodag.cli.run import run_pipeline
from nanodag.errors import ConfigError
from nanodag.host.machine import detect
from nanodag.run.build_stage import build_stage
from nanodag.run.derived_runs import open_composed
from nanodag.run.record import recorded_run
from nanodag.store import Store
from nanodag.store.run_record import NightRecord, SweepRecord
from tests.flow.tiny_runs import opened


def test_overrides_of_what_comes_before_are_refused(project):
    store = opened("sft.seed=1").store
    stages, found = recorded_run(store, "r", begin_at="sft", overrides=["sft.seed=2", "eval_sft.seed=3"])
    assert (stages, found.overrides) == (("sft", "eval_sft", "report"), ("sft.seed=2", "eval_sft.seed=3"))
    with pytest.raises(ConfigError, match=r"Override 'pretrain.seed=1' is not of stage sft or eval_sft or report"):
        recorded_run(store, "r", begin_at="sft", overrides=["pretrain.seed=1"])
    with pytest.raises(ConfigError, match="Run r has no stage 'sfd'"):
        recorded_run(store, "r", begin_at="sfd")


def test_a_run_whose_failed_stage_was_run_again_is_as_far_as_its_stages_are(project):
    order = opened().order
    for to_do, states, expected in (
        (order, ["built"] * 4 + ["failed"], "failed"),
        (order[4:5], ["built"], "unfinished"),
        (order[5:], ["running"], "stopped"),
        (order[5:], ["built"] * len(order[5:]), "completed"),
    ):
        run = opened(only=to_do)
        for stage, state in zip(to_do, states, strict=False):
            run.note(stage, state=state)
        run.close()
        assert run.store.read_run("r").state == expected


@pytest.mark.parametrize("about", [SweepRecord(stage="sft", points=()), NightRecord(by_schedule=False, due=0.0)])
def test_a_sweep_and_a_night_are_not_resumed_as_a_run(project, about):
    pipeline, store = opened().pipeline, Store(project / "store")
    how = {"file": project / "pipeline.yaml", "to_do": ["tokenizer"], "flow_run": "", "machine": detect()}
    run = open_composed("s", pipeline, store, about=about, **how)
    assert run.composed == ("sweep" if isinstance(about, SweepRecord) else "nightly")
    before = store.read_run("s")
    for go_on in (
        lambda: opened(name="s"),
        lambda: recorded_run(store, "s", stage="tokenizer"),
        lambda: run_pipeline([], preset="auto", file="", name="s", detach=True),
    ):
        with pytest.raises(ConfigError, match=r"s is a (sweep|night)"):
            go_on()
    assert store.read_run("s") == before


def test_what_a_flow_run_has_forced_it_does_not_force_again_when_it_is_retried(project):
    build_stage(opened(), "tokenizer", {})
    for _ in range(2):  # the same flow run twice, as Retry in the UI has it
        run = opened(only=("tokenizer",), flow_run="one flow run")
        build_stage(run, "tokenizer", {}, force=True)
        run.close()
    assert run.store.read_run("r").stages["tokenizer"].made.attempt == "0002"
