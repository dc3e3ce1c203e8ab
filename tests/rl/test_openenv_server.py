"""`generate: openenv:URL` against the server of the `openenv` package itself, in an environment that has it."""

import json
import os
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanodag.host.folders import PROJECT
from nanodag.host.ports import free_port
from nanodag.rl.environments import openenv_session
from nanodag.rl.environments.environment import Action, ToolCall
from nanodag.rl.environments.openenv_session import OpenEnv

pytestmark = pytest.mark.slow
VARIABLE = "NANODAG_OPENENV_PYTHON"
RECORD = {"messages": [{"role": "user", "content": "Play."}], "metadata": {"reset": {"level": 2}}}
CLIENT = """
import json, sys
from openenv import GenericEnvClient
with GenericEnvClient(base_url=sys.argv[1]).sync() as client:
    said = [client.reset(seed=5, level=2)] + [client.step({"guess": str(n)}) for n in range(10)]
    print(json.dumps([[one.observation["text"], one.reward or 0.0, one.done] for one in said]))
"""


@pytest.fixture(scope="module")
def python():
    """The interpreter that has openenv. Without one the tests are skipped, but fail where NANODAG_CI is set."""
    found = os.environ.get(VARIABLE, "")
    if not found and not os.environ.get("NANODAG_CI"):
        pytest.skip(f"{VARIABLE} names no interpreter that has openenv")
    assert Path(found).is_file(), f"{VARIABLE} names no interpreter: {found!r}"
    return found


@pytest.fixture(scope="module")
def server(python, tmp_path_factory):
    """Its address; each of its environments has a path."""
    port, log = free_port(), tmp_path_factory.mktemp("openenv") / "log"
    command = [python, "-m", "uvicorn", "tests.openenv_server:app", "--port", str(port), "--log-level", "warning"]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=PROJECT, stdout=stream, stderr=stream)
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/guess/health", timeout=10).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)


def begun(url, **options):
    game = OpenEnv(url=url, **options)
    return game, game.reset(seed=5, record=RECORD)


def test_an_episode_is_what_the_packages_own_client_sees(server, python):
    def one(number):
        game, heard = begun(f"{server}/guess")
        first = [heard[0]["content"].split("\n\n")[1], 0.0, False]
        return [first, *(list(game.step(Action(str(n)))[:3]) for n in range(10))]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(one, range(8)))
    told = subprocess.run([python, "-c", CLIENT, f"{server}/guess"], capture_output=True, text=True, check=True)
    assert found == [json.loads(told.stdout)] * 8 and sum(reward for _, reward, _ in found[0]) == 1.0


def test_wrong_actions_are_answered_and_an_environment_that_raises_fails_the_episode(server):
    game, _ = begun(f"{server}/tower")
    assert game.tools()[0]["function"]["parameters"]["$defs"]["Direction"]["enum"] == ["up", "down"]
    text, reward, done, _ = game.step(Action("", (ToolCall("act", {"to": "left"}),)))
    assert text.startswith("error: to: Input should be 'up' or 'down'") and (reward, done) == (0.0, False)
    found = game.step(Action("", (ToolCall("act", {"to": "up"}),)))
    assert found == ('{"metadata": {"floor": 1}, "text": "went up"}', 0.5, False, {})
    with pytest.raises(ValueError, match=r"refuses step: .*boom"):
        begun(f"{server}/guess")[0].step(Action("crash"))


def test_the_tools_of_an_mcp_environment_are_listed_and_called(server):
    game, _ = begun(f"{server}/words")
    (tool,) = game.tools()
    assert tool["function"]["name"] == "large" and tool["function"]["parameters"]["required"] == ["word"]
    answers = game.step(Action("", (ToolCall("large", {"word": "a"}), ToolCall("large", {"letter": "a"}))))[0]
    assert answers[0] == "A" and answers[1].startswith("error: ") and "word" in answers[1]


def test_a_server_with_one_place_is_waited_for_and_named_when_it_stays_taken(server, monkeypatch):
    first, _ = begun(f"{server}/one")
    monkeypatch.setattr(openenv_session, "FREE_TIMEOUT_S", 0.3)
    with pytest.raises(ValueError, match="allows 1 sessions at once"):
        begun(f"{server}/one")
    monkeypatch.setattr(openenv_session, "FREE_TIMEOUT_S", 30.0)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(begun, f"{server}/one")
        time.sleep(0.3)
        first._connection.close()
        assert second.result(60)[1][0]["content"] == "Play.\n\nlevel 2"
