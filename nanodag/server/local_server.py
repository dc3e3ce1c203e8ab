"""Starts, finds and stops Prefect's server and the process that serves our flows.

Both belong to one store and keep everything below <store's local folder>/prefect: a Prefect that the user has elsewhere
is neither read nor changed. They listen on loopback unless told otherwise, and send nothing out. They outlive the
command that started them; `server.json` says which processes they are. That command may be killed at any step: what it
had recorded is taken over by the next one, what it had not is found by its working directory, and ended.
"""

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from nanodag.children.child import start_child
from nanodag.config import Pipeline
from nanodag.config.pipeline import ServerConfig
from nanodag.errors import ServerError
from nanodag.host.beside import table_beside
from nanodag.host.folders import ABOVE, PRIVATE
from nanodag.host.ports import free_port
from nanodag.host.progress_timeout import Patience
from nanodag.server.prefect_api import BUSY_FOR_S, NO_LOGIN, Api, read_login
from nanodag.store import Store, write_json
from nanodag.store.atomic import locked, writing
from nanodag.store.provenance import code_digest, is_alive, process_started

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
TAIL_LINES = 15
HEARTBEAT_S = 30  # how often a flow's process says that it is there
_MAY_BE_UNDER_WAY = (
    "Flow runs may be under way, so nothing was ended. Try again; or end it and them, they go on from their "
    "checkpoints when run again: nanodag server stop"
)
_ENVIRONMENT: dict[str, dict[str, str]] = table_beside(__file__, "prefect.yaml")
_SERVER, _RESPAWN = f"{ABOVE}flows.prefect_server", "nanodag.worker.respawn"


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """A process, told apart from a later one with the same number by its start."""

    pid: int
    started: float

    def is_alive(self) -> bool:
        return is_alive(self.pid, self.started)


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """Content of server.json. serve: the supervisor of the process that serves. deployments: flow name -> deployment
    id, none while it starts. serves: which code and pipeline file. settings: what the server was started with."""

    port: int
    server: ProcessId
    serve: ProcessId
    deployments: Mapping[str, str]
    serves: str
    host: str = HOST
    password_file: str = NO_LOGIN
    settings: str = "host 127.0.0.1, database sqlite, password_file none, proxy_names none, closed to web pages"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def api(self) -> Api:
        return Api(self.url, login=read_login(self.password_file))


class LocalServer:
    """The Prefect server and serve process of one store.

    home: their folder. store_url: what is served; store_local: its local folder, unless `home` lies in that. file: the
    pipeline file whose stages the form offers.
    """

    def __init__(
        self, home: Path, *, store_url: str, file: Path, settings: ServerConfig, store_local: Path | None = None
    ) -> None:
        self.home, self._store_url, self._file = home, store_url, file
        self._store_local = store_local or home.parent
        self._config, self._host, self._password_file = settings, settings.host, settings.password_file
        self._started: list[ProcessId] = []  # by this object, for the call under way

    def running(self) -> RunningServer | None:
        """The server that is up and answering, with its serve process; None otherwise."""
        record = self._recorded()
        if record is None or not record.server.is_alive() or not record.serve.is_alive():
            return None
        return record if self._answers(record) else None

    def ensure(self, say: Callable[[str], None]) -> RunningServer:
        """The running server. It is started first when it is not up; its serve process, when what it serves has
        changed and nothing is under way. A serve process that is there is never ended before the server was asked
        whether anything is.

        Raises ServerError when the server does not answer: with the log's last lines for one that ended, or did not get
        on for start_timeout_s, while it started; after BUSY_FOR_S for one that was up. StoreError where its folder
        cannot be written. However this is left without a server, what it started is ended.
        """
        read_login(self._password_file)  # refused before anything starts
        with (
            locked(self.home / "start.lock", timeout_s=2 * self._config.start_timeout_s),
            writing(f"Starting Prefect's server in {self.home}"),
            self._all_or_nothing(),
        ):
            record = self._recorded()
            if record is not None and record.server.is_alive() and record.settings != self._settings():
                raise ServerError(
                    f"Prefect's server at {record.url} was started with another server.host, database or password_file "
                    f"than the config has now, or by an older nanodag ({record.settings}; now {self._settings()}). End "
                    "it, and what it runs: nanodag server stop"
                )
            server, port = self._server_or_start(say)
            if record is not None and record.serve.is_alive():
                record = replace(record, server=server)
                write_json(self.home / "server.json", asdict(record))
                try:
                    self._wait_for(record, record.api().is_healthy)
                    record = self._ready(record)
                    if record.serves == self._to_serve() or record.api().num_active_runs():
                        return record
                except ServerError:
                    if record.serve.is_alive():  # it was the server; nobody can be asked what is under way
                        raise
                self._end(record.serve)
            return self._serve(server, port, say)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """End what is started in the block where it is left by an error or Ctrl-C."""
        self._started.clear()
        try:
            yield
        except BaseException:
            for process in reversed(self._started):
                self._end(process)
            raise

    def serves(self) -> bool:
        """True while a process that serves the flows is there, be it another than before."""
        record = self._recorded()
        return record is not None and record.serve.is_alive()

    def has_left_flows(self) -> bool:
        """True where what serves is there and the server's process is not: flow runs go on that nobody could cancel."""
        record = self._recorded()
        return record is not None and record.serve.is_alive() and not record.server.is_alive()

    def stop(self) -> bool:
        """End both processes and every flow run of theirs; False when none was up."""
        processes = [record.serve, record.server] if (record := self._recorded()) is not None else []
        was_up = any(process.is_alive() for process in processes)
        for process in processes:
            self._end(process)
        were_strays = self._end_strays()
        (self.home / "server.json").unlink(missing_ok=True)
        return was_up or were_strays

    def _settings(self) -> str:
        """Text of all whose change makes another server necessary. Of the login only when its file changed."""
        file, names = self._password_file, " ".join(self._config.proxy_names) or "none"
        changed = f" {Path(file).stat().st_mtime_ns}" if file != NO_LOGIN else ""
        return (
            f"host {self._host}, database {self._config.database}, password_file {file}{changed}, proxy_names {names}, "
            "closed to web pages"
        )

    def _to_serve(self) -> str:
        """Text of all whose change makes another serve process necessary: the form offers the pipeline file's
        stages."""
        return f"code {code_digest()}, {self._file} {hashlib.sha256(self._file.read_bytes()).hexdigest()[:8]}"

    def _recorded(self) -> RunningServer | None:
        try:
            raw = json.loads((self.home / "server.json").read_text())
            raw.update(server=ProcessId(**raw["server"]), serve=ProcessId(**raw["serve"]))
            return RunningServer(**raw)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def _answers(self, found: RunningServer) -> bool:
        """True once the server answers; False when its process ends or is silent for too long: where other work takes
        the whole machine, one answer may well be late."""
        if found.api().is_healthy():
            return True
        deadline, patience = time.monotonic() + BUSY_FOR_S, self._patience(found)
        while not found.api().is_healthy():
            is_late = time.monotonic() > deadline if found.deployments else patience.is_over()
            if is_late or not found.server.is_alive():
                return False
            time.sleep(0.2)
        return True

    def _patience(self, running: RunningServer) -> Patience:
        logs = [self.home / "server.log", self.home / "serve.log"]
        return Patience([running.server.pid, running.serve.pid], logs, self._config.start_timeout_s)

    def _server_or_start(self, say: Callable[[str], None]) -> tuple[ProcessId, int]:
        record = self._recorded()
        if record is not None and record.server.is_alive() and self._answers(record):
            return record.server, record.port
        serving = record if record is not None and record.serve.is_alive() else None
        if serving is not None and serving.server.is_alive():
            raise ServerError(f"Prefect's server at {serving.url} is up but does not answer. {_MAY_BE_UNDER_WAY}")
        if serving is not None and not _is_free(serving.host, serving.port):
            raise ServerError(
                f"Prefect's server is gone and something else has its port {serving.port}. {_MAY_BE_UNDER_WAY}"
            )
        self._end(record.server if record is not None else None)
        self._end_strays(*([record.serve] if record is not None else []))
        preferred_port = serving.port if serving is not None else self._config.port  # what serves looks for it there
        port = preferred_port if _is_free(self._host, preferred_port) else free_port(self._host)
        if port != preferred_port:
            say(f"Port {preferred_port} is taken; the Prefect server takes {port}.")
        say("Starting the Prefect server, which takes some 10 to 30 s ...")
        command = [sys.executable, "-m", _SERVER, "start", "--host", self._host, "--port", str(port)]
        variables = _ENVIRONMENT["server"] | {
            # A page's scripts must not create flow runs.
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{self._host}:{port}",
            "NANODAG_HOSTS": " ".join({self._host: None, HOST: None, "localhost": None}),
            "NANODAG_PROXIES": " ".join(self._config.proxy_names),
        }
        if self._config.database != "sqlite":
            variables["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = self._config.database
        if (login := read_login(self._password_file)) is not None:
            variables["PREFECT_SERVER_API_AUTH_STRING"] = ":".join(login)
        return self._start(command, "server.log", self.environment(port) | variables), port

    def _serve(self, server: ProcessId, port: int, say: Callable[[str], None]) -> RunningServer:
        """Start the process that serves the flows, beside the server if that is still coming up; wait for both."""
        self._end_strays(server)
        ready = self.home / "serve.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", _RESPAWN, sys.executable, "-m", f"{ABOVE}flows.serve", str(ready)]
        # The database's password is none of its business.
        environment = {k: v for k, v in self.environment(port).items() if k not in ("PGPASSWORD", "PGPASSFILE")}
        running = RunningServer(
            port=port,
            server=server,
            serve=self._start(command, "serve.log", environment),
            deployments={},
            serves=self._to_serve(),
            host=self._host,
            password_file=self._password_file,
            settings=self._settings(),
        )
        write_json(self.home / "server.json", asdict(running))
        running = self._ready(running)
        say(f"Prefect UI: {running.url}")
        return running

    def _ready(self, running: RunningServer) -> RunningServer:
        """The same with its deployments, once it has made them: whoever started it may have been killed meanwhile."""
        if running.deployments:
            return running
        ready = self.home / "serve.json"
        self._wait_for(running, ready.exists)
        running = replace(running, deployments=json.loads(ready.read_text()))
        write_json(self.home / "server.json", asdict(running))
        return running

    def _wait_for(self, running: RunningServer, is_up: Callable[[], bool]) -> None:
        patience = self._patience(running)
        while not is_up():
            for process, log_name in ((running.server, "server.log"), (running.serve, "serve.log")):
                if not process.is_alive():
                    raise ServerError(f"Prefect's process ended while it started.\n{self._tail(log_name)}")
            if patience.is_over():
                raise ServerError(
                    f"Prefect's server did not come up: {patience} (server.start_timeout_s is "
                    f"{self._config.start_timeout_s:g}).\n{self._tail('server.log')}\n{self._tail('serve.log')}"
                )
            time.sleep(0.05)

    def _end_strays(self, *known: ProcessId) -> bool:
        """End what was started here and never recorded, as its command was killed in between: two processes that serve
        would each execute a run. True when there was one."""
        num_ended = 0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.cwd() != str(self.home.resolve()) or not {*process.cmdline()} & {_SERVER, _RESPAWN}:
                    continue
                is_first = os.getpgid(process.pid) == process.pid  # of its group
                if is_first and process.pid not in [identity.pid for identity in known]:
                    self._end(ProcessId(pid=process.pid, started=process_started(process)))
                    num_ended += 1
        return num_ended > 0

    def _start(self, command: list[str], log_name: str, environment: Mapping[str, str]) -> ProcessId:
        # A session of its own, its output in a file: it outlives this terminal, and no pipe fills up.
        process = start_child(command, environment=environment, log_path=self.home / log_name, cwd=self.home)
        self._started.append(ProcessId(pid=process.pid, started=process_started(psutil.Process(process.pid))))
        return self._started[-1]

    def environment(self, port: int) -> dict[str, str]:
        """The caller's environment without its Prefect and nanodag settings, with ours. port: of the server."""
        replaced = ("PREFECT_", "NANODAG_STORE", "NANODAG_MIRROR", "NANODAG_FILE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(replaced)}
        login = read_login(self._password_file)
        return kept | {
            **_ENVIRONMENT["all"],
            **({"PREFECT_API_AUTH_STRING": ":".join(login)} if login is not None else {}),
            "PREFECT_HOME": str(self.home),
            "PREFECT_PROFILES_PATH": str(self.home / "profiles.toml"),
            "PREFECT_API_URL": f"http://{self._host}:{port}/api",
            "PREFECT_UI_STATIC_DIRECTORY": str(self.home / "ui"),
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
            "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), HOST, "localhost", self._host])),
            "NANODAG_STORE": self._store_url,
            **({"NANODAG_STORE_LOCAL": str(self._store_local)} if "://" in self._store_url else {}),
            "NANODAG_FILE": str(self._file),
        }

    def _end(self, process: ProcessId | None, grace_s: float = 30.0) -> None:
        """SIGTERM to a process's group, SIGKILL after grace_s."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if process is None or not process.is_alive():
                return
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signum)
            deadline = time.monotonic() + grace_s
            while process.is_alive() and time.monotonic() < deadline:
                time.sleep(0.05)

    def _tail(self, log_name: str) -> str:
        path = self.home / log_name
        lines = path.read_text(errors="replace").splitlines()[-TAIL_LINES:] if path.exists() else []
        return "\n".join([f"Last lines of {path}:", *(f"  {line}" for line in lines)])


def server_of(pipeline: Pipeline, store: Store, file: Path) -> LocalServer:
    named, facts = pipeline.server.folder, store.local.stat()
    home = store.local / "prefect" if named == "auto" else Path(named)
    if facts.st_uid == os.geteuid() and facts.st_mode & stat.S_IRWXO:
        log.warning(
            "Every user of this machine may look into the store %s (mode %o). Close it: chmod 700 %s (770: open to its "
            "group alone).",
            *(store.local, stat.S_IMODE(facts.st_mode), store.local),
        )
    with writing(f"Making {home}"):
        home.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        os.listdir(home)  # refused to any other user
    return LocalServer(home, store_url=store.url, store_local=store.local, file=file, settings=pipeline.server)


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()  # which a closed one that lingers does not keep from it
    except OSError:
        return False
    return True
