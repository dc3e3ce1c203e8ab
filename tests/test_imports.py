"""What may import what: also the light parts stay light when everything below them is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanodag.host.folders import PROJECT

HEAVY = (
    "torch",
    "transformers",
    "deepspeed",
    "datasets",
    "lm_eval",
    "sglang",
    "reasoning_gym",
    "matplotlib",
    "plotly",
    "sympy",
)
SLOW_FOR_HELP = ("pydantic", "yaml", "httpx", "psutil")
LIBRARY = ("nanodag.cli", "nanodag.cli.run", "nanodag.run.build_stage", "nanodag.server.local_server")
CONTROL_PLANE = (
    *LIBRARY,
    *("nanodag.cli.show", "nanodag.cli.serve"),
    *("nanodag.config", "nanodag.store", "nanodag.worker.launch", "nanodag.worker.job"),
    *("nanodag.data.sources", "nanodag.model.model_source", "nanodag.errors", "nanodag.run.preflight_checks"),
    *("nanodag.rl.control.controller", "nanodag.inference.client"),
    *("nanodag.rewards.pool_process", "nanodag.rewards.text_rewards"),
    *("flows.speedrun", "flows.run_stage", "flows.serve", "flows.nightly_eval", "flows.sweep"),
)
IMPORT_ALL = """
import importlib, json, sys
names, found = json.loads(sys.argv[2]), {}
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    found[module] = [name for name in names if name in sys.modules]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded():
    """What one fresh interpreter has loaded after each of these modules, imported one after the other: whoever loads
    too much shows it, and so do those that come after it."""
    names = (*HEAVY, *SLOW_FOR_HELP, "prefect")
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, json.dumps(CONTROL_PLANE), json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {module: set(found) for module, found in json.loads(done.stdout).items()}


@pytest.mark.parametrize("module", CONTROL_PLANE)
def test_the_control_plane_loads_no_heavy_package(loaded, module):
    assert loaded[module].isdisjoint(HEAVY)


@pytest.mark.parametrize("module", LIBRARY)
def test_the_library_loads_no_prefect(loaded, module):
    assert "prefect" not in loaded[module]


def test_help_answers_without_loading_what_commands_need(loaded):
    assert next(iter(loaded)) == "nanodag.cli" and loaded["nanodag.cli"] == set()


def test_the_layers_hold():
    command = [str(Path(sys.executable).parent / "lint-imports")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
