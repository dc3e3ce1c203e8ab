"""What may import what: also the light parts stay light when everything below them is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from nanodag.host.folders import PROJECT

HEAVY = ("torch", "transformers", "deepspeed", "datasets", "lm_eval", "sglang", "reasoning_gym", "matplotlib")


def imported_by(statement, names):
    """Which of these packages a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "module",
    [
        *("flows.speedrun", "flows.run_stage", "flows.serve", "flows.nightly_eval", "flows.sweep"),
        *("nanodag.cli", "nanodag.cli.run", "nanodag.cli.show", "nanodag.cli.use"),
        *("nanodag.config", "nanodag.store", "nanodag.worker.launch", "nanodag.worker.job"),
        *("nanodag.run.build_stage", "nanodag.server.local_server"),
        *("nanodag.data.sources", "nanodag.model.import_model", "nanodag.errors", "nanodag.run.preflight_checks"),
        *("nanodag.rl.control.controller", "nanodag.inference.client"),
    ],
)
def test_the_control_plane_loads_no_heavy_package(module):
    assert imported_by(f"import {module}", HEAVY) == []


@pytest.mark.parametrize(
    "module", ["nanodag.cli", "nanodag.cli.run", "nanodag.run.build_stage", "nanodag.server.local_server"]
)
def test_the_library_loads_no_prefect(module):
    assert imported_by(f"import {module}", ("prefect",)) == []


def test_the_layers_hold():
    command = [str(Path(sys.executable).parent / "lint-imports")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_answers_without_loading_what_commands_need():
    loaded = imported_by("import nanodag.cli", ("pydantic", "yaml", "httpx", "psutil", "prefect"))
    assert loaded == []
