"""Whole RL stages killed and stopped again and again: nothing is lost, nothing is trained twice, and they end on the
same bytes. One matrix of stages and windows."""

import itertools
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from nanodag.errors import StageFailed
from nanodag.rl.control.checks import check_ranks
from nanodag.worker.job import STOPPED_EXIT_CODE, write_job
from tests.guest_pythons import verifiers_python
from tests.rewards.test_reward_sums import save_classifier
from tests.rl import stages
from tests.rl.programs import SPARSE, played_job, trained
from tests.rl.stages import KILL, STOP, on

AHEAD = {"max_staleness": 1, "correction": "tis"}
TEN = {"num_steps": 10, "checkpoint_every": 3, "eval_every": 4, "correction": "tis"}
DROPS = {**TEN, "over_sampling": 3}  # groups are dropped, and prompts given back, in nearly every step
FEW = {**TEN, "prompts_per_step": 1, "samples_per_prompt": 3}  # in many steps no group is left
SIX = {"num_steps": 6, "checkpoint_every": 2, "eval_every": 3}
PPO = {"advantage": "gae", "filters": [], "critic": {"learning_rate": 1e-2, "warmup_steps": 2, "epochs": 2}}
BEST = "best:eval_reward"
JUDGE = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 128}
TURNS_TAKEN = {"placement": "shared", "lends_states": True}
PARTS = {
    "critic": {"advantage": "gae"},
    "adapters": {"lora_rank": 2, "lora_alpha": 8},
    "reference": {"kl_coefficient": 0.1, "reference_every": 2},
}
COMBINED = [parts for size in range(4) for parts in itertools.combinations(PARTS, size)]
MOVED = {**SIX, **PARTS["critic"], **PARTS["reference"], "zero_stage": 3, "updates_per_step": 2}


def plain(folder, *, reward="", **values):
    """reward: a module instead of ours."""
    job = stages.make_job(folder, **values)
    if reward:
        (folder / "tiny_reward.py").write_text(reward)
    return job


def sparse(folder, **values):
    return plain(folder, reward=SPARSE, **values)


def judged(folder, **values):
    """Scored by a reward model of our own layers, which takes together what waits: each run has other batches."""
    judge = folder.parent / "judge"
    if not judge.exists():
        save_classifier(judge, **JUDGE)
    return stages.make_job(folder, reward={f"model:{judge}": 1.0, "tiny_reward:vowels": 0.0}, **values)


def played(player):
    return lambda folder, **values: played_job(folder, player, **values)


def sends_changed_weights_once(job) -> None:
    log, version = (job.workspace / "worker.log").read_text(), stages.metrics(job)[-1]["version"]
    sent = [int(number) for number in re.findall(r"weights (\d+): (?:loaded|shared)", log)]
    assert sent == sorted(set(sent)) and version < 8, "as many steps change nothing"
    assert {*range(version)} <= set(sent) <= {*range(version + 1)}


def drops_for_want_of_spread(job) -> None:
    lines = stages.outcomes_of(job)
    names = {line["prompt_id"] for line in lines}
    assert {line["prompt_id"] for line in lines if line["epoch"] == 0} == names and len(names) == 8
    assert {(line["outcome"], line["reason"]) for line in lines} == {("trained", ""), ("dropped", "zero_spread")}


def has_the_sequences_of_an_agent(job) -> None:
    rollouts = [one for step in range(1, 5) for one in trained(job, step)]
    assert {one.branch for one in rollouts} == {0, 1, 2, 3} and {one.role for one in rollouts} == {"agent"}
    for line in stages.metrics(job):
        assert job.config.rollout.max_staleness or line["mismatch_largest"] < 1e-4
        assert 3.0 < line["sequences"] <= 4.0  # a sample that failed has one


TWICE = ((1, 2, KILL), (3, 5, KILL))
EARLY = ((0, 1, KILL), (2, 3, KILL))
OFTEN = ((0, 0, KILL), (1, 2, KILL), (3, 6, KILL), (7, 9, KILL))
ONCE = ((4, 4, KILL),)
THEN_STOPPED = ((2, 3, KILL), (4, 4, STOP))


def drops(**values):
    return sparse, {**DROPS, **values}, OFTEN, drops_for_want_of_spread


def two_ranks(number, parts):
    values = {**SIX, **on(2), "updates_per_step": 2, "zero_stage": 1 + (2 - number) % 3}
    for part in parts:
        values |= PARTS[part]
    return plain, values, THEN_STOPPED, None


# name: how the stage is made, its values, the windows, and what must hold of it undisturbed
FAST = {
    "no update, disk": (sparse, {**FEW, "sync": "disk"}, ONCE, sends_changed_weights_once),
    "no update, ipc, ahead": (sparse, {**FEW, "sync": "ipc", "max_staleness": 1}, ONCE, sends_changed_weights_once),
}
SLOW = {
    "ahead": (plain, {**SIX, **AHEAD}, ((1, 2, KILL), (3, 5, STOP)), None),
    "drops": drops(),
    "drops, in turns": drops(**TURNS_TAKEN),
    "drops, ahead": drops(max_staleness=1),
    "drops, far ahead": drops(max_staleness=3, updates_per_step=2),
    "drops, partial": drops(max_staleness=1, partial_rollout_tokens=3),
    "drops, partial, corrected": drops(max_staleness=2, partial_rollout_tokens=3, partial_rollouts="correct"),
    "critic": (plain, {**PPO, "num_steps": 10, "checkpoint_every": 2, "eval_every": 10}, TWICE, None),
    "adapters alone": (plain, {**SIX, **PARTS["adapters"], "lora_save": "adapter", "keep": BEST}, TWICE, None),
    "reward model": (judged, SIX, TWICE, None),
    "reward model, ahead": (judged, {**SIX, **AHEAD}, TWICE, None),
    "adapters to samplers": (plain, {**SIX, **PARTS["adapters"], "lora_sync": "adapter"}, TWICE, None),
    "adapters to samplers, ipc, ahead": (
        plain,
        {**SIX, **AHEAD, **PARTS["adapters"], "lora_sync": "adapter", "sync": "ipc"},
        ((1, 2, KILL), (3, 5, STOP)),
        None,
    ),
    "agent": (played("agent"), {"over_sampling": 3}, EARLY, has_the_sequences_of_an_agent),
    "agent, ahead": (played("agent"), {**AHEAD, "over_sampling": 3}, EARLY, has_the_sequences_of_an_agent),
    "turns": (played("turns"), {"over_sampling": 3}, EARLY, None),
    "turns, ahead": (played("turns"), {**AHEAD, "over_sampling": 3}, EARLY, None),
}
for number, parts in enumerate(COMBINED[::-1]):
    SLOW[f"two ranks, {' + '.join(parts) or 'policy alone'}"] = two_ranks(number, parts)
STAGES = FAST | SLOW


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_killed_stage_ends_on_the_same_bytes_and_has_each_prompt_of_a_pass_once(tmp_path, name):
    made, values, windows, check = STAGES[name]
    undisturbed, job = (made(tmp_path / name, **values) for name in ("undisturbed", "disturbed"))
    stages.run(undisturbed)
    stages.slow_rewards(tmp_path / "disturbed")
    assert stages.disturb(job, *windows) >= (len(windows) + 1) // 2, "the stage was over before it was ended"
    stages.run(job)
    stages.same_in_the_end(job, undisturbed)
    stages.outcomes_of(job)
    if check is not None:
        check(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sync", ["disk", "distributed"])
def test_asked_to_stop_at_any_moment_a_stage_ends_soon_and_goes_on_to_the_same_bytes(tmp_path, sync):
    values = {**AHEAD, "sync": sync, "num_steps": 30, "checkpoint_every": 3}
    undisturbed, job = (plain(tmp_path / name, **values) for name in ("undisturbed", "stopped"))
    stages.run(undisturbed)
    stages.slow_rewards(tmp_path / "stopped")
    moment, codes = random.Random(os.getpid()), []
    for _ in range(12):
        process = stages.start(job)
        time.sleep(0.3 + moment.random() * 2)
        with suppress(ProcessLookupError):  # its group is not there yet, or not any more
            os.killpg(process.pid, STOP)
        codes.append(process.wait(timeout=60))
    assert STOPPED_EXIT_CODE in codes and set(codes) <= {STOPPED_EXIT_CODE, -STOP, 0}, codes
    stages.run(job)
    stages.same_in_the_end(job, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_order_of_arrival_a_stage_that_is_killed_and_stopped_trains_no_prompt_twice_and_forgets_none(tmp_path):
    sampler = {"context": 64, "max_batch": 4, "deterministic": False}
    values = {"order": "arrival", "max_staleness": 2, "sync_mode": "in_place", "sampler": sampler}
    job = sparse(tmp_path / "killed", **TEN, **values)
    stages.slow_rewards(tmp_path / "killed")
    assert stages.disturb(job, (1, 1, STOP), (4, 4, KILL), (6, 6, STOP), (8, 8, KILL)) >= 2
    stages.run(job)
    lines = stages.outcomes_of(job)
    assert sum(line["outcome"] == "trained" for line in lines) == 10 * 2
    passes = Counter(line["epoch"] for line in lines)
    assert all(passes[epoch] == 8 for epoch in range(max(passes)))  # the last pass is not over


# What stands in the command lines of the processes that are killed in each of three starts; "" is the stage's own.
# It survives all but the last ones. An episode may be over too soon to be met.
GAME, WORLD, TRAINER = "verifiers_server.py", "children.fork_server", "rl.trainer.trainer"
VICTIMS = {
    "game": ((GAME, "sampler", ""), (GAME, "sampler", TRAINER), (GAME, "sampler", "")),
    "world": ((WORLD, "sampler", ""), ("episode", "sampler", TRAINER), ("episode", WORLD, "")),
}
LONG = {**AHEAD, "over_sampling": 3, "num_steps": 12, "checkpoint_every": 3}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("player", "values"),
    [("game", {"max_staleness": 0}), ("game", {}), ("world", {"max_staleness": 0}), ("world", on(2))],
)
def test_whoever_is_killed_at_random_moments_it_ends_on_the_same_bytes(tmp_path, player, values):
    if player == "game":
        verifiers_python()
    undisturbed, job = (played_job(tmp_path / name, player, **LONG | values) for name in ("undisturbed", "killed"))
    stages.run(undisturbed, fresh=True)
    moment, num_killed = random.Random(os.getpid()), Counter()
    for number, victims in enumerate(VICTIMS[player]):
        process = stages.start(job, fresh=True)
        for place, victim in enumerate(victims):
            stages.wait_for_step(job, process, 3 * number + place + (place > 0 or number > 0))
            time.sleep(moment.random() * 0.3)
            num_killed[victim] += end_one(process.pid, victim)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        stages.end_group(process)
    wanted = {victim for victims in VICTIMS[player] for victim in victims} - {"episode"}
    assert all(num_killed[victim] for victim in wanted), num_killed
    stages.run(job)
    stages.same_in_the_end(job, undisturbed)
    stages.outcomes_of(job)
    if player == "game":
        reasons = Counter(one.finish_reason for step in range(1, 13) for one in trained(job, step))
        assert reasons["error"] == 0, "a sample whose process is lost is played again"
    assert stages.left_of(tmp_path, VICTIMS[player][0][0]) == []


def end_one(pid: int, victim: str) -> int:
    """Kill a process of a stage: the one with these words in its command line, an episode, or for none the stage's own;
    returns how many were killed."""
    found = []
    with suppress(psutil.Error):  # a process that ends while it is looked at
        if victim == "episode":
            found = [child for server in _with(pid, WORLD) for child in server.children()]
        else:
            found = _with(pid, victim) if victim else [psutil.Process(pid)]
    for process in found[:1]:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    return len(found[:1])


def _with(pid: int, words: str) -> list[psutil.Process]:
    """The outermost processes with these words in their command lines: an episode has its server's."""
    below = psutil.Process(pid).children(recursive=True)
    found = [one for one in below if words in " ".join(one.cmdline()) and "--multiprocessing" not in one.cmdline()]
    return [one for one in found if one.ppid() not in {other.pid for other in found}]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_killed_stage_goes_on_with_another_number_of_ranks_with_the_same_ledger_and_losses(tmp_path, before, after):
    undisturbed, job = (plain(tmp_path / name, **MOVED, **on(before)) for name in ("undisturbed", "moved"))
    stages.run(undisturbed)
    stages.slow_rewards(tmp_path / "moved")
    assert stages.disturb(job, (3, 3, KILL)) == 1
    resources = job.config.resources.model_copy(update={"num_ranks": after})
    job = replace(job, config=job.config.model_copy(update={"resources": resources}))
    write_job(job)
    stages.run(job)
    assert stages.outcomes_of(job) == stages.outcomes_of(undisturbed)
    for line, other in zip(stages.metrics(job), stages.metrics(undisturbed), strict=True):
        for name in ("loss", "value_loss", "kl"):
            assert line[name] == pytest.approx(other[name], abs=1e-5, rel=0)


def test_a_rank_that_made_other_updates_than_the_controller_counts_is_refused_by_name(tmp_path):
    check_ranks(tmp_path, [{"num_updates": 4}, {"num_updates": 4}], 4)
    with pytest.raises(StageFailed, match=r"made \[4, 0\] updates, the controller counts 4"):
        check_ranks(tmp_path, [{"num_updates": 4}, {"num_updates": 0}], 4)
