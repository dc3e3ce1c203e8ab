"""Environments: what they answer, the processes that they run in, and the loop of a sample. The sampler is a fake."""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nanodag.errors import ConfigError, StageFailed
from nanodag.rl.environments import fork_server
from nanodag.rl.environments.observations import Earned, heard, metrics_of, number, roles_of, tools_of
from nanodag.rl.environments.processes import EnvironmentFailed, EnvironmentProcess, Limits
from tests.rl import worlds

LIMITS = Limits(step_s=2.0, cpu_s=20, max_bytes=worlds.MAX_BYTES, max_processes=8)
NO_RECORD = {"prompt_id": "p", "messages": [{"role": "user", "content": "hi"}], "answer": ""}


def world(name: str, **options) -> str:
    return f"environment:{worlds.__name__}:{name}"


@pytest.fixture(scope="module")
def hostile():
    process = EnvironmentProcess(f"{worlds.__name__}:Hostile", {}, LIMITS)
    yield process
    process.close()


async def played(process: EnvironmentProcess, way: str, steps: int = 3) -> list[dict]:
    episode = process.episode()
    try:
        answers = [await episode.reset(seed=1, record={**NO_RECORD, "answer": way})]
        for _ in range(steps):
            answers.append(await episode.step(text="a", calls=[], is_cut=False, role=""))
        return answers
    finally:
        episode.close()


REASONS = {
    "raises": "KeyError: 'none'",
    "exits": "SystemExit: 3",
    "dies": "ended with code 7",
    "sleeps": "longer than 2 s",
    "leaks": "MemoryError",
    "forks": "more than 8 processes",
    "floods": "more than 4194304 bytes",
    "closes": "ended with code 1",
    "crashes": "SIGSEGV",
    "answers nothing": "step must return",
    "answers a set": "set is not JSON serializable",
    "rewards NaN": "not JSON compliant",
}


def test_an_episode_that_goes_wrong_says_how_leaves_no_process_and_touches_no_other(hostile):
    async def all_of_them():
        ways = ["fine", *REASONS, "leaves a daemon", "fine"]
        return await asyncio.gather(*(played(hostile, way) for way in ways), return_exceptions=True)

    first, *found, daemon, last = asyncio.run(all_of_them())
    assert first == last and first[-1]["done"] is True and daemon[-1]["observation"] == "ok"
    for outcome, (way, reason) in zip(found, REASONS.items(), strict=True):
        assert isinstance(outcome, EnvironmentFailed) and reason in str(outcome), (way, outcome)
    pid = hostile._process.pid
    deadline = time.monotonic() + 20
    while (left := list(fork_server.descendants(pid))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_what_a_process_starts_ends_with_it_even_when_it_is_killed_first(hostile):
    process = EnvironmentProcess(f"{worlds.__name__}:Hostile", {}, LIMITS)
    asyncio.run(played(process, "leaves a daemon", steps=1))
    before = process._process.pid
    os.kill(before, 9)
    assert asyncio.run(played(process, "fine"))[-1]["done"] is True  # another one took its place
    assert process._process.pid != before
    process.close()
    assert not Path(f"/proc/{before}").exists()


def test_each_episode_begins_with_the_environment_as_it_was_made_and_with_the_same_random_numbers():
    process = EnvironmentProcess(f"{worlds.__name__}:Echo", {"rounds": 5}, LIMITS)
    one, other = (asyncio.run(played(process, "")) for _ in range(2))
    process.close()
    assert one == other and one[1]["info"]["components"]["noise"] != one[2]["info"]["components"]["noise"]


@pytest.mark.parametrize(
    ("path", "options", "reason"),
    [
        (f"{worlds.__name__}:Unmade", {"how": "raises"}, "RuntimeError: no luck"),
        (f"{worlds.__name__}:Unmade", {"how": "dies"}, "ended with code 7 when it was made"),
        (f"{worlds.__name__}:Unmade", {"how": ""}, "none of them is trained"),
        (f"{worlds.__name__}:Echo", {"turns": 3}, "unexpected keyword argument 'turns'"),
        (f"{worlds.__name__}:Nothing", {}, "has no attribute 'Nothing'"),
    ],
)
def test_an_environment_that_cannot_be_made_is_an_error_of_the_config(path, options, reason):
    process = EnvironmentProcess(path, options, LIMITS)
    for _ in range(2):  # the second time it is not tried again
        with pytest.raises(ConfigError, match=reason):
            process.episode()
    assert process._process is None


def hear(found, **given):
    return heard(found, **({"roles": ["a", "b"], "speaker": "a", "call_ids": (), "may_be_none": False} | given))


def test_an_observation_is_a_text_texts_or_messages_for_one_role():
    assert hear("hi").messages == [{"role": "user", "content": "hi"}]
    assert hear("4", call_ids=["c0"]).messages == [{"role": "tool", "tool_call_id": "c0", "content": "4"}]
    assert [one["tool_call_id"] for one in hear(["4", "5"], call_ids=["c0", "c1"]).messages] == ["c0", "c1"]
    mixed = [{"role": "tool", "content": "4"}, {"role": "user", "content": "go on"}]
    assert [one["role"] for one in hear(mixed, call_ids=["c0"]).messages] == ["tool", "user"]
    told = hear({"to": "b", "messages": "judge", "anew": True}, call_ids=["c0"])
    assert (told.role, told.is_anew, told.messages) == ("b", True, [{"role": "user", "content": "judge"}])
    assert hear(None, may_be_none=True).messages is None


@pytest.mark.parametrize(
    ("found", "given", "reason"),
    [
        (3, {}, "an observation is a text"),
        (None, {}, "an observation is a text"),
        ([], {}, "an observation is a text"),
        (["4"], {"call_ids": ["c0", "c1"]}, "2 calls were answered by 1 texts"),
        ({"to": "c", "messages": "x"}, {}, "roles are a, b"),
        ({"messages": "x"}, {}, "an observation has `to`"),
        ([{"role": "assistant", "content": "x"}], {}, "a message has a role"),
        ([{"role": "user", "content": 3}], {}, "a message has a role"),
        ([{"role": "tool", "content": "x"}], {}, "more messages of the role tool than calls"),
    ],
)
def test_what_is_no_observation_is_refused(found, given, reason):
    with pytest.raises(ValueError, match=reason):
        hear(found, **given)


def test_rewards_add_up_by_role_and_only_finite_numbers_are_taken():
    earned = Earned()
    earned.add(0.5, {"components": {"part": 1.0}}, ["a", "b"])
    earned.add({"a": 0.25, "b": -1}, {"components": {"part": 2.0}}, ["a", "b"])
    assert earned.by_role == {"a": 0.75, "b": -1.0} and earned.components == {"part": 3.0}
    for reward in (float("nan"), "1", True, None, {"c": 1.0}):
        with pytest.raises(ValueError, match="the reward|the role 'c'"):
            earned.add(reward, {}, ["a", "b"])
    for wrong in (lambda: metrics_of([1]), lambda: tools_of([{"type": "x"}]), lambda: roles_of({"": True})):
        with pytest.raises(ValueError):
            wrong()
    assert number(2, "x") == 2.0 and roles_of(None) == {"": True}
