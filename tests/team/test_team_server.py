"""A team's server: Postgres, a password, an address that others reach; and what the default one sends out."""

import os
import re
import shutil
import socket
import time

import httpx
import psutil
import pytest

from nanodag.server.prefect_api import Api
from tests.fault.project import Project
from tests.team.postgres import PASSWORD, missing

pytestmark = pytest.mark.slow

LOGIN = ("team", "ui-7dJwq2bLRz")


def own_address():
    """An address of this machine that is not loopback's."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    return missing("this machine has no address beside loopback")


@pytest.fixture(scope="module")
def project(database, tmp_path_factory):
    folder = tmp_path_factory.mktemp("team")
    secret = folder / "login"
    secret.write_text(":".join(LOGIN) + "\n")
    secret.chmod(0o600)
    settings = {"host": own_address(), "password_file": str(secret), "database": database.url}
    (folder / "project").mkdir()
    made = Project(folder / "project", server=settings, PGPASSWORD=PASSWORD)
    made.done("run", "--name", "first")
    yield made
    made.run("server", "stop")


def test_runs_are_recorded_in_postgres_and_nowhere_else(project, database):
    assert int(database.query("select count(*) from flow_run where state_type = 'COMPLETED'")) == 1
    assert int(database.query("select count(*) from task_run where state_type = 'COMPLETED'")) == 4
    assert not list((project.folder / "store").rglob("*.db"))


def test_who_has_no_password_is_told_nothing(project):
    url = f"http://{own_address()}:{project.server()['port']}"
    assert httpx.get(f"{url}/api/health", trust_env=False).status_code == 200  # the one thing that all may ask
    for auth in (None, ("team", "guess")):
        answer = httpx.post(f"{url}/api/flow_runs/filter", json={}, auth=auth, trust_env=False)
        assert answer.status_code in (401, 403) and "first" not in answer.text
        assert httpx.get(f"{url}/api/csrf-token?client=a", auth=auth, trust_env=False).status_code == 401
    assert Api(url, login=LOGIN).num_active_runs() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{project.server()['port']}/api/health", trust_env=False)


def test_no_password_is_seen_in_command_lines_logs_or_the_store(project):
    secrets = [LOGIN[1].encode(), PASSWORD.encode()]
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or []).encode()
        assert not any(secret in line for secret in secrets), process
    looked_at = [path for path in project.folder.rglob("*") if path.is_file()]
    assert any(path.name == "server.log" for path in looked_at)
    found = [path for path in looked_at if any(secret in path.read_bytes() for secret in secrets)]
    assert not found


def test_a_server_with_other_settings_is_not_taken_for_the_one_that_is_wanted(project, tmp_path):
    code, output = project.run("run", "server.host=127.0.0.1", "server.password_file=none")
    assert code == 1
    assert "was started with another server.host, database or password_file" in output
    assert "nanodag server stop" in output


STRACE = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-e", "signal=none"]
ADDRESS = re.compile(r'sin_addr=inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"')


def test_by_default_nothing_is_asked_of_any_other_machine_not_even_a_name(tmp_path):
    """Server, serving process, flow, workers and the UI in a browser: every address that they connect or send to."""
    if shutil.which("strace") is None:
        missing("Debian's package strace is not installed")
    project = Project(tmp_path / "project")
    trace = tmp_path / "trace"
    traced = project.command("run", "--name", "alone", prefix=[*STRACE, "-o", str(trace)])
    try:
        deadline = time.monotonic() + 600
        while project.record("alone").get("state") != "completed":
            assert traced.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        url = f"http://127.0.0.1:{project.server()['port']}"
        assert_ui_stays_home(url)
    finally:
        project.run("server", "stop")
        output = traced.communicate(timeout=120)[0]  # it ends with the last process that it watches
    assert traced.returncode == 0, output
    found = {address for pair in ADDRESS.findall(trace.read_text()) for address in pair if address}
    assert "127.0.0.1" in found  # it does see connections
    assert {address for address in found if not address.startswith("127.") and address != "::1"} == set()


def assert_ui_stays_home(url):
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        missing("the browser tests need Debian's packages chromium and chromium-driver")
    from tests.browser.ui import start_chromium

    os.environ.setdefault("NO_PROXY", "localhost,127.0.0.1")
    chrome = start_chromium(chromium, driver)
    try:
        for page in ("/v2/dashboard", "/v2/runs", "/v2/deployments"):
            chrome.get(url + page)
            for _ in range(50):
                chrome.execute_async_script("setTimeout(arguments[0], 100)")
            asked = chrome.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
            assert any(name.startswith(f"{url}/api") for name in asked), asked
            assert [name for name in asked if not name.startswith((url, "data:", "blob:"))] == []
    finally:
        chrome.quit()
