"""For every test: few threads, no settings of the caller's server, and what takes long begins first."""

import asyncio
import inspect
import os
import signal
import sys

# Before torch is imported: two workers on two cores are slower with more threads, and spinning ones starve the rest.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0", TOKENIZERS_PARALLELISM="false")
for _name in [name for name in os.environ if name.startswith("PREFECT_")]:
    del os.environ[_name]

# Where the tests run in a shell's background it is ignored, and so it would be in every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

from nanodag.cli import main  # noqa: E402
from nanodag.host.folders import PROJECT  # noqa: E402
from nanodag.store import Store  # noqa: E402
from tests.store.making import product_in  # noqa: E402

# Files of more than some ten CPU-seconds, the longest first: a worker that is left alone with one of these at the end
# keeps the other waiting.
LONG = (
    "flow/test_presets.py",
    "rl/test_stage.py",
    "fault/test_run_command.py",
    "engines/test_lost_engines.py",
    "flow/test_speedrun.py",
    "train/test_worker.py",
    "train/test_resume.py",
    "rl/test_update.py",
    "flow/test_nightly_eval.py",
    "flow/test_build_stage.py",
    "train/test_deepspeed_engine.py",
    # of the slow ones
    "pages/test_pages.py",
    "rl/test_stage_kills.py",
    "fault/test_kill_starts.py",
)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def product(tmp_path):
    return product_in(tmp_path / "product")


@pytest.fixture
def no_settings(monkeypatch):
    """The caller's variables name no store, mirror or pipeline file."""
    for name in ("NANODAG_STORE", "NANODAG_STORE_LOCAL", "NANODAG_MIRROR", "NANODAG_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nanodag(capsys, monkeypatch):
    """Run a command, and see that it ends with a code and says some words; its output."""

    def call(command, *words, code=0):
        monkeypatch.setattr(sys, "argv", ["nanodag", *command.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        said = "".join(capsys.readouterr())
        assert (ended.value.code or 0) == code and all(word in said for word in words), said
        return said

    return call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"tests/{name}": place for place, name in enumerate(LONG)}
    for path in places:
        assert (PROJECT / path).exists(), f"tests/conftest.py names {path}, which has another name by now"
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONG)))


def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
