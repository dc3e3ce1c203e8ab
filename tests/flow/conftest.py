"""A project of fake stages for each test; one Prefect server for all."""

from dataclasses import replace

import pytest
import yaml

from nanodag.config.kinds import shipped
from tests.fake_stages import FAKES, NO_TRACKERS, STAGES


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a pipeline file whose every stage is a fake one; `orders` tells stages what to do."""
    (tmp_path / "text.txt").write_text("hello\n" * 100)
    (tmp_path / "orders").mkdir()
    (tmp_path / "pipeline.yaml").write_text(
        yaml.safe_dump({"default": "tiny", "presets": {"tiny": {"stages": STAGES, "tracking": NO_TRACKERS}}})
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setenv("FAKE_ORDERS", str(tmp_path / "orders"))
    monkeypatch.delenv("NANODAG_MIRROR", raising=False)
    monkeypatch.delenv("NANODAG_STORE", raising=False)
    monkeypatch.setenv("NANODAG_CACHE", str(tmp_path / "cache"))
    for name, kind in shipped().items():
        monkeypatch.setitem(shipped(), name, replace(kind, module="fake_worker"))
    return tmp_path


@pytest.fixture
def tell(project):
    """Tell a stage what to do from now on; an empty order takes the last one back."""

    def give(stage, order):
        (project / "orders" / stage).write_text(order)

    return give


@pytest.fixture(scope="session")
def prefect_server():
    """One Prefect server with a database of its own for the whole session."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=600):
        yield
