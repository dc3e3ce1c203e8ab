"""Whoever runs samplers by `nanodag sampler serve`, kills them and starts them again."""

import os
import signal
import subprocess
import sys
import time
from urllib.parse import urlsplit

import httpx

from nanodag.host.ports import free_port

KEY = "of-this-operator-and-nobody-else"


class Operator:
    """Whoever runs the servers. options: of the command, for all of them. host: their address; on: what comes before
    the command, so that it runs there."""

    def __init__(self, folder, model, *options, patience_s=300, host="127.0.0.1", on=()):
        self.key_file, self.log, self.patience_s = folder / "key", folder / "servers.log", patience_s
        self.key_file.write_text(KEY)
        self.host = host
        self.command = [*on, sys.executable, "-c", "from nanodag.cli import main; main()", "sampler", "serve"]
        self.command += [
            f"--model={model}",
            f"--host={host}",
            f"--api-key-file={self.key_file}",
            "--dtype=float32",
            *options,
        ]
        self.running = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.running.values():
            process.kill()
            process.wait()

    def start(self, url=""):
        """A server; again at the same address where one is given."""
        port = urlsplit(url).port or free_port()
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
