"""`keep: best:<metric>`: the weights of the best evaluation are what the stage leaves."""

import json
from signal import SIGKILL, SIGTERM

import pytest
from safetensors.torch import load_file

from nanodag.data.mixture import Mixture
from nanodag.rl.control.evaluations import Evaluations, best_step
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.rollouts.metrics import Stopwatch
from nanodag.rl.rollouts.prompts import PolicyFormat
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.encoding import Encoding
from tests.rl.stages import benchmark, digest, disturb, make_job, metrics, run, same_in_the_end, slow_rewards

SETTINGS = {"num_steps": 6, "checkpoint_every": 2, "keep_checkpoints": 1, "keep_weights_every": 2, "keep": "best:often"}


def test_the_best_step_is_the_earliest_of_equal_ones_and_what_has_no_score_is_none():
    values = {0: 0.1, 10: 0.5, 2: 0.5, 4: None, 6: float("nan")}
    assert (best_step(values, is_highest=True), best_step(values, is_highest=False)) == (2, 0)
    assert best_step({4: None}, is_highest=True) is None


def stage(folder, **values):
    often = benchmark(folder, "often", limit=8, num_samples=2, temperature=1.0, every=1)
    own = {"learning_rate": 3e-3, "eval_prompts": 0, "eval_at_start": False, "benchmarks": [often]}
    return make_job(folder, **{**SETTINGS, **own, **values})


def evaluations_of(job):
    folder = job.inputs["model"]
    generator = RolloutGenerator(job.config, None, None, Encoding(folder), ())
    return Evaluations(job, generator, PolicyFormat(load_renderer(folder), {}, ()), Stopwatch(), context=64)


def test_weights_stay_while_they_are_best_or_unscored_and_a_checkpoint_outlives_their_removal(tmp_path):
    job = stage(tmp_path, eval_at_start=True)
    evaluations = evaluations_of(job)
    folders = [evaluations.weights_to_keep(step) for step in (0, 3, 6)]
    for step, folder in zip((0, 3, 6), folders, strict=True):
        folder.mkdir()
        (folder / "w").write_text(str(step))
    assert evaluations.weights_to_keep(6) is None  # it is there
    evaluations.scores = {"often": {0: 0.5, 3: 0.5}}
    evaluations._prune()
    assert [folder.is_dir() for folder in folders] == [True, False, True]
    evaluations.save(tmp_path / "checkpoint")
    evaluations.scores["often"][6] = 0.6
    evaluations._prune()
    assert not folders[0].exists()
    for last, step in ((0.6, 6), (0.4, 0)):
        evaluations.load(tmp_path / "checkpoint", {"often": {"0": 0.5, "6": last}})
        assert evaluations.leave_best(tmp_path / "output") == step
        assert (tmp_path / "output" / "w").read_text() == str(step)
    evaluations_of(job)
    assert not folders[2].exists()


def test_patience_ends_after_so_many_evaluations_behind_the_best(tmp_path):
    evaluations = evaluations_of(stage(tmp_path, patience=2))
    for scores, is_over in (
        ({0: 0.1, 2: 0.5, 4: 0.5, 6: None}, True), ({0: 0.1, 2: 0.5, 4: 0.5}, False), ({0: None, 2: None}, False),
        ({0: 0.5, 2: 0.4, 4: 0.1}, True),
    ):  # fmt: skip
        evaluations.scores = {"often": scores}
        assert evaluations.is_over() is is_over


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    job = stage(tmp_path_factory.mktemp("best"))
    run(job)
    return job


def test_what_a_stage_leaves_is_what_one_that_ends_at_the_best_step_leaves(finished, tmp_path):
    scores = {line["step"]: line["benchmark_often"] for line in metrics(finished, "eval")}
    assert list(scores) == [1, 2, 3, 4, 5, 6]
    kept = json.loads((finished.workspace / "result.json").read_text())["metrics"]["kept_step"]
    assert scores[kept] == max(scores.values()) and all(scores[step] < scores[kept] for step in range(1, kept))
    assert kept < 6  # else this test could not tell them from the last weights
    shorter = stage(tmp_path, num_steps=kept, keep="last")
    run(shorter)
    assert digest(finished.output) == digest(shorter.output)


def test_every_nth_weights_lie_in_the_records_as_the_models_that_a_stage_of_so_many_steps_leaves(finished, tmp_path):
    folders = sorted((finished.records / "weights").iterdir())
    assert [folder.name for folder in folders] == ["step-00000002", "step-00000004", "step-00000006"]
    assert len({digest(folder) for folder in folders}) == 3
    shorter = stage(tmp_path, num_steps=4, keep="last")
    run(shorter)
    assert digest(folders[1]) == digest(shorter.output)


def test_killed_and_stopped_a_stage_leaves_the_same_best_weights(finished, tmp_path):
    job = stage(tmp_path)
    slow_rewards(tmp_path)
    assert disturb(job, (2, 5, SIGKILL), (5, 5, SIGTERM))
    run(job)
    same_in_the_end(job, finished)


def test_a_stage_of_epochs_that_finds_nothing_better_ends_early_and_leaves_the_best_weights(tmp_path):
    settings = {"keep": "best:eval_reward", "patience": 2, "num_epochs": 4.0, "num_steps": 100, "learning_rate": 1e-9}
    job = make_job(tmp_path, **settings)
    run(job)
    evals, steps = metrics(job, "eval"), metrics(job)
    assert [line["step"] for line in evals] == [0, 1, 2] and [line["step"] for line in steps] == [1, 2]
    num_prompts = sum(1 for _ in Mixture(job.config.data, kind="prompt", seed=7))
    assert {line["total"] for line in steps} == {4 * num_prompts // 2}
    found = json.loads((job.workspace / "result.json").read_text())["metrics"]
    assert (found["steps"], found["stopped_early"], found["kept_step"]) == (2, True, 0)
    left, begun = (load_file(folder / "model.safetensors") for folder in (job.output, job.inputs["model"]))
    assert left.keys() == begun.keys() and all(left[name].equal(begun[name]) for name in left)
