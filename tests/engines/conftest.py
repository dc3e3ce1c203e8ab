import pytest

from nanodag.engines.start import ServerProcess
from tests.forks import spawn_server


@pytest.fixture(scope="module", autouse=True)
def samplers_are_forks():
    """A second of imports each, else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerProcess, "spawn", classmethod(spawn_server))
        yield
