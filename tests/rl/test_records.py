"""What a stage leaves behind is there once, also where a process was killed between a checkpoint and its evaluation."""

import json
import resource
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_sections import HELD_OUT
from nanodag.rl.control.step_records import Records
from nanodag.rl.rollouts.batch import RolloutBatch
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import Span
from nanodag.store.atomic import temporary_name
from nanodag.worker.job import Job, MetricsLog, step_lines
from tests.rl.rollouts import of_versions, rollout

VALUES = {"sampled_tokens": 4, "seconds_generate": 0.5}


def job_in(folder) -> Job:
    config = RLStage.of(kind="rl", data=["file:x"])
    return Job(name="rl", run="test", config=config, inputs={}, workspace=folder)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def leave(records: Records, steps: range) -> None:
    for step in steps:
        records.step(step, {"step": 1.0, "generate": 9.0}, VALUES)
        records.timeline(step, [("train", 1.0, 2.0)])
        records.evaluation(step, [of_versions([0])], 0.1)
    records.close()


def test_an_evaluation_that_the_checkpoint_does_not_have_is_done_again_and_what_was_half_written_is_left_out(tmp_path):
    job = job_in(tmp_path)
    timeline = job.records / "timeline.jsonl"
    leave(Records(job, resume_step=-1), range(1, 4))
    for path in (job.metrics_path, timeline):
        with path.open("a") as stream:
            stream.write('{"event": "st')
    half_written = job.records / "benchmarks" / temporary_name()
    half_written.touch()
    records = Records(job, resume_step=2, evaluated={HELD_OUT: {1: 1.0}})
    assert not half_written.exists()
    found = lines(job.metrics_path)
    # those that the step trained on, not those generated beside it
    assert (found[0]["seconds_generate"], found[0]["seconds_step"]) == (0.5, 1.0)
    assert [(line["event"], line["step"]) for line in found] == [("step", 1), ("eval", 1), ("step", 2)]
    assert [line["step"] for line in lines(timeline)] == [1, 2]
    leave(records, range(3, 4))
    assert [line["step"] for line in lines(timeline)] == [1, 2, 3]


def test_an_evaluation_has_the_interval_of_its_mean_over_prompts(tmp_path):
    job = job_in(tmp_path)
    records = Records(job, resume_step=-1)
    of = {"a": (0.4, 0.5), "b": (0.5, 0.5), "c": (0.5, 0.6)}  # means 0.45, 0.5, 0.55: the error is 0.02887, t 4.3027
    pairs = [(name, reward) for name, rewards in of.items() for reward in rewards]
    given = [replace(of_versions([0]), group_id=name, reward=reward) for name, reward in pairs]
    records.evaluation(1, [*given, replace(given[0], reward=None)], 0.1)
    records.evaluation(2, given[:2], 0.1)
    records.close()
    both, none = lines(job.metrics_path)
    assert (both["low"], both["high"]) == pytest.approx((0.3758, 0.6242), abs=1e-4) and "low" not in none


@contextmanager
def files_end_at(num_bytes: int):
    """What is longer cannot be written: a process that is cut short in the middle of writing it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_cut_short_while_it_goes_back_to_a_checkpoint_a_process_has_removed_no_line(tmp_path):
    job = job_in(tmp_path)
    leave(Records(job, resume_step=-1), range(1, 4))
    ledger = step_lines(job.records / "ledger.jsonl", resume_step=0)
    for step in range(1, 4):
        ledger.write(f'{{"step": {step}}}\n')
    ledger.close()
    paths = [job.metrics_path, job.records / "timeline.jsonl", job.records / "ledger.jsonl"]
    before = [path.read_bytes() for path in paths]
    with files_end_at(20):
        done = {HELD_OUT: dict.fromkeys((1, 2, 3), 1.0)}
        for begin, what in ((partial(Records, evaluated=done), job), (MetricsLog, job), (step_lines, paths[2])):
            with pytest.raises(OSError, match="File too large"):
                begin(what, resume_step=2)
    assert [path.read_bytes() for path in paths] == before


def test_the_right_answers_of_a_steps_prompts_are_kept_and_go_with_it(tmp_path):
    job = job_in(tmp_path)
    records = Records(job, resume_step=-1)
    asked = [{"role": "user", "content": "sort"}]
    prompts = [Prompt(epoch=0, record={"prompt_id": "p", "answer": "1 2", "messages": asked}, token_ids=(1,))]
    for step in (1, 2):
        records.rollouts(step, RolloutBatch(kept=[(prompts[0], [of_versions([0])])]))
        records.evaluation(step, [of_versions([0])], 0.1, prompts, too_long=3)
    records.close()
    assert [line["eval_too_long"] for line in lines(job.metrics_path) if line["event"] == "eval"] == [3, 3]
    folder = job.records / "rollouts"
    for name in ("step-00000001", "eval-00000001"):
        assert lines(folder / f"{name}.answers.jsonl") == [{"prompt_id": "p", "answer": "1 2", "messages": asked}]
    Records(job, resume_step=1).close()
    assert {path.name.split(".")[0][-1] for path in folder.iterdir()} == {"1"}


def shown(folder, count: int, rollouts, *names: str) -> list[tuple]:
    """These fields of the responses that are shown of the rollouts."""
    job = job_in(folder)
    records = Records(replace(job, config=job.config.model_copy(update={"log_responses": count})), resume_step=-1)
    records.responses(4, rollouts, lambda ids: "".join(map(str, ids)))
    records.close()
    (line,) = lines(job.metrics_path)
    assert (line["event"], line["step"]) == ("sample", 4)
    return [tuple(row[name] for name in names) for row in line["responses"]]


def test_responses_are_shown_group_by_group_in_turn(tmp_path):
    rollouts = [rollout(group, sample, [1, 2], [3, sample], reward=0.5) for group in ("a", "b") for sample in (0, 1)]
    found = shown(tmp_path, 3, rollouts, "prompt_id", "prompt", "response", "reward")
    assert found == [("a", "12", "30", 0.5), ("b", "12", "30", 0.5), ("a", "12", "31", 0.5)]


def test_a_response_of_turns_names_its_speakers_and_its_branches_follow_it(tmp_path):
    main, other = (rollout("a", sample, [1], [2], reward=1.0) for sample in (0, 1))
    main = replace(main, spans=(*main.spans, Span(kind="tool", token_ids=(3,)), main.spans[-1]))
    judged = replace(rollout("a", 0, [4], [5], reward=1.0), branch=1, role="judge")
    found = shown(tmp_path, 1, [main, judged, other], "response", "turns", "branch", "role")
    assert found == [("[model]\n2\n\n[tool]\n3\n\n[model]\n2", 2, 0, ""), ("5", 1, 1, "judge")]
