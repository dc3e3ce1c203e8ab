import pytest

from nanodag.children import forks as fork_servers
from nanodag.engines.start import ServerProcess
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.encoding import Encoding
from tests.forks import spawn_server
from tests.rl.stages import BYTES, make_job, run
from tests.rl.turns import ids_of


@pytest.fixture(scope="module", autouse=True)
def samplers_are_forks():
    """A second of imports each, else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerProcess, "spawn", classmethod(spawn_server))
        yield
    fork_servers.end_all()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(BYTES, folder)
    return folder


@pytest.fixture(scope="session")
def encoding(folder):
    return Encoding(folder)


@pytest.fixture(scope="session")
def ids(encoding):
    """`ids("<|tool_call|>4*2<|tool_call_end|>")`: special tokens by name, the rest a token a byte."""
    return lambda text: ids_of(encoding, text)


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A stage of two steps on policy that nothing disturbed."""
    job = make_job(tmp_path_factory.mktemp("plain"))
    run(job)
    return job
