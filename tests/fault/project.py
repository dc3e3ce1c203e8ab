"""A project folder whose stages are the fake ones of tests/fakes, driven by the real `nanodag` command."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests import fake_stages
from tests.fake_stages import FAKES, NO_TRACKERS, SOURCE
from tests.fault.processes import wait_until

CODE = "from nanodag.cli import main; main()"
STAGES = {
    **{name: fake_stages.STAGES[name] for name in ("tokenizer", "pretrain")},
    "eval_base": fake_stages.STAGES["eval_base"] | {"benchmarks": [{"name": "continuation", "source": SOURCE}]},
    "report": {"kind": "report", "inputs": ["pretrain", "eval_base"]},
}


class Project:
    """A folder with a pipeline of fake stages, and the command run in it. server: its settings. environment: more of
    it for the command."""

    def __init__(
        self,
        folder: Path,
        *,
        server: Mapping[str, Any] | None = None,
        stages: Mapping[str, Any] = STAGES,
        **environment: str,
    ) -> None:
        self.folder = folder
        self._environment = environment
        (folder / "orders").mkdir(parents=True)
        (folder / "text.txt").write_text("hello\n" * 100)
        with socket.socket() as probe:  # one that no other project's server, started beside this one, is about to take
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        preset = {
            "stages": dict(stages),
            "tracking": NO_TRACKERS,
            "server": {"port": port, "start_timeout_s": 600, **(server or {})},
        }
        (folder / "pipeline.yaml").write_text(yaml.safe_dump({"default": "tiny", "presets": {"tiny": preset}}))

    def command(
        self, *arguments: str, prefix: Sequence[str] = (), code: str = CODE, **environment: str
    ) -> subprocess.Popen:
        """The command under way. code: what runs it. environment: more of it."""
        environment = self.environment() | environment
        return subprocess.Popen(
            [*prefix, sys.executable, "-c", code, *arguments],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def environment(self) -> dict[str, str]:
        """The command's, and that of whatever is to see the fake stages."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "NANODAG_"))}
        environment.update(PYTHONPATH=str(FAKES), FAKE_ORDERS=str(self.folder / "orders"))
        environment.update(self._environment)
        return environment | {"NANODAG_CACHE": str(self.folder / "cache")}

    def run(self, *arguments: str, timeout_s: float = 900.0, prefix: Sequence[str] = ()) -> tuple[int, str]:
        """Exit code and output of the command. prefix: a command that runs it."""
        process = self.command(*arguments, prefix=prefix)
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output

    def tell(self, stage: str, order: str) -> None:
        (self.folder / "orders" / stage).write_text(order)

    def record(self, run: str) -> dict:
        path = self.folder / "store" / "runs" / f"{run}.json"
        return json.loads(path.read_text()) if path.exists() else {"stages": {}}

    def serve_log(self) -> str:
        return (self.folder / "store" / "prefect" / "serve.log").read_text()[-5000:]

    def server(self) -> dict:
        return json.loads((self.folder / "store" / "prefect" / "server.json").read_text())

    def wait_for_step(self, run: str, stage: str, step: int, timeout_s: float = 300.0) -> Path:
        """The workspace of a stage, once it has written that step's metrics."""

        def reached() -> Path | None:
            key = self.record(run)["stages"].get(stage, {}).get("key", "none")
            path = self.folder / "store" / "work" / key / "metrics.jsonl"
            return path.parent if path.exists() and f'"step": {step}' in path.read_text() else None

        return wait_until(reached, timeout_s, every_s=0.05)
