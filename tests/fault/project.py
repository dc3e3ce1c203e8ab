"""A project folder whose stages are the fake ones of tests/fakes, driven by the real `nanodag` command."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nanodag.host.ports import free_port
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
    """A folder with a pipeline of fake stages, and the command run in it. server: its settings. more: of the
    command's environment."""

    def __init__(
        self, folder: Path, *, server: Mapping[str, Any] | None = None, stages: Mapping[str, Any] = STAGES, **more: str
    ) -> None:
        self.folder, self._environment = folder, more
        (folder / "orders").mkdir(parents=True)
        (folder / "text.txt").write_text("hello\n" * 100)
        # A port of its own: no other project's server, started beside this one, takes it.
        settings = {"port": free_port(), "start_timeout_s": 600, **(server or {})}
        preset = {"stages": dict(stages), "tracking": NO_TRACKERS, "server": settings}
        (folder / "pipeline.yaml").write_text(yaml.safe_dump({"default": "tiny", "presets": {"tiny": preset}}))

    def command(
        self, *arguments: str, prefix: Sequence[str] = (), code: str = CODE, **environment: str
    ) -> subprocess.Popen:
        """The command under way. prefix: a command that runs it. code: what runs it. environment: more of it."""
        how = {"cwd": self.folder, "env": self.environment() | environment, "text": True}
        command = [*prefix, sys.executable, "-c", code, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)

    def environment(self) -> dict[str, str]:
        """The command's, and that of whatever is to see the fake stages."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "NANODAG_"))}
        own = {"PYTHONPATH": FAKES, "FAKE_ORDERS": self.folder / "orders", "NANODAG_CACHE": self.folder / "cache"}
        return environment | {name: str(path) for name, path in own.items()} | self._environment

    def run(self, *arguments: str, timeout_s: float = 900.0) -> tuple[int, str]:
        """Exit code and output of the command."""
        process = self.command(*arguments)
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output

    def done(self, *arguments: str, timeout_s: float = 900.0) -> str:
        """Output of the command, which succeeds."""
        code, output = self.run(*arguments, timeout_s=timeout_s)
        assert code == 0, output
        return output

    def tell(self, stage: str, order: str) -> None:
        (self.folder / "orders" / stage).write_text(order)

    def record(self, run: str) -> dict:
        path = self.folder / "store" / "runs" / f"{run}.json"
        return json.loads(path.read_text()) if path.exists() else {"stages": {}}

    def server(self) -> dict:
        return json.loads((self.folder / "store" / "prefect" / "server.json").read_text())

    def wait_for_step(self, run: str, stage: str, step: int, timeout_s: float = 300.0) -> Path:
        """The workspace of a stage, once it has written that step's metrics."""

        def reached() -> Path | None:
            key = self.record(run)["stages"].get(stage, {}).get("key", "none")
            path = self.folder / "store" / "work" / key / "metrics.jsonl"
            return path.parent if path.exists() and f'"step": {step}' in path.read_text() else None

        return wait_until(reached, timeout_s, every_s=0.05)
