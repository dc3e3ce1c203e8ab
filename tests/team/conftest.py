import pytest

from tests.team.postgres import missing, postgres, programs


@pytest.fixture(scope="module")
def database():
    if (found := programs()) is None:
        missing("Debian's package postgresql is not installed")
    with postgres(found) as made:
        yield made
