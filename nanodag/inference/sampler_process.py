"""Start and stop an embedded sampler as a child process.

The child ends with its parent: it watches who its parent is (`server_environment.py`), and it stays in the parent's
process group, so a signal to the group reaches both.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import httpx

from nanodag.children.child import Child, start_child
from nanodag.errors import SamplerLost
from nanodag.host.ports import LOOPBACK
from nanodag.host.progress_timeout import Patience
from nanodag.host.scratch import Scratch
from nanodag.inference.server_variables import server_environment

POLL_S = 0.02


class ServerProcess(Child):
    """A server that runs as a child, in this process's group: a signal to the group reaches both."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, log_path: Path) -> None:
        super().__init__(process, log_path=log_path, in_group=True)
        self.url = url

    @classmethod
    def spawn(
        cls, command: Sequence[str], *, log_path: Path, env: Mapping[str, str], token: str = "", url: str = ""
    ) -> Self:
        """Start a command; its output is appended to ``log_path``. It may not be ready yet."""
        environment = {**env, **server_environment(token)}
        child = start_child(command, environment=environment, log_path=log_path, in_group=True)
        return cls(child.process, url, log_path)

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Return when it is ready. Raises SamplerLost, with the last lines of its log, if it ends, or does not get on
        for ``timeout_s``."""
        patience = Patience([self.pid], [self.log_path], timeout_s)
        while not is_ready():
            if not self.is_alive:
                raise SamplerLost(
                    f"the sampler {self.how_ended()} before it was ready; the end of its log "
                    f"({self.log_path}):\n{self.tail()}"
                )
            if patience.is_over():
                raise SamplerLost(
                    f"the sampler was not ready: {patience} (sampler.start_timeout_s is {timeout_s:g}); the end of its "
                    f"log ({self.log_path}):\n{self.tail()}"
                )
            time.sleep(POLL_S)


class Elsewhere(Protocol):
    """Another machine that servers are started on. host: what they listen on, in their command. folder: that both
    machines see."""

    host: str
    folder: Path

    def spawn(self, command: Sequence[str], *, log_path: Path, env: Mapping[str, str], token: str) -> ServerProcess:
        """Start a command there; what it prints is appended to log_path. It may not be ready yet."""
        ...

    def address(self, server: ServerProcess) -> str:
        """Address of that machine; empty until it has answered."""
        ...


class SamplerProcess(ServerProcess):
    """A running embedded sampler."""

    @classmethod
    def start(
        cls,
        model_path: str | Path,
        *,
        log_path: str | Path,
        dtype: str = "auto",
        device: str = "cpu",
        gpu: str = "",
        max_batch: int = 64,
        context_length: int | None = None,
        cache_bytes: int | None = None,
        deterministic: bool = False,
        threads: int = 1,
        seed: int = 0,
        weight_version: str | int = "default",
        stream_every_s: float = 0.0,
        port: int = 0,
        token: str = "",
        start_timeout_s: float = 120.0,
        elsewhere: Elsewhere | None = None,
    ) -> ServerProcess:
        """Start a server and wait until it answers. Its output is appended to ``log_path``. elsewhere: on that machine,
        which must then be reached from here.

        token: that requests must bear, "" for none. gpu: the one that it sees, as CUDA_VISIBLE_DEVICES names it; "" for
        those of this process. Other arguments as for ``engine.Engine``. Raises SamplerLost, with
        the last lines of the log, if it ends or does not answer in time.
        """
        log_path = Path(log_path)
        made = Scratch("sampler") if elsewhere is None else tempfile.TemporaryDirectory(dir=elsewhere.folder)
        with made as folder:
            ready_file = Path(folder) / "ready.json"
            options: dict[str, object] = {
                "model-path": model_path, "dtype": dtype, "device": device, "max-running-requests": max_batch,
                "threads": threads, "random-seed": seed, "weight-version": weight_version, "port": port,
                "ready-file": ready_file, "stream-every-s": stream_every_s,
            }  # fmt: skip
            if context_length is not None:
                options["context-length"] = context_length
            if cache_bytes is not None:
                options["cache-bytes"] = cache_bytes
            options |= {} if elsewhere is None else {"host": elsewhere.host}
            command = [sys.executable, "-m", "nanodag.sampler"]
            command += [f"--{name}={value}" for name, value in options.items()]
            command += ["--deterministic"] if deterministic else []
            # Spinning OpenMP threads starve the other process on a small machine.
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
            environment |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
            spawn = cls.spawn if elsewhere is None else elsewhere.spawn
            sampler: ServerProcess = spawn(command, log_path=log_path, env=environment, token=token)
            try:
                sampler.wait_until(ready_file.exists, start_timeout_s)
                host = LOOPBACK if elsewhere is None else elsewhere.address(sampler)
                sampler.url = url = f"http://{host}:{json.loads(ready_file.read_text())['port']}"
                if elsewhere is not None:  # it told by a file that it is there, and the link may be cut
                    sampler.wait_until(lambda: is_healthy(f"{url}/health"), start_timeout_s)
            except BaseException:
                sampler.stop()
                raise
        return sampler


def is_healthy(url: str) -> bool:
    """Whether a server answers there that it serves."""
    try:  # a client costs far more than a connection, which is refused for a minute
        socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 0), timeout=1.0).close()
        answer = httpx.get(url, timeout=5.0, trust_env=False, verify=False)
    except (OSError, httpx.TransportError):
        return False
    return answer.status_code == httpx.codes.OK
