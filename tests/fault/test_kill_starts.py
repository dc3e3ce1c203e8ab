"""Three of the runs of tests/fault/kill_starts.py, with Prefect: killed while it starts, the next start heals it."""

import pytest

from tests.fault.kill_starts import Trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("number", [13, 4, 8])  # the command at step 7; processes of Prefect's at a random moment
def test_a_start_that_was_killed_heals_by_itself(tmp_path, number):
    print(Trial(number, True, tmp_path / "project")())
