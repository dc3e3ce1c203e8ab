"""What becomes of the process that serves the flows when Prefect's server is slow, silent or gone. No Prefect here."""

import errno
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from http.server import ThreadingHTTPServer

import psutil
import pytest

from nanodag.children.child import start_child
from nanodag.config.pipeline import ServerConfig
from nanodag.errors import ServerError, StoreError
from nanodag.server import local_server as server_module
from nanodag.server.local_server import LocalServer, ProcessId, RunningServer
from nanodag.server.prefect_api import Api
from nanodag.store.provenance import process_started
from tests.http_server import Quiet

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(500)"]


class Prefect(ThreadingHTTPServer):
    """Answers like Prefect's server. num_late: the first answers about its health that are none."""

    def __init__(self, port=0, num_active=0, num_late=0):
        super().__init__(("127.0.0.1", port), Answers)
        self.num_active, self.num_late = num_active, num_late
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def end(self):
        self.shutdown()
        self.server_close()


class Answers(Quiet):
    def do_GET(self):
        if "csrf-token" in self.path:
            return self.answer({"detail": "CSRF protection is disabled."}, 422)
        self.server.num_late -= 1
        self.answer(True, 503 if self.server.num_late >= 0 else 200)

    def do_POST(self):
        self.content()
        self.answer(self.server.num_active)


def kill(process):
    psutil.Process(process.pid).kill()
    while process.is_alive():
        time.sleep(0.01)


@pytest.fixture
def process():
    """Start processes that sleep, each in a group of its own."""
    started = []

    def start():
        started.append(subprocess.Popen(SLEEPS, start_new_session=True))
        return ProcessId(pid=started[-1].pid, started=process_started(psutil.Process(started[-1].pid)))

    yield start
    for one in started:
        one.kill()
        one.wait()


@pytest.fixture
def prefect():
    made = []

    def make(**about):
        made.append(Prefect(**about))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def recorded(tmp_path, process):
    """A store's server whose serve process is up with earlier code, as server.json has it."""

    def record(port):
        (tmp_path / "pipeline.yaml").write_text("default: tiny\n")
        known = {"speedrun": "1"}
        found = RunningServer(port=port, server=process(), serve=process(), deployments=known, serves="earlier")
        (tmp_path / "server.json").write_text(json.dumps(asdict(found)))
        settings = ServerConfig(port=port, start_timeout_s=30.0)
        made = LocalServer(tmp_path, store_url="", file=tmp_path / "pipeline.yaml", settings=settings)
        return made, found

    return record


def test_a_late_answer_ends_no_flow(prefect, recorded):
    server, found = recorded(prefect(num_active=1, num_late=3).server_port)
    assert server.ensure(print) == found
    assert found.serve.is_alive() and found.server.is_alive()


def test_a_server_that_is_silent_is_left_alone_with_its_flows_and_an_error_says_so(prefect, recorded, monkeypatch):
    monkeypatch.setattr(server_module, "BUSY_FOR_S", 0.5)
    server, found = recorded(prefect(num_late=1000).server_port)
    with pytest.raises(ServerError, match=r"does not answer\. Flow runs may be under way.*nanodag server stop"):
        server.ensure(print)
    assert server.running() is None
    assert found.serve.is_alive() and found.server.is_alive()


class WithTokens(Quiet):
    """Changes something for the newest token alone, and says how many it has given."""

    def do_GET(self):
        self.server.num_given += 1
        self.answer({"token": f"t{self.server.num_given}"})

    def do_POST(self):
        self.content()
        is_known = self.headers["Prefect-Csrf-Token"] == self.server.valid and self.headers["Prefect-Csrf-Client"]
        self.answer(self.server.num_given, 200 if is_known else 403)


def test_a_token_is_asked_for_once_and_again_when_it_has_ended(prefect):
    server = prefect()
    server.RequestHandlerClass, server.num_given, server.valid = WithTokens, 0, "t1"
    api = Api(f"http://127.0.0.1:{server.server_port}")
    assert [api.ask("POST", "/x", {}), api.ask("POST", "/x", {})] == [1, 1]
    server.valid = "t2"
    assert [api.ask("POST", "/x", {}), api.ask("POST", "/x", {})] == [2, 2]
    server.valid = "none"
    with pytest.raises(ServerError, match="refused POST /x with 403"):
        api.ask("POST", "/x", {})


@pytest.mark.parametrize("is_current", [True, False])
def test_a_start_that_was_killed_before_the_deployments_were_known_is_resumed(prefect, recorded, tmp_path, is_current):
    """With a flow run that counts as under way, what serves is not renewed: its deployments must be taken over."""
    server, found = recorded(prefect(num_active=1).server_port)
    serves = server._to_serve() if is_current else "earlier"
    (tmp_path / "server.json").write_text(json.dumps({**asdict(found), "deployments": {}, "serves": serves}))
    ready = threading.Timer(0.3, lambda: (tmp_path / "serve.json").write_text('{"speedrun": "7"}'))
    ready.start()
    running = server.ensure(print)
    ready.join()
    assert running.deployments == {"speedrun": "7"} and running.serve == found.serve
    assert json.loads((tmp_path / "server.json").read_text())["deployments"] == {"speedrun": "7"}


def test_a_serve_process_that_died_while_it_started_is_replaced(prefect, recorded, process, tmp_path, monkeypatch):
    server, found = recorded(prefect(num_active=1).server_port)
    (tmp_path / "server.json").write_text(json.dumps({**asdict(found), "deployments": {}}))
    threading.Timer(0.3, lambda: kill(found.serve)).start()

    def start(command, log_name, environment):
        assert log_name == "serve.log"
        (tmp_path / "serve.json").write_text('{"speedrun": "8"}')
        return process()

    monkeypatch.setattr(server, "_start", start)
    assert server.ensure(print).deployments == {"speedrun": "8"}


def test_what_was_started_and_never_recorded_is_ended_and_nothing_else(tmp_path, recorded):
    server, _ = recorded(4200)
    started = []
    serves, served = "nanodag.worker.respawn", "flows.prefect_server"
    for folder, module in ((tmp_path, serves), (tmp_path, served), (tmp_path.parent, served)):
        started.append(subprocess.Popen([*SLEEPS, "-m", module], cwd=folder, start_new_session=True))
    time.sleep(0.2)
    try:
        known = ProcessId(pid=started[1].pid, started=0.0)
        threading.Timer(0.1, started[0].wait).start()  # else it would stay a zombie, and count as being there
        assert server._end_strays(known) and not server._end_strays(known)
        assert [one.poll() is None for one in started] == [False, True, True]
    finally:
        for one in started:
            one.kill()
            one.wait()


@pytest.mark.parametrize("num_active", [0, 2])
def test_with_the_server_gone_another_is_asked_before_what_serves_is_renewed(
    prefect, recorded, process, num_active, monkeypatch, tmp_path
):
    first = prefect()
    server, found = recorded(first.server_port)
    first.end()
    kill(found.server)
    started = []

    def start(command, log_name, environment):
        port = int(environment["PREFECT_API_URL"].rpartition(":")[2].partition("/")[0])
        started.append((log_name, port))
        if log_name == "server.log":
            prefect(port=port, num_active=num_active)
        else:
            (tmp_path / "serve.json").write_text('{"speedrun": "2"}')
        return process()

    monkeypatch.setattr(server, "_start", start)
    running = server.ensure(print)
    assert started[0] == ("server.log", found.port) and running.server != found.server
    assert found.serve.is_alive() == (running.serve == found.serve) == bool(num_active)
    assert running.deployments == {"speedrun": "1" if num_active else "2"}
    assert json.loads((tmp_path / "server.json").read_text())["server"] == asdict(running.server)


def test_a_port_that_somebody_else_took_from_a_serve_process_with_flows_is_an_error(prefect, recorded):
    server, found = recorded(prefect().server_port)
    kill(found.server)
    with pytest.raises(ServerError, match=f"something else has its port {found.port}"):
        server.ensure(print)
    assert found.serve.is_alive()


def test_who_watches_a_run_looks_for_the_process_that_serves_now(prefect, recorded, process, tmp_path):
    """As when another `nanodag run` with another file had what serves begin anew: the run is taken by that one."""
    server, found = recorded(prefect().server_port)
    kill(found.serve)
    assert not server.serves()
    (tmp_path / "server.json").write_text(json.dumps(asdict(replace(found, serve=process()))))
    assert server.serves()


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("it ended", ServerError, r"(?s)^Prefect's process ended while it started.*no module"),
        ("a full disk", StoreError, r"^Starting Prefect's server in .* failed .* The disk is full: free some"),
        ("Ctrl-C", KeyboardInterrupt, None),
    ],
)
def test_where_prefect_does_not_start_nothing_stays_and_one_error_says_why(tmp_path, monkeypatch, fault, error, said):
    (tmp_path / "pipeline.yaml").write_text("default: tiny\n")
    made = LocalServer(tmp_path, store_url="", file=tmp_path / "pipeline.yaml", settings=ServerConfig())
    started = []

    def begin(command, **how):
        ends = fault == "it ended" and "flows.prefect_server" in command
        started.append(start_child([*SLEEPS[:-1], "raise SystemExit('no module')"] if ends else SLEEPS, **how))
        return started[-1]

    def fails(*unused):
        raise KeyboardInterrupt if fault == "Ctrl-C" else OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(server_module, "start_child", begin)
    if fault == "a full disk":
        monkeypatch.setattr(server_module, "write_json", fails)
    if fault == "Ctrl-C":
        monkeypatch.setattr(LocalServer, "_wait_for", fails)
    with pytest.raises(error, match=said) as raised:
        made.ensure(print)
    assert raised.type is error, "no name of ours that nobody knows"
    assert len(started) == 2 and all(process.wait(20) for process in started)
    for process in started:
        process.kill()
