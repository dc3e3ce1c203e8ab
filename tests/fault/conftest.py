"""One project folder of fake stages a test module, and the server that it starts."""

import pytest

from tests.fault.project import Project


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    made = Project(tmp_path_factory.mktemp("project"))
    yield made
    made.run("server", "stop")


@pytest.fixture
def ended():
    """A list: processes in it, whose output is a pipe, are killed when the test is over."""
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
