"""Ranks that share each row train as those that have whole rows."""

import pytest

from tests.train.stages import RESOURCES, finish, make_job, metrics, pretrain, with_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return with_inputs(tmp_path_factory.mktemp("inputs"))


def trained(inputs, folder, num_ranks, **changes):
    config = pretrain(inputs, resources={**RESOURCES, "num_ranks": num_ranks}, **changes)
    job = make_job(folder / f"{num_ranks}-{len(changes)}", config, {"tokenizer": inputs / "tokenizer"})
    result = finish(job, num_ranks=num_ranks)
    lines = [line for line in metrics(job) if "loss" in line or "validation_loss" in line]
    return result, [line.get("loss", line.get("validation_loss")) for line in lines], lines[-1]


@pytest.mark.parametrize(
    ("num_ranks", "zero_stage"),
    [(2, 1), (2, 3), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(2, 0, marks=pytest.mark.slow)],
)
def test_ranks_that_share_rows_have_the_losses_and_counts_of_half_as_many_that_do_not(
    inputs, tmp_path, num_ranks, zero_stage
):
    alone = trained(inputs, tmp_path, num_ranks // 2, zero_stage=zero_stage)
    shared = trained(inputs, tmp_path, num_ranks, zero_stage=zero_stage, sequence_parallel=2)
    assert shared[1] == pytest.approx(alone[1], rel=2e-5) and len(alone[1]) > 12
    assert shared[2]["validation_bits_per_byte"] == pytest.approx(alone[2]["validation_bits_per_byte"], rel=2e-5)
    for name in ("tokens", "label_tokens", "steps"):
        assert shared[0]["metrics"].get(name) == alone[0]["metrics"].get(name), shared[0]["metrics"]
