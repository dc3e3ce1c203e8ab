"""Either side of a stage alone: `only: rollouts`, and rollouts of a file."""

import pytest
from safetensors.torch import load_file

from nanodag.rl.rollouts.rollout import read_rollouts
from nanodag.rl.rollouts.saved import saved_files
from tests.rl.models import save_tiny_model
from tests.rl.operators import Operator
from tests.rl.stages import VOCABULARY, digest, make_job, metrics, run


def steps_of(job):
    return saved_files(f"file:{job.records}/rollouts").files


def test_rollouts_alone_are_those_of_the_first_weights_and_training_alone_ends_on_the_stages_bytes(plain, tmp_path):
    alone = make_job(tmp_path / "rollouts", only="rollouts")
    training = make_job(tmp_path / "training", source=f"file:{plain.records}/rollouts", eval_prompts=0)
    for job in (alone, training):
        run(job)
    jobs = (alone, training, plain)
    sampled, replayed, whole = ([list(read_rollouts(path)) for path in steps_of(job)] for job in jobs)
    assert sampled[0] == whole[0] and sampled[1] != whole[1] and replayed == whole
    assert digest(training.output) == digest(plain.output)
    assert not list(training.workspace.glob("sampler-*.log")) and not metrics(training, "eval")
    assert metrics(training)[1]["gradient_norm"] == metrics(plain)[1]["gradient_norm"]
    left, begun = (load_file(folder / "model.safetensors") for folder in (alone.output, alone.inputs["model"]))
    assert left.keys() == begun.keys() and all(left[name].equal(begun[name]) for name in left)
    steps = metrics(alone)
    assert [line["reward"] > 0 for line in steps] == [True, True] and "loss" not in steps[0]
    assert [line["step"] for line in metrics(alone, "eval")] == [0]


def test_rollouts_alone_go_on_past_the_lag_in_order_of_arrival_and_without_a_group_that_passes(tmp_path):
    loose = {"sampler": {"context": 64, "max_batch": 16, "deterministic": False}, "sync_mode": "retract"}
    arrival = {**loose, "max_staleness": 1, "filters": [], "num_steps": 4}
    dropped = {"filters": [{"name": "mean_reward", "options": {"lowest": 2.0}}], "num_steps": 11}
    for order, values in (("arrival", arrival), ("prompt", dropped)):
        job = make_job(tmp_path / order, only="rollouts", eval_prompts=0, **values)
        assert job.config.rollout.order == order
        run(job)
        assert len(metrics(job)) == values["num_steps"]


@pytest.mark.slow
def test_rollouts_alone_come_from_servers_of_others_that_had_other_weights(tmp_path):
    own = make_job(tmp_path / "own", only="rollouts", eval_prompts=0)
    run(own)
    other = save_tiny_model(tmp_path / "other", vocabulary=VOCABULARY, seed=5)
    with Operator(tmp_path, other, "--context-length=64") as operator:
        url = operator.start()
        operator.wait()
        sampler = {"context": 64, "max_batch": 16, "urls": operator.named(url), "start_timeout_s": 20}
        job = make_job(tmp_path / "attached", only="rollouts", eval_prompts=0, sampler=sampler)
        run(job)
    for path in steps_of(own):
        assert list(read_rollouts(job.records / "rollouts" / path.name)) == list(read_rollouts(path))
