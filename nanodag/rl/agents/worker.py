"""A process that runs an agent's function: `python worker.py DESCRIPTOR`. Each sample has a fork of its own.

So the module is imported once, and no sample finds what an earlier one has left: variables, threads, memory. Processes
that a sample leaves behind are killed. This file needs the standard library alone and imports nothing of nanodag, so
any interpreter can run it: that of an environment in which `openai` and an agent's other packages are installed.

Over the socket DESCRIPTOR come lines of JSON, first `{"function", "folders", "max_bytes", "timeout_s"}`, then one a
sample, `{"record", "base_url", "api_key", "model", "seed"}`. Each is answered by a line: `{"returned"}`, `{"error"}`
where the function raised, or `{"code"}` where its process ended by itself.
"""

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_SWEEPS = 1000
GRACE_S = 5.0
MAX_FILE_BYTES = 1 << 30  # what it prints goes to a file, too
MAX_ANSWER_BYTES = 1 << 20


def main() -> None:
    """Serve until the other end is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    lines = connection.makefile("r", encoding="utf-8")
    given = json.loads(lines.readline())
    for signum in (signal.SIGTERM, signal.SIGINT):  # they reach the whole group; the stage decides when it stops
        signal.signal(signum, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a sample leaves behind is this process's child then, and is seen
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    sys.path[:] = [*sys.path[1:], *given["folders"]]
    for line in lines:
        try:
            importlib.import_module(given["function"].partition(":")[0])
        except BaseException as error:  # noqa: BLE001 - whatever a module raises when it is imported
            answer = {"error": f"its module cannot be imported: {said(error)}"}
        else:
            answer = forked(json.loads(line), given, connection)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def forked(task: dict, given: dict, connection: socket.socket) -> dict:
    """What a fork of this process answers."""
    with tempfile.TemporaryFile() as found:
        child = os.fork()
        if child == 0:
            os.close(connection.fileno())  # `close` leaves it open for `lines`
            run(task, given, found.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        end_what_is_left()
        text = os.pread(found.fileno(), MAX_ANSWER_BYTES + 1, 0)
    if code:
        return {"code": code}
    if len(text) > MAX_ANSWER_BYTES:
        return {"error": f"it returned more than {MAX_ANSWER_BYTES} bytes"}
    try:
        answer = json.loads(text)
    except ValueError:  # os._exit(0) came before
        answer = None
    return answer if isinstance(answer, dict) else {"error": "its process ended before it returned"}


def run(task: dict, given: dict, found: int) -> None:
    """The fork's whole life: write what the function makes of a task to a file, and end."""
    # Whoever asks kills this process at the time limit. Should that one be gone, the kernel does.
    signal.setitimer(signal.ITIMER_REAL, given["timeout_s"] + GRACE_S)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    if given["max_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (given["max_bytes"], given["max_bytes"]))
    code = 1
    try:
        os.pwrite(found, json.dumps(answer_to(task, given["function"])).encode(), 0)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer_to(task: dict, name: str) -> dict:
    """What the function makes of a task."""
    os.environ |= {
        "OPENAI_BASE_URL": task["base_url"],
        "OPENAI_API_KEY": task["api_key"],
        "NANODAG_SEED": str(task["seed"]),
    }
    random.seed(task["seed"])
    try:
        module, _, function = name.partition(":")
        returned = getattr(importlib.import_module(module), function)(SimpleNamespace(**task))
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        json.dumps(returned, allow_nan=False)
    except BaseException as error:  # noqa: BLE001 - SystemExit too: whatever it raises fails its sample
        return {"error": said(error)}
    return {"returned": returned}


def said(error: BaseException) -> str:
    """Type, message, and the last line that is no package's."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if "site-packages" not in frame.filename]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


def end_what_is_left() -> None:
    """Kill the children of this process, and theirs, which then are its own; as far as they do not make more and
    more."""
    for _ in range(MAX_SWEEPS):
        left = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def end_with(parent: int) -> None:
    """End this process, and what it started, with its parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    end_what_is_left()
    os.killpg(0, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main()
