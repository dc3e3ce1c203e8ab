"""`only: rollouts` and `only: training`: either side of a stage alone."""

import pytest
from safetensors.torch import load_file

from nanodag.errors import ConfigError
from nanodag.rl.rollouts.rollout import read_rollouts
from nanodag.rl.rollouts.saved import check_steps, saved_steps
from nanodag.run.build_stage import rollouts_identity
from tests.rl.fakes import config
from tests.rl.stages import digest, make_job, metrics, run


def test_rollouts_alone_are_those_of_the_first_weights_and_training_alone_ends_on_the_stages_bytes(tmp_path):
    jobs = {}
    for name, values in (
        ("whole", {"eval_prompts": 0}),
        ("rollouts", {"only": "rollouts"}),
        ("training", {"only": "training", "saved_rollouts": f"{tmp_path}/whole/workspace/records/rollouts"}),
    ):
        (tmp_path / name).mkdir()
        jobs[name] = make_job(tmp_path / name, **values)
        run(jobs[name])
    whole, rollouts, training = (
        [list(read_rollouts(path)) for path in saved_steps(job.records / "rollouts").values()] for job in jobs.values()
    )
    assert rollouts[0] == whole[0] and rollouts[1] != whole[1] and training == whole
    assert digest(jobs["training"].output) == digest(jobs["whole"].output)
    assert not list(jobs["training"].workspace.glob("sampler-*.log")) and not metrics(jobs["training"], "eval")
    assert metrics(jobs["training"])[1]["gradient_norm"] == metrics(jobs["whole"])[1]["gradient_norm"]
    left, begun = (
        load_file(job / "model.safetensors") for job in (jobs["rollouts"].output, jobs["rollouts"].inputs["model"])
    )
    assert left.keys() == begun.keys() and all(left[name].equal(begun[name]) for name in left)
    steps = metrics(jobs["rollouts"])
    assert [line["reward"] > 0 for line in steps] == [True, True] and "loss" not in steps[0]
    assert [line["step"] for line in metrics(jobs["rollouts"], "eval")] == [0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"only": "training"}, "only training and saved_rollouts none do not fit"),
        ({"saved_rollouts": "/r"}, "only both and saved_rollouts /r do not fit"),
        ({"only": "rollouts", "keep": "best:asked", "benchmarks": [{"name": "asked"}]}, "nothing changes the weights"),
    ],
)
def test_sides_that_do_not_fit_together_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        config(**values)


def test_saved_rollouts_are_in_the_key_by_their_bytes_and_a_missing_step_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no step-"):
        rollouts_identity(tmp_path)
    for name, text in (("step-00000001", "a"), ("step-00000001.dropped", "b"), ("step-00000002", "a")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    before = rollouts_identity(tmp_path)
    assert list(before["files"]) == ["1", "2"] and before["files"]["1"] == before["files"]["2"]
    (tmp_path / "step-00000002.jsonl").write_text("c")
    assert rollouts_identity(tmp_path) != before
    with pytest.raises(ConfigError, match="no step 3, and num_steps is 4"):
        check_steps(saved_steps(tmp_path), tmp_path, num_steps=4)
