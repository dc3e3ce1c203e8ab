"""A real Chromium before the real UI of a project of fake stages: seconds a stage, every process a real one."""

import os
import shutil

import pytest

from tests.fault.project import Project


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """One project, and one server, for the session."""
    made = Project(tmp_path_factory.mktemp("project"))
    yield made
    made.run("server", "stop")


@pytest.fixture(scope="session")
def chrome():
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        missing = "the browser tests need Debian's packages chromium and chromium-driver"
        (pytest.fail if os.environ.get("NANODAG_CI") else pytest.skip)(missing)
    from tests.browser.ui import start_chromium

    os.environ.setdefault("NO_PROXY", "localhost,127.0.0.1")
    made = start_chromium(chromium, driver)
    yield made
    made.quit()


@pytest.fixture
def ui(chrome, project, tmp_path):
    """The UI's pages; screenshots lie in the test's output folder."""
    from tests.browser.ui import Ui

    yield lambda: Ui(chrome, f"http://127.0.0.1:{project.server()['port']}", tmp_path / "screenshots")
    chrome.get("about:blank")  # an open page goes on drawing, which takes most of a core
