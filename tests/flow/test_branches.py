"""The order in which a flow starts the stages of its branches."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from uuid import uuid4

from prefect.futures import PrefectConcurrentFuture

import tasks.stage_task
from tasks.stage_task import start_all


class SilentFuture(PrefectConcurrentFuture):
    """A future of a stage whose task run the API does not know yet, or never gets to know the end of."""

    @property
    def state(self):
        raise AssertionError("what the API says of a stage comes late, and may not come at all")


def test_what_follows_a_branch_starts_once_that_has_ended_whatever_the_api_says(monkeypatch):
    inputs = {"long": (), "short": (), "after_short": ("short",), "after_both": ("long", "after_short")}
    stages = {stage: SimpleNamespace(inputs=dict(enumerate(sources))) for stage, sources in inputs.items()}
    run = SimpleNamespace(to_do=[*inputs], pipeline=SimpleNamespace(stages=stages))
    ending_after = {"short": {"short": 0.1}, "after_short": {"after_short": 0.1, "long": 0.3}}  # seconds
    ends, started = {stage: Future() for stage in inputs}, []

    def begin(run, stage, futures, *, force):
        started.append((stage, {other for other, end in ends.items() if end.done()}))
        for ending, after_s in ending_after.get(stage, {}).items():
            threading.Timer(after_s, ends[ending].set_result, [None]).start()
        futures[stage] = SilentFuture(uuid4(), ends[stage])
        return futures[stage]

    monkeypatch.setattr(tasks.stage_task, "start", begin)
    start_all(run, {})
    assert [stage for stage, _ in started] == ["long", "short", "after_short", "after_both"]
    assert started[2][1] == {"short"} and started[3][1] == {"short", "after_short", "long"}


def test_no_more_stages_train_at_a_time_than_asked_and_an_evaluation_waits_for_its_model_alone(monkeypatch):
    inputs = {"first": (), "eval_first": ("first",), "second": (), "third": ()}
    kind = {stage: "eval" if stage.startswith("eval") else "sft" for stage in inputs}
    stages = {stage: SimpleNamespace(inputs=dict(enumerate(of)), kind=kind[stage]) for stage, of in inputs.items()}
    run = SimpleNamespace(to_do=[*inputs], pipeline=SimpleNamespace(stages=stages))
    ends, started = {stage: Future() for stage in inputs}, []

    def begin(run, stage, futures, *, force):
        started.append((stage, {other for other, _ in started if not ends[other].done()}))
        if kind[stage] == "sft":
            threading.Timer(0.1, ends[stage].set_result, [None]).start()
        futures[stage] = SilentFuture(uuid4(), ends[stage])
        return futures[stage]

    monkeypatch.setattr(tasks.stage_task, "start", begin)
    start_all(run, {}, at_once=1)
    evaluation = {"eval_first"}
    assert started == [("first", set()), ("eval_first", set()), ("second", evaluation), ("third", evaluation)]
