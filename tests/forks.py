"""Python processes forked from one that has imported torch, DeepSpeed and our workers: the imports cost once, not each.

A forked process is a process like any other: its own pid, session and end. What it shares with the others is what an
interpreter draws when it starts, the seed of hashes: tests of exactness run one of two stages in a fresh interpreter.
"""

import atexit
import contextlib
import functools
import gc
import inspect
import itertools
import logging
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from nanodag.engines.start import ServerProcess
from nanodag.inference.server_variables import PARENT_VARIABLE, server_environment

CPU_ONLY = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
LIMIT_S = 300.0
SPAWN = ServerProcess.spawn.__func__  # type: ignore[attr-defined]


@functools.cache
def _imported() -> ForkServerContext:
    """The process that forks, which lives as long as this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    project = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, [project, os.environ.get("PYTHONPATH", "")]))
    with mock.patch.dict(os.environ, CPU_ONLY, PYTHONPATH=paths):
        forkserver.ensure_running()
    return context


class Forked:
    """A process that was forked, with what tests use of subprocess.Popen."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._process = _imported().Process(target=target, args=arguments)
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, minus the signal where one ended it."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired([str(self._process.name)], timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the fork server has not said so yet
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def _ended(target: Callable[..., None], *arguments: Any, timeout_s: float) -> Iterator[tuple[int, Path]]:
    """Exit code of a process that called `target(folder, *arguments)`, and the folder with its stdout and stderr."""
    with tempfile.TemporaryDirectory() as name:
        process = Forked(target, Path(name), *arguments)
        try:
            yield process.wait(timeout_s), Path(name)
        finally:
            process.kill()


def run_script(code: str, *arguments: object, timeout_s: float = LIMIT_S) -> "subprocess.CompletedProcess[str]":
    """As `python -c code arguments...` would end."""
    command = ["-c", *map(str, arguments)]
    with _ended(_script, code, command, timeout_s=timeout_s) as (returncode, folder):
        output, errors = ((folder / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(command, returncode, output, errors)


def call(function: Callable[..., Any], *arguments: Any, timeout_s: float = LIMIT_S) -> Any:
    """What a function of a module returns in a process of its own."""
    with _ended(_call, function, arguments, timeout_s=timeout_s) as (returncode, folder):
        assert returncode == 0, (folder / "stderr").read_text()[-6000:]
        return pickle.loads((folder / "result").read_bytes())


def start_module(
    module: str, *arguments: object, environment: Mapping[str, str], log: Path, new_session: bool = True
) -> Forked:
    """`python -m module arguments...`, its output appended to a log. The Python modules that it starts in its turn are
    forks of it."""
    log.touch()
    return Forked(_module, module, list(map(str, arguments)), dict(environment), log, new_session)


def spawn_server(
    cls: type[ServerProcess], command: Sequence[str], *, log_path: Path, env: Mapping[str, str], token: str = ""
) -> ServerProcess:
    """A stand-in for ServerProcess.spawn where an embedded sampler may be a fork; other servers start as always."""
    if command[1] != "-m":
        return SPAWN(cls, command, log_path=log_path, env=env, token=token)
    module, *arguments = command[2:]
    environment = {**env, **server_environment(token)}
    process = start_module(module, *arguments, environment=environment, log=log_path, new_session=False)
    return cls(process, log_path=log_path, in_group=True)  # type: ignore[arg-type]


def _call(folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    _begin(folder / "stdout", folder / "stderr")
    (folder / "result").write_bytes(pickle.dumps(function(*arguments)))
    sys.stderr.flush()
    os._exit(0)  # ranks that have spoken with each other may end with SIGABRT else


def _script(folder: Path, code: str, command: list[str]) -> None:
    _begin(folder / "stdout", folder / "stderr")
    sys.argv = command
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def _module(module: str, arguments: list[str], environment: dict[str, str], log: Path, new_session: bool) -> None:
    if new_session:
        os.setsid()
    _begin(log, log)
    if PARENT_VARIABLE in environment:
        environment[PARENT_VARIABLE] = str(os.getppid())  # which ends with the process that asked for this one
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    _become(module, arguments, environment)


def _begin(output: Path, errors: Path) -> None:
    """Write to these files. The server that forks goes on silently without what it cannot import."""
    for stream, path in ((1, output), (2, errors)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    assert "tests.preloaded" in sys.modules, "tests/preloaded.py cannot be imported: python -c 'import tests.preloaded'"


def _become(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the module as a fresh interpreter with this environment would."""
    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*added, *(path for path in sys.path if path not in added)]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # that it is imported is the point
    runpy.run_module(module, run_name="__main__", alter_sys=True)


EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # private; the same in Python 3.11 and 3.12
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """In a forked worker: `python -m nanodag...` is a fork of the worker; any other command starts as always."""

    def _execute_child(self, *arguments: Any) -> None:
        how = EXECUTE.bind(self, *arguments).arguments
        if list(how["args"])[:2] != [sys.executable, "-m"] or not how["args"][2].startswith("nanodag."):
            super()._execute_child(*arguments)
            return
        self.pid = os.fork()
        if self.pid == 0:
            _end_as_python(functools.partial(_begin_child, how))
        self._child_created = True
        self._close_pipe_fds(*(how[name] for name in PIPES))


def _begin_child(how: Mapping[str, Any]) -> None:
    gc.freeze()  # a file of the parent's that is collected here would close what has its number by then
    atexit._clear()
    logging.getLogger().handlers.clear()
    signal.set_wakeup_fd(-1)
    for signum in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    for stream, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        if how[name] not in (-1, stream):
            os.dup2(how[name], stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the parent's may read what is closed below
    kept = [0, 1, 2, *sorted(how["pass_fds"]), os.sysconf("SC_OPEN_MAX")]
    for before, after in itertools.pairwise(kept):
        os.closerange(before + 1, min(after, 65536))
    if how["cwd"] is not None:
        os.chdir(how["cwd"])
    if how["start_new_session"]:
        os.setsid()
    if how["preexec_fn"] is not None:
        how["preexec_fn"]()
    _become(how["args"][2], how["args"][3:], dict(os.environ if how["env"] is None else how["env"]))


def _end_as_python(run: Callable[[], None]) -> NoReturn:
    """Call it, then leave this process as an interpreter leaves; not by returning into what the fork interrupted."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - printed, as an interpreter prints it
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
