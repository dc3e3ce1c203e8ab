"""A project of fake stages for each test; one Prefect server for all."""

import shutil
import threading
from dataclasses import replace

import pytest
import yaml

from nanodag.config.kinds import shipped
from nanodag.errors import StageFailed
from nanodag.run.build_stage import build_stage
from nanodag.store import Store
from tests.fake_stages import FAKES, NO_TRACKERS, STAGES
from tests.fault.processes import wait_for_step
from tests.flow.tiny_runs import opened


@pytest.fixture
def project(tmp_path, monkeypatch, no_settings):
    """A folder with a pipeline file whose every stage is a fake one; `orders` tells stages what to do."""
    (tmp_path / "text.txt").write_text("hello\n" * 100)
    (tmp_path / "orders").mkdir()
    presets = {"tiny": {"stages": STAGES, "tracking": NO_TRACKERS}}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump({"default": "tiny", "presets": presets}))
    monkeypatch.chdir(tmp_path)
    paths = {"PYTHONPATH": FAKES, "FAKE_ORDERS": tmp_path / "orders", "NANODAG_CACHE": tmp_path / "cache"}
    for variable, path in paths.items():
        monkeypatch.setenv(variable, str(path))
    for name, kind in shipped().items():
        monkeypatch.setitem(shipped(), name, replace(kind, module="fake_worker"))
    return tmp_path


@pytest.fixture
def run(project):
    """A run of the project, begun."""
    return opened()


@pytest.fixture
def tell(project):
    """Tell a stage what to do from now on; an empty order takes the last one back."""

    def give(stage, order):
        (project / "orders" / stage).write_text(order)

    return give


@pytest.fixture
def begun(tell):
    """Build a run's tokenizer in a thread, to step 2; gives the thread, what it raises, and the workspace."""

    def begin(run):
        tell("tokenizer", "wait")
        raised = []

        def body():
            try:
                build_stage(run, "tokenizer", {})
            except StageFailed as error:
                raised.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        return thread, raised, wait_for_step(run, "tokenizer", 2)

    return begin


@pytest.fixture(scope="session")
def prefect_server():
    """One Prefect server with a database of its own for the whole session."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=600):
        yield


@pytest.fixture
def completed(project, prefect_server, tmp_path_factory):
    """The project's store with a completed run of that name, which is built once and then copied."""
    from flows.speedrun import speedrun

    def complete(name):
        made, store = tmp_path_factory.getbasetemp() / f"completed-{name}", Store(project / "store")
        if made.exists():
            shutil.copytree(made, store.local, dirs_exist_ok=True)
            before = store.read_run(name).stages
            run = opened(name=name)  # configs name data by their folder, which is another one here
            for stage, entry in before.items():
                run.note(stage, state="built", key=entry.key, made=entry.made.changed(config=run.entry(stage).config))
            run.close()
        else:
            assert speedrun(name, return_state=True).is_completed()
            shutil.copytree(store.local, made)
        return store

    return complete
