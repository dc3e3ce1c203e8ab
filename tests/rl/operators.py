"""Whoever runs samplers by `nanodag sampler serve`, kills them and starts them again."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import httpx

KEY = "of-this-operator-and-nobody-else"


class Operator:
    """Whoever runs the servers. options: of the command, for all of them. host: their address; on: what comes before
    the command, so that it runs there."""

    def __init__(self, folder, model, *options, patience_s=300, host="127.0.0.1", on=()):
        self.key_file, self.log, self.patience_s = folder / "key", folder / "servers.log", patience_s
        self.key_file.write_text(KEY)
        self.host = host
        self.command = [*on, sys.executable, "-c", "from nanodag.cli import main; main()", "sampler", "serve"]
        self.command += [f"--model={model}", f"--host={host}", f"--api-key-file={self.key_file}", "--dtype=float32"]
        self.command += options
        self.running = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.running.values():
            process.kill()
            process.wait()

    def start(self, url=""):
        """A server; again at the same address where one is given."""
        port = urlsplit(url).port or lasting_port()
        with self.log.open("ab") as log:
            process = subprocess.Popen([*self.command, f"--port={port}"], stdout=log, stderr=log)
        self.running[f"http://{self.host}:{port}"] = process
        return f"http://{self.host}:{port}"

    def wait(self):
        """Until all of them answer."""
        deadline = time.monotonic() + self.patience_s
        for url, process in self.running.items():
            while True:
                try:
                    if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                except httpx.TransportError:
                    assert process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
                    time.sleep(0.05)

    def kill(self, url):
        process = self.running.pop(url)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def named(self, *urls):
        return [f"{url} {self.key_file}" for url in urls]


def lasting_port() -> int:
    """A free port that no connection of another process takes while its server is down: below those that are given to
    connections."""
    for port in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a hundred ports are taken")
