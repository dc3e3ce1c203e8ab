"""Whole RL stages whose samplers get new weights: SGLang on a CPU, verified after each step; and while rollouts are
under way, whichever sampler it is. What a sampler does then: its contract tests."""

import pytest

from nanodag.rl.rollouts.rollout import read_lines, read_rollouts
from tests.guest_pythons import sglang_python
from tests.rl.stages import make_job, metrics, on, run, start

START_S = 1500  # SGLang alone takes most of a minute, on an idle machine

IN_FLIGHT = {
    "max_staleness": 2,
    "correction": "tis",
    "num_steps": 5,
    "prompts_per_step": 4,
    "max_new_tokens": 100,
    "learning_rate": 1e-3,
    "micro_batch_tokens": 2048,
    "eval_every": 2,
    # four samples at once, so that a rollout batch takes longer than a step
    "sampler": {"context": 128, "max_batch": 4, "deterministic": False},
}


def check_that_responses_went_on(job):
    steps = metrics(job)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    num_versions = []
    for number in range(1, 6):
        for rollout in read_rollouts(job.records / "rollouts" / f"step-{number:08d}.jsonl"):
            (span,) = rollout.spans[1:]
            assert len(span.token_ids) == 100 or rollout.finish_reason == "stop"
            assert list(span.versions) == sorted(span.versions)
            assert number - 3 <= min(span.versions) and max(span.versions) < number
            num_versions.append(len(set(span.versions)))
    assert len(num_versions) >= 5 * 4 * 3 and max(num_versions) > 1
    ledger = list(read_lines(job.records / "ledger.jsonl"))
    assert len(ledger) == len({(entry["prompt_id"], entry["epoch"]) for entry in ledger}) >= 5 * 4


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "sync"), [("retract", "disk"), ("retract", "distributed"), ("in_place", "disk")])
def test_responses_go_on_with_weights_that_come_meanwhile_and_none_is_lost_or_too_old(tmp_path, mode, sync):
    job = make_job(tmp_path, sync_mode=mode, sync=sync, **IN_FLIGHT)
    run(job)
    check_that_responses_went_on(job)


@pytest.fixture
def sglang():
    sglang_python()


def finished(job):
    code = start(job).wait(timeout=2 * START_S - 60)
    log = (job.workspace / "worker.log").read_text()
    assert code == 0, log[-6000:]
    return log


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize(
    "sync",
    [{}, {"sync": "distributed", "sync_bucket_bytes": 4000}, {"placement": "shared", "lends_states": True}],
    ids=["disk", "distributed", "in turns"],
)
def test_two_ranks_train_two_steps_on_what_sglang_samples_with_their_weights(tmp_path, sglang, sync):
    job = make_job(
        tmp_path,
        sampler={"engine": "sglang", "context": 64, "max_batch": 16, "start_timeout_s": START_S},
        sync_check_every=1,
        eval_every=2,
        **on(2),
        **sync,
    )
    log = finished(job)
    steps = metrics(job)
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["mismatch_largest"] < 1e-3 and line["trained_tokens"] > 0
    # The weights that the stage begins with, and those after each step; fused as SGLang holds them.
    how = "broadcast in 9 buckets" if "sync" in sync else "loaded"
    for version in (0, 1, 2):
        assert any(f"weights {version}: {how}" in line and "19 tensors verified" in line for line in log.splitlines())
    assert len(list(read_lines(job.records / "ledger.jsonl"))) == 4


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_sglang_goes_on_with_weights_that_come_in_the_midst_of_responses(tmp_path, sglang, mode):
    sampler = {"engine": "sglang", "context": 128, "max_batch": 4, "start_timeout_s": START_S}
    job = make_job(tmp_path, sync_mode=mode, **{**IN_FLIGHT, "sampler": sampler})
    finished(job)
    check_that_responses_went_on(job)
