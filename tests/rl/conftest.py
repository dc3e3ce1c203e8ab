import pytest

from nanodag.inference.sampler_process import SamplerProcess
from tests.forks import spawn_server


@pytest.fixture(scope="module", autouse=True)
def samplers_are_forks():
    """A second of imports each, else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplerProcess, "spawn", classmethod(spawn_server))
        yield
