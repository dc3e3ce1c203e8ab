"""Weights that come while rollouts are under way, in whole stages. What a sampler does then: its contract tests."""

import pytest

from tests.rl.in_flight import SETTINGS, check_that_responses_went_on
from tests.rl.stages import make_job, run


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "sync"), [("abort", "disk"), ("retract", "distributed"), ("in_place", "disk")])
def test_responses_go_on_with_weights_that_come_meanwhile_and_none_is_lost_or_too_old(tmp_path, mode, sync):
    job = make_job(tmp_path, sync_mode=mode, sync=sync, **SETTINGS)
    run(job)
    check_that_responses_went_on(job)
