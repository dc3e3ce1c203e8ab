import pytest

from tests.nightly.made_nights import publish_eval


@pytest.fixture
def scored(store, tmp_path):
    """Publish an eval of a run with these answers to items 0, 1, 2 ...; returns the score that a night has of it."""
    return lambda run, answers, **about: publish_eval(store, tmp_path / run, run, answers, **about)
