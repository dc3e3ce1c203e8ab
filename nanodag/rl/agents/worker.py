"""One process that runs an agent's function, a sample at a time: `python worker.py DESCRIPTOR`.

It needs the standard library alone and imports nothing of nanodag, so any interpreter can run it: that of an
environment in which `openai` and an agent's other packages are installed. Over the socket DESCRIPTOR come lines of
JSON, first `{"function", "folders", "max_bytes", "timeout_s"}`, then one a sample, `{"record", "base_url", "api_key",
"model", "seed"}`. Each is answered by a line, `{"returned", "is_left"}` or `{"error", "is_left"}`. is_left: the
function left threads or processes behind, so that this process is no good for another sample.
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
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 5.0
MAX_FILE_BYTES = 1 << 30  # what it prints goes to a file, too


def main() -> None:
    """Serve until the other end is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    lines = connection.makefile("r", encoding="utf-8")
    first = json.loads(lines.readline())
    for signum in (signal.SIGTERM, signal.SIGINT):  # they reach the whole group; the stage decides when it stops
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":  # what a child leaves behind is this process's child then, and is seen
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    if first["max_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (first["max_bytes"], first["max_bytes"]))
    sys.path[:] = [*sys.path[1:], *first["folders"]]
    for line in lines:
        # Whoever asks ends this process at the time limit. Should that one be gone, the kernel does.
        signal.setitimer(signal.ITIMER_REAL, first["timeout_s"] + GRACE_S)
        answer = answer_to(json.loads(line), first["function"])
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        connection.sendall(json.dumps({**answer, "is_left": is_left()}).encode() + b"\n")


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


def is_left() -> bool:
    """Whether there are threads or processes beside this and its watch."""
    children = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return threading.active_count() > 2 or any(children)


def end_with(parent: int) -> None:
    """End this process, and what it started, with its parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
