"""The whole RL stage with SGLang as its sampler, on a CPU: two ZeRO-3 ranks, a verified sync after each step."""

import pytest

from nanodag.rl.rollouts.rollout import read_lines
from tests.guest_pythons import sglang_python
from tests.rl.in_flight import SETTINGS, check_that_responses_went_on
from tests.rl.stages import make_job, metrics, start

START_S = 1500  # SGLang alone takes most of a minute, on an idle machine


@pytest.fixture(autouse=True)
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
def test_two_ranks_train_two_steps_on_what_sglang_samples_with_their_weights(tmp_path, sync):
    job = make_job(
        tmp_path,
        sampler={"engine": "sglang", "context": 64, "max_batch": 16, "start_timeout_s": START_S},
        resources={"num_ranks": 2, "threads": 1, "device": "cpu"},
        sync_check_every=1,
        eval_every=2,
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
@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_sglang_goes_on_with_weights_that_come_in_the_midst_of_responses(tmp_path, mode):
    sampler = {"engine": "sglang", "context": 128, "max_batch": 4, "start_timeout_s": START_S}
    job = make_job(tmp_path, sync_mode=mode, **{**SETTINGS, "sampler": sampler})
    finished(job)
    check_that_responses_went_on(job)
