"""A whole RL stage killed again and again: nothing is lost, nothing is trained twice, and it ends on the same bytes."""

import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress

import pytest

from nanodag.errors import StageFailed
from nanodag.rl.control.checks import check_ranks
from nanodag.rl.rollouts.prompts import read_ledger
from nanodag.worker.job import STOPPED_EXIT_CODE
from tests.rl import resume
from tests.rl.stages import end_group, make_job, metrics, run, same_in_the_end, slow_rewards, start, wait_for_step

STEPS = 10
# Few answers begin with a letter: many groups have no spread, and are dropped.
REWARD = "def vowels(prompt, completion):\n    return float(completion[:1].isascii() and completion[:1].isalpha())\n"


def make_stage(folder, **values):
    """Groups are dropped, and prompts given back, in nearly every step."""
    folder.mkdir()
    options = {"num_steps": STEPS, "checkpoint_every": 3, "eval_every": 4, "over_sampling": 3, "correction": "tis"}
    job = make_job(folder, **(options | values))
    (folder / "tiny_reward.py").write_text(REWARD)
    return job


@pytest.mark.parametrize("values", [{"sync": "disk"}, {"sync": "ipc", "max_staleness": 1}])
def test_weights_that_no_update_changed_are_sent_once_and_a_killed_stage_ends_on_the_same_bytes(tmp_path, values):
    values = {"over_sampling": 0, "max_staleness": 0, "prompts_per_step": 1, "samples_per_prompt": 3} | values
    undisturbed = make_stage(tmp_path / "undisturbed", **values)
    run(undisturbed)
    log, version = (undisturbed.workspace / "worker.log").read_text(), metrics(undisturbed)[-1]["version"]
    sent = [int(number) for number in re.findall(r"weights (\d+): (?:loaded|shared)", log)]
    assert sent == sorted(set(sent)) and version < STEPS - 2, "as many steps change nothing"
    assert set(sent) <= {*range(version + 1)} and {*sent} >= {*range(version)}
    job = make_stage(tmp_path / "killed", **values)
    process = start(job)
    wait_for_step(job, process, 4)
    end_group(process)
    run(job)
    same_in_the_end(job, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "values",
    [
        {"max_staleness": 0},
        {"max_staleness": 0, "placement": "shared", "lends_states": True},
        {"max_staleness": 1},
        {"max_staleness": 3, "updates_per_step": 2},
        {"max_staleness": 1, "partial_rollout_tokens": 3},
        {"max_staleness": 2, "partial_rollout_tokens": 3, "partial_rollouts": "correct"},
    ],
)
def test_every_prompt_is_trained_once_or_dropped_once_and_the_bytes_are_the_same(tmp_path, values):
    undisturbed = make_stage(tmp_path / "undisturbed", **values)
    run(undisturbed)
    job = make_stage(tmp_path / "killed", **values)
    moment = random.Random(os.getpid())
    num_killed = 0
    for step in (0, moment.randint(1, 2), moment.randint(3, 6), moment.randint(7, 9)):
        process = start(job)
        if step:
            wait_for_step(job, process, step)
        time.sleep(moment.random() * (0.05 if step else 1.0))
        num_killed += end_group(process)
    assert num_killed >= 2, "the stage was over before it was killed"
    run(job)
    same_in_the_end(job, undisturbed)
    lines = read_ledger(job.records / "ledger.jsonl")
    found = Counter((line["epoch"], line["prompt_id"]) for line in lines)
    assert max(found.values()) == 1
    names = {prompt_id for _, prompt_id in found}
    assert {prompt_id for epoch, prompt_id in found if epoch == 0} == names and len(names) == 8
    assert {line["outcome"] for line in lines} == {"trained", "dropped"}
    assert all(line["reason"] == ("" if line["outcome"] == "trained" else "zero_spread") for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sync", ["disk", "distributed"])
def test_asked_to_stop_at_any_moment_a_stage_ends_soon_and_goes_on_to_the_same_bytes(tmp_path, sync):
    values = {"max_staleness": 1, "correction": "tis", "sync": sync, "num_steps": 30, "checkpoint_every": 3}
    jobs = []
    for name in ("undisturbed", "stopped"):
        (tmp_path / name).mkdir()
        jobs.append(make_job(tmp_path / name, **values))
        slow_rewards(tmp_path / name)
    undisturbed, job = jobs
    run(undisturbed)
    moment = random.Random(os.getpid())
    codes = []
    for _ in range(12):
        process = start(job)
        time.sleep(0.3 + moment.random() * 2)
        with suppress(ProcessLookupError):  # its group is not there yet, or not any more
            os.killpg(process.pid, signal.SIGTERM)
        codes.append(process.wait(timeout=60))
    assert STOPPED_EXIT_CODE in codes and set(codes) <= {STOPPED_EXIT_CODE, -signal.SIGTERM, 0}, codes
    run(job)
    same_in_the_end(job, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_order_of_arrival_a_stage_that_is_killed_and_stopped_trains_no_prompt_twice_and_forgets_none(tmp_path):
    sampler = {"context": 64, "max_batch": 4, "deterministic": False}
    values = {"order": "arrival", "over_sampling": 0, "max_staleness": 2, "sync_mode": "in_place", "sampler": sampler}
    job = make_stage(tmp_path / "killed", **values)
    moment = random.Random(os.getpid())
    num_ended = 0
    for step, how in ((1, signal.SIGTERM), (4, signal.SIGKILL), (6, signal.SIGTERM), (8, signal.SIGKILL)):
        process = start(job)
        wait_for_step(job, process, step)
        time.sleep(moment.random() * 0.05)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        num_ended += process.wait(timeout=60) in (STOPPED_EXIT_CODE, -how)
        end_group(process)
    assert num_ended >= 2, "the stage was over before it was ended"
    run(job)
    lines = read_ledger(job.records / "ledger.jsonl")
    found = Counter((line["epoch"], line["prompt_id"]) for line in lines)
    assert max(found.values()) == 1 and sum(line["outcome"] == "trained" for line in lines) == STEPS * 2
    for epoch in range(max(line["epoch"] for line in lines)):  # the last pass is not over
        assert sum(number for (of, _), number in found.items() if of == epoch) == 8


def test_a_rank_that_made_other_updates_than_the_controller_counts_is_refused_by_name(tmp_path):
    check_ranks(tmp_path, [{"num_updates": 4}, {"num_updates": 4}], 4)
    with pytest.raises(StageFailed, match=r"made \[4, 0\] updates, the controller counts 4"):
        check_ranks(tmp_path, [{"num_updates": 4}, {"num_updates": 0}], 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_ranks_with_critic_adapters_and_a_refreshed_reference_end_on_the_same_bytes(tmp_path):
    resume.killed_and_stopped(tmp_path, tuple(resume.PARTS), zero_stage=3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_rank_goes_on_where_two_were_killed_with_the_same_ledger_and_losses(tmp_path):
    assert resume.moved(tmp_path, 2, 1) < 1e-5
