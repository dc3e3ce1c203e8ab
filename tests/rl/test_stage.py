"""The whole RL stage, as a process with its trainer, sampler and rewards."""

import json
import os
import signal
import statistics
import time
from contextlib import suppress

import psutil
import pytest
import torch
from safetensors.torch import load_file

from nanodag.rl.control.model_facts import sync_folder
from nanodag.rl.rollouts.rollout import groups_of, read_rollouts
from nanodag.rl.rollouts.rollout_files import Shelf
from nanodag.worker.job import STOPPED_EXIT_CODE
from tests.fault.processes import is_running, wait_until
from tests.rl import stages
from tests.rl.stages import KILL, STOP

SIX = {"num_steps": 6, "checkpoint_every": 2, "eval_every": 3}


def six_steps(folder, **values):
    """With the same questions greedily every 3 steps, and drawn twice every 2."""
    drawn = {"num_samples": 2, "temperature": 1.0, "every": 2, "limit": 3}
    sets = [stages.benchmark(folder, "greedy", limit=3), stages.benchmark(folder, "drawn", **drawn)]
    return stages.make_job(folder, **{**SIX, **values}, benchmarks=sets)


def results_of(job):
    return json.loads((job.workspace / "result.json").read_text())


def log_of(job) -> str:
    return (job.workspace / "worker.log").read_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A stage of six steps that nothing disturbed."""
    job = six_steps(tmp_path_factory.mktemp("stage"))
    stages.run(job)
    return job


def test_a_stage_leaves_a_model_that_transformers_loads_and_learns_something(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(finished.output)
    assert AutoModelForCausalLM.from_pretrained(finished.output).dtype == torch.float32
    before, after = (load_file(folder / "model.safetensors") for folder in (finished.inputs["model"], finished.output))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    result = results_of(finished)
    assert result["metrics"]["eval_reward"] > result["metrics"]["eval_reward_before"] and result["cost"]["flops"] > 0


def test_every_step_is_on_policy_and_trainer_and_sampler_agree_on_logprobs(finished):
    steps = stages.metrics(finished)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for line in steps:
        assert line["staleness"] == line["staleness_largest"] == 0 and line["mismatch_largest"] < 1e-4
        assert line["ratio"] == 1.0 and line["clipped_share"] == 0.0
        assert line["seconds_generate"] > 0 and line["seconds_train"] > 0 and line["seconds_sync"] > 0
    assert [line["step"] for line in stages.metrics(finished, "eval") if "benchmark" not in line] == [0, 3, 6]


def test_each_named_set_is_scored_at_its_interval_and_its_scores_are_told(finished):
    told = results_of(finished)["metrics"]
    for name, steps in (("greedy", [0, 3, 6]), ("drawn", [0, 2, 4, 6])):
        lines = [line for line in stages.metrics(finished, "eval") if line.get("benchmark") == name]
        scores = {line["step"]: line[f"benchmark_{name}"] for line in lines}
        assert list(scores) == steps
        assert (told[f"benchmark_{name}_before"], told[f"benchmark_{name}"]) == (scores[0], scores[6])
    written = (finished.records / "benchmarks" / "step-00000004.drawn.jsonl").read_text()
    records = [json.loads(line) for line in written.splitlines()]
    assert [len(record["samples"]) for record in records] == [2] * 3
    assert scores[4] == pytest.approx(statistics.fmean(record["scores"]["avg@2"] for record in records))


def test_rollouts_of_a_step_are_whole_groups_of_the_policy_version_before_it(finished):
    rollouts = list(read_rollouts(finished.records / "rollouts" / "step-00000004.jsonl"))
    assert {len(group) for group in groups_of(rollouts).values()} == {4}
    assert {version for rollout in rollouts for version in rollout.versions} == {3}
    assert all(rollout.reward is not None and rollout.num_sampled <= 8 for rollout in rollouts)
    assert [line["outcome"] for line in stages.outcomes_of(finished)] == ["trained"] * 12  # each prompt of a pass once


def test_what_the_trainer_thought_of_each_token_lies_beside_its_rollout(finished):
    folders = {"records": finished.records, "metrics": finished.metrics_path, "model": finished.output}
    reads = Shelf(run="r", stage="rl", **folders).read(4)
    assert {read.fate for read in reads} == {"trained"} and len(reads) == 8
    for group in groups_of(read.rollout for read in reads).values():
        rewards = [rollout.reward for rollout in group]
        scale = statistics.stdev(rewards) + 1e-6  # grpo
        for read in (read for read in reads if read.rollout in group):
            wanted = (read.rollout.reward - statistics.fmean(rewards)) / scale
            assert read.advantages == pytest.approx([wanted] * read.rollout.num_sampled, abs=1e-4)
            assert read.differences == pytest.approx([0.0] * read.rollout.num_sampled, abs=1e-4)


def test_killed_at_random_moments_and_started_again_a_stage_ends_on_the_same_bytes(finished, tmp_path):
    job = six_steps(tmp_path)
    stages.slow_rewards(tmp_path)
    assert stages.disturb(job, (1, 2, KILL), (3, 5, KILL))
    stages.run(job, fresh=True)
    stages.same_in_the_end(job, finished)


def test_asked_to_stop_a_stage_leaves_a_checkpoint_and_goes_on_to_the_same_bytes(finished, tmp_path):
    job = six_steps(tmp_path, checkpoint_every=100)
    stages.slow_rewards(tmp_path)
    assert stages.disturb(job, (3, 3, STOP))  # as a launcher does it: everything in the group gets it
    stages.run(job)
    assert "going on after step" in log_of(job)
    stages.same_in_the_end(job, finished)


def test_one_step_ahead_every_token_but_the_first_steps_is_one_step_stale_and_the_run_learns(tmp_path):
    job = stages.make_job(tmp_path, **SIX, max_staleness=1, correction="tis")
    stages.run(job)
    steps = stages.metrics(job)
    assert [line["staleness"] for line in steps] == [0, 1, 1, 1, 1, 1] == [line["staleness_largest"] for line in steps]
    for step in range(1, 7):
        rollouts = read_rollouts(job.records / "rollouts" / f"step-{step:08d}.jsonl")
        assert {version for rollout in rollouts for version in rollout.versions} == {max(0, step - 2)}
    assert steps[0]["mismatch_largest"] < 1e-4 < steps[1]["mismatch_largest"]  # what the policy learned meanwhile
    result = results_of(job)["metrics"]
    assert result["eval_reward"] > result["eval_reward_before"]
    assert [line["outcome"] for line in stages.outcomes_of(job)] == ["trained"] * 12


def test_asked_to_stop_while_it_starts_a_stage_ends_at_once_with_all_that_it_started(tmp_path):
    job = stages.make_job(tmp_path)
    process = stages.start(job)
    try:
        wait_until(lambda: len(members(process.pid)) > 2, every_s=0.002)  # the trainer's rank, then the sampler
        os.kill(min(set(members(process.pid)) - {process.pid}), signal.SIGSTOP)  # the rank will never be ready
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == STOPPED_EXIT_CODE
        assert log_of(job).endswith("stopped as asked, before the first step\n")
        wait_until(lambda: not members(process.pid))
        assert not sync_folder(job.workspace, 1, num_copies=1).exists()
    finally:
        stages.end_group(process)


def test_when_the_trainer_is_killed_the_stage_ends_within_seconds_and_says_so(tmp_path):
    job = stages.make_job(tmp_path, num_steps=10_000, eval_prompts=0, checkpoint_every=10_000)
    process = stages.start(job, fresh=True)
    stages.wait_for_step(job, process, 1)
    os.kill(trainer := trainer_in(process.pid), signal.SIGKILL)
    assert process.wait(timeout=60) == 128 + signal.SIGKILL
    assert f"pid {trainer}) was ended by SIGKILL" in log_of(job).splitlines()[-1]
    wait_until(lambda: not members(process.pid))


def members(group: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            found += [pid] if os.getpgid(pid) == group and is_running(pid) else []
    return found


def trainer_in(group: int) -> int:
    """The trainer's rank, where processes of the stage are interpreters of their own."""
    command = "nanodag.rl.trainer.trainer"
    return next(pid for pid in members(group) if command in " ".join(psutil.Process(pid).cmdline()))


@pytest.mark.slow
def test_with_adapters_a_stage_leaves_a_model_whose_layers_matrices_alone_have_changed(tmp_path):
    job = stages.make_job(tmp_path, num_steps=3, lora_rank=2, lora_alpha=8, sync_check_every=1, **stages.on(2))
    stages.run(job)
    before, after = (load_file(folder / "model.safetensors") for folder in (job.inputs["model"], job.output))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed == {name for name in before if ".layers." in name and name.endswith("proj.weight")}
    assert all(line["mismatch_largest"] < 1e-4 for line in stages.metrics(job))


def test_a_reward_that_always_fails_ends_the_stage_with_its_reason(tmp_path):
    job, module = stages.make_job(tmp_path, eval_prompts=0), tmp_path / "tiny_reward.py"
    module.write_text("def vowels(prompt, completion):\n    raise RuntimeError('no such luck')\n")
    assert stages.start(job).wait(timeout=300) == 1
    last = log_of(job).splitlines()[-1]
    assert "reward failed for 8 of 8 samples of step 1" in last and "RuntimeError: no such luck" in last
    assert f"({module}, line 2, in vowels)" in last


@pytest.mark.slow
def test_a_mended_reward_judges_what_a_checkpoint_holds_of_its_failures(tmp_path):
    settings = {"max_staleness": 3, "max_failed_rewards": 1.0, "checkpoint_every": 100, "eval_prompts": 0}
    settings |= {"num_steps": 6, "correction": "tis", "filters": [], "advantage": "reinforce_pp"}
    job, module, judged = stages.make_job(tmp_path, **settings), tmp_path / "tiny_reward.py", tmp_path / "judged"
    mended = module.read_text()
    fails = f"    with open({str(judged)!r}, 'ab') as file:\n        file.write(b'.')\n"
    fails += "    if sum(map(ord, completion)) % 2:\n        raise RuntimeError('odd')\n"
    module.write_text(mended.replace("    return", fails + "    return"))
    process = stages.start(job, fresh=True)
    stages.wait_for_step(job, process, 1)
    os.kill(trainer := trainer_in(process.pid), signal.SIGSTOP)
    ahead = max(line["step"] for line in stages.metrics(job)) + 3
    wait_until(lambda: judged.stat().st_size >= 8 * ahead)  # so that batches wait
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.2)  # the stop is known before the trainer can take what waits
    os.kill(trainer, signal.SIGCONT)
    assert process.wait(timeout=300) == STOPPED_EXIT_CODE, log_of(job)[-4000:]
    batches = list(job.checkpoints.rglob("batch-*.json"))
    assert any("RuntimeError: odd" in path.read_text() for path in batches)  # or this test shows nothing
    module.write_text(mended)
    stages.run(job)
    resumed = min(int(path.stem.rpartition("-")[2]) for path in batches)
    failed = {line["step"]: line["reward_failed"] for line in stages.metrics(job)}
    assert len(failed) == 6 and all(count == 0.0 for step, count in failed.items() if step >= resumed), failed
