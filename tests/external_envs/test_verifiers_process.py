"""The process that runs environments of verifiers, with a fake of it; the real one is in test_verifiers.py."""

import asyncio
import re
import sys
from contextlib import suppress

import psutil
import pytest

from nanodag.children.forks import EpisodeFailed, EpisodeLost
from nanodag.errors import ConfigError, MissingTool
from nanodag.external_envs import verifiers_process
from nanodag.external_envs.verifiers_process import VERIFIERS, VerifiersProcess, block_of, find_python
from tests.external_envs.fake_verifiers_server import FAKE
from tests.fault.processes import is_running, wait_until


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setenv(VERIFIERS.variable, sys.executable)
    monkeypatch.setattr(verifiers_process, "SERVER", FAKE)
    monkeypatch.setattr(verifiers_process, "HEALTH_TIMEOUT_S", 0.3)
    monkeypatch.setattr(verifiers_process, "LOOK_EVERY_S", 0.1)


def with_process(work, options=None, **limits):
    """Run `work(do)`, where `do` asks a process of the environment `m` for a rollout that does this."""

    async def run():
        process = VerifiersProcess(block_of("m", options or {}), **limits)
        try:
            return await work(lambda what: process.rollout({"do": what}, base_url="", api_key="", model=""))
        finally:
            await process.close()

    return asyncio.run(run())


def test_a_rollout_that_kills_the_process_fails_with_its_last_words_and_the_next_has_a_new_one(fake):
    async def work(do):
        first = await do("answer")
        with pytest.raises(EpisodeFailed, match=r"^TaskError: no$"):
            await do("fail")
        assert (await do("answer"))["components"] == first["components"], "the same process"
        with pytest.raises(EpisodeFailed, match=r"(?s)it ended with code 3; the end of its log:\na last word"):
            await do("die")
        return first, await do("answer")

    first, last = with_process(work)
    assert first["reward"] == last["reward"] == 0.5 and first["components"] != last["components"]


def test_a_process_that_hangs_is_ended_and_one_whose_rollout_is_given_up_is_not(fake):
    async def work(do):
        first = await do("answer")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(do("wait"), 0.1)
        second = await do("answer")
        command_line = " ".join(psutil.Process(second["components"]["pid"]).cmdline())
        assert FAKE.name in command_line and "taskset" not in command_line, "anybody may read it"
        with pytest.raises(EpisodeLost, match="it ended with code -9"):
            await do("block")
        return [one["components"]["pid"] for one in (first, second, await do("answer"))]

    before, beside, after = with_process(work)
    assert before == beside != after


def test_an_environment_that_cannot_start_is_an_error_of_the_config_and_is_not_tried_again(fake):
    async def work(do):
        return await asyncio.gather(do("answer"), do("answer"), return_exceptions=True)

    first, second = with_process(work, {"colour": 1})
    assert isinstance(first, ConfigError) and second is first
    assert re.search(r"(?s)environment 'm' cannot be used.*ended with code 1.*colour", str(first))


def test_what_a_process_leaves_behind_ends_with_it_and_one_that_takes_too_much_memory_is_ended(fake, monkeypatch):
    monkeypatch.setattr(verifiers_process, "HEALTH_TIMEOUT_S", 20.0)  # memory alone is to end it

    async def work(do):
        with pytest.raises(EpisodeLost, match=r"(?s)it ended with code 3; .*left \d+") as lost:
            await do("leave")
        with pytest.raises(EpisodeLost, match=r"code -9, as it took .* of memory, and max_bytes allows"):
            await do("leak")
        return int(str(lost.value).split()[-1])

    left = with_process(work, max_bytes=128 << 20)
    assert not is_running(left)


def test_a_rollout_that_is_asked_of_a_process_that_is_ending_has_a_new_one(fake, monkeypatch):
    monkeypatch.setattr(verifiers_process, "LOOK_EVERY_S", 60.0)

    async def work(do):
        first = await do("answer")
        server = psutil.Process(first["components"]["pid"])
        reaper = server.parent()
        reaper.suspend()  # so that the process has no exit code yet
        wait_until(lambda: reaper.status() == psutil.STATUS_STOPPED)
        server.kill()
        wait_until(lambda: server.status() == psutil.STATUS_ZOMBIE)
        second = asyncio.ensure_future(do("answer"))
        await asyncio.wait({second}, timeout=0.2)
        with suppress(psutil.NoSuchProcess):  # it was given up first, as it did not end in time
            reaper.resume()
        return first, await second

    first, second = with_process(work)
    assert first["components"] != second["components"]


def test_options_go_into_the_block_by_their_dotted_names():
    options = {"agent.max_turns": 4, "taskset.size": 3, "id": "best-of-n"}
    assert block_of("m", options) == {"taskset": {"id": "m", "size": 3}, "agent": {"max_turns": 4}, "id": "best-of-n"}


def test_a_missing_environment_is_named_with_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.delenv(VERIFIERS.variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingTool, match=r"nanodag env install verifiers\. .*NANODAG_VERIFIERS_PYTHON"):
        find_python()
    assert "verifiers==0.4.0" in VERIFIERS.pins
