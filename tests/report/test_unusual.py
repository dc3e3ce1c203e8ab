"""Remarks on a loss: none where a mixture's steps differ, one where training diverges."""

import json

import pytest

from nanodag.config.kinds import find_kind
from nanodag.report.gather import ReportedStage, unusual

# `pocket`, midtraining, every tenth step, batches of 4,096 tokens of five sources.
MIXTURE = [
    4.563, 4.673, 4.039, 3.769, 3.485, 3.311, 3.516, 2.467, 2.608, 3.597,
    3.221, 2.634, 3.206, 3.525, 3.251, 2.879, 3.534, 2.327, 3.125, 3.075,
]  # fmt: skip
# The same stage with matrix_lr 1 and learning_rate 1, whose rates fall again from the middle on.
DIVERGED = [
    4.563, 4.201, 4.727, 5.529, 5.414, 7.323, 8.493, 6.054, 13.382, 18.207,
    41.427, 23.981, 20.259, 21.814, 12.803, 6.980, 7.348, 5.192, 5.564, 5.660,
]  # fmt: skip


def remarks(tmp_path, losses, name="loss", **config):
    lines = [{"event": "step", "step": step, "time": 1.0, name: loss} for step, loss in enumerate(losses, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    nothing = {field: {} for field in ("metrics", "cost", "lineage", "environment")}
    about = {"name": "mid", "kind": find_kind("midtrain"), "key": "1", "attempt": "", "digest": "", "config": config}
    return unusual(ReportedStage(**nothing, **about, files=tmp_path, records=tmp_path))


def test_a_mixture_whose_steps_differ_is_not_said_to_rise_at_any_of_its_steps(tmp_path):
    assert [said for step in range(21) for said in remarks(tmp_path, MIXTURE[:step])] == []


def test_a_loss_that_diverges_is_said_to_rise_until_it_comes_back(tmp_path):
    said = {steps: remarks(tmp_path, DIVERGED[:steps]) for steps in range(21)}
    assert [steps for steps in said if said[steps]] == [*range(6, 16)]
    assert said[11] == ["mid: loss rises, 4.38 from step 1 on, now 29.8."]


@pytest.mark.parametrize(("config", "count"), [({}, 1), ({"patience": 3}, 0)])
def test_a_validation_loss_that_rises_steadily_is_said_unless_the_stage_ends_by_it(tmp_path, config, count):
    steady = [3.0, 2.8, 2.7, 2.75, 2.85, 3.0, 3.2]  # of memorising: hardly any noise
    assert len(remarks(tmp_path, steady, "validation_loss", **config)) == count
