"""Clients that nobody here wrote: the `openai` package and an agent framework, each asking over a socket."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.api.said import said_app
from tests.chat.fake_api import serving

pytestmark = pytest.mark.slow
OUTSIDE = Path(__file__).parent / "outside"


@pytest.fixture(scope="module")
def python():
    """Of an environment of its own: `pip install openai openai-agents`, and its Python in NANODAG_CLIENTS."""
    python = os.environ.get("NANODAG_CLIENTS", "")
    if not Path(python).is_file():
        missing = "NANODAG_CLIENTS names no Python that has openai and openai-agents"
        (pytest.fail if os.environ.get("NANODAG_CI") else pytest.skip)(missing)
    return python


@pytest.fixture
def run(folder, hermes_folder, ids_of, python):
    """run(script, check): the requests that reached the models' engines, by model."""

    def ran(script, check):
        app, backends = said_app(folder, hermes_folder, ids_of)
        with serving(app) as port:
            command = [python, "-I", OUTSIDE / f"{script}.py", f"http://127.0.0.1:{port}", check]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return {name: backend.asked for name, backend in backends.items()}

    return ran


CHECKS = ("models", "chat", "stop", "stream", "logprobs", "completions", "tools", "tools_streamed", "errors")


@pytest.mark.parametrize("check", [*CHECKS, "concurrent"])
def test_the_openai_package_takes_what_is_answered(run, check):
    run("openai_package", check)


def test_what_is_set_in_the_openai_package_reaches_the_engine(run):
    asked = run("openai_package", "choices")["plain"]
    params = [request.params for request in asked[:3]]
    assert [one.sampling_seed for one in params] == [7, 8, 9]
    assert {(one.temperature, one.top_p) for one in params} == {(0.5, 0.9)}


@pytest.mark.parametrize("check", ["whole", "streamed"])
def test_an_agent_calls_its_tool_and_answers_with_the_result(run, check):
    first, second = run("agents_package", check)["hermes"]
    assert len(second.input_ids) > len(first.input_ids)
