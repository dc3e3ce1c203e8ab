"""Stages on several ranks, interrupted and started again: the full product is `python -m tests.train.resume`."""

from dataclasses import replace

import pytest

from nanodag.errors.words import counted
from tests.train.resume import STEPS, Case, Stages, pairs

KILLED = Case(zero_stage=1, num_ranks=2, optimizer="muon", ended="killed", weight_decay=0.1, keeps_best=True)
STOPPED = Case(zero_stage=3, num_ranks=2, optimizer="adamw", ended="stopped", weight_decay=0.0, keeps_best=False)
ROWS = Case(zero_stage=2, num_ranks=2, optimizer="normuon", ended="killed", weight_decay=0.1, keeps_best=True)
SHARED = replace(STOPPED, ended="killed", keeps_best=True, sequence_parallel=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Stages(tmp_path_factory.mktemp("resume"))


@pytest.mark.parametrize("case", [KILLED, STOPPED, ROWS, SHARED], ids=str)
def test_two_ranks_that_were_interrupted_end_on_the_same_bytes(runs, case):
    assert runs.differences(case) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [*pairs()], ids=str)
def test_any_two_settings_together_end_on_the_same_bytes(runs, case):
    assert runs.differences(case) == []


@pytest.mark.slow
@pytest.mark.parametrize(("after_step", "ended"), [(1, "killed"), (STEPS, "stopped")])
def test_before_the_first_checkpoint_and_after_the_last_step_nothing_is_lost_or_written_twice(runs, after_step, ended):
    best = ended == "killed"  # then step 0 is validated, too
    case = Case(zero_stage=2, num_ranks=2, optimizer="muon", ended=ended, weight_decay=0.0, keeps_best=best)
    assert runs.differences(case, after_step=after_step) == []


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 0), (0, 2)])
def test_under_another_zero_stage_a_stage_continues_with_the_same_documents_and_losses(runs, before, after):
    case = Case(zero_stage=before, num_ranks=2, optimizer="muon", ended="killed", weight_decay=0.1, keeps_best=False)
    assert runs.moved(case, after) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3)])
def test_by_another_number_of_ranks_a_stage_is_refused_and_its_checkpoints_stay(runs, before, after):
    case = Case(zero_stage=1, num_ranks=before, optimizer="muon", ended="stopped", weight_decay=0.0, keeps_best=True)
    assert f"written by {counted(before, 'rank')}; this stage runs on {after}" in runs.refusal(case, after)
