"""Whatever plays a sample, an environment's class, an agent or a function, goes wrong alone: one matrix of players and
ways."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from tests.fault.processes import alive, wait_until
from tests.rl import worlds
from tests.rl.turns import rollouts_of, speaking

LIMITS = {"step_s": 15.0, "max_bytes": worlds.MAX_BYTES, "max_processes": 8, "max_turns": 4}
PLAYERS = {
    "class": {"name": f"environment:{worlds.__name__}:Hostile", "options": LIMITS},
    "agent": {"name": f"agent:{worlds.__name__}:agent", "options": {"seconds": 15.0, "max_bytes": worlds.MAX_BYTES}},
    "function": {"name": f"{worlds.__name__}:function", "timeout_s": 15.0},
}
ALL = {
    "raises": "KeyError: 'none'",
    "exits": "SystemExit: 3",
    "dies": "rocess ended with code 7",
    "is killed": "rocess was ended by SIGKILL",
    "crashes": "SIGSEGV",
    "sleeps": "longer than 15 s",
    "says why": "RuntimeError: told",
}
OWN = {  # "" where it does no harm
    "class": {
        "leaves a daemon in step": "",
        "leaks": "MemoryError",
        "forks": "more than 8 processes",
        "floods": "more than 4194304 bytes",
        "closes": "ended with code 1",
        "recurses": "RecursionError",
        "answers a set": "set is not JSON serializable",
        "rewards NaN": "not JSON compliant",
        "answers nothing": "found None",
        "answers a number": "an observation is a text",
        "rewards a text": "the reward",
        "is done perhaps": "done",
        "knows no such role": "an observation is to 'nobody'",
        "speaks for the policy": "a message has a role",
    },
    "agent": {
        "leaves a thread": "",
        "guesses keys": "refused with [401]",
        "guesses keys of rewards": "refused with [401]",
        "calls after the end": "left",
        "asks nonsense": "refused with [4",
        "asks for many": "KeyError: 'none'",
        "says too much": "refused with [4",
        "reports nonsense": "refused with [4",
        "asks for what is not there": "404]",
        "never asks": "the agent asked for no answer, so there is nothing to train",
        "hangs up": "KeyError: 'none'",
        "rewards infinity": "ValueError: ",
        "rewards a table": "ValueError: the reward is {'reward': 1}",
    },
    "function": {
        "spins": "longer than 15 s without asking",
        "waits": "longer than 15 s without asking",
        "gives no turn": "no turn added to",
        "gives junk": "must return a Sample",
        "gives an unknown token": f"token id {1 << 20}",
        "forgets the prompt": "begin with the prompt's own span",
        "gives too much": "are the limits",
        "gives branches of branches": "a branch has branches",
        "gives a branch without a turn": "no turn added to",
        "trains no role without a name": "must say its role",
        "trains nothing": "no role of a sample is trained",
        "reports NaN": "Out of range float",
    },
}


def played(encoding, ways: list[str], player: str, **limits):
    """A rollout for each way."""
    values = {"generate": PLAYERS[player] | limits, "samples_per_prompt": 1, "max_new_tokens": 64}
    values |= {"sampler": {"context": 256, "max_batch": 16}}
    sampler = speaking(encoding, lambda text: "a<|end|>")
    return rollouts_of(encoding.folder, sampler, [{"answer": way} for way in ways], **values)


def assert_none_is_left(seconds: float) -> None:
    """Fail when a process below a fork server outlives this time."""
    servers = [one for one in psutil.Process().children() if "fork_server" in " ".join(one.cmdline())]
    assert servers, "there is nothing to look at"
    wait_until(lambda: not alive(child.pid for one in servers for child in one.children(recursive=True)), seconds)


def same(rollout, other) -> bool:
    return rollout == replace(other, group_id=rollout.group_id, prompt_id=rollout.prompt_id)


@pytest.mark.parametrize("player", PLAYERS)
def test_whatever_plays_a_sample_fails_alone_with_the_reason_and_its_last_words_and_leaves_nothing(encoding, player):
    reasons = ALL | OWN[player]
    fine, *others, last = played(encoding, ["fine", *reasons, "fine"], player)
    assert_none_is_left(20)
    assert fine.reward is not None and fine.finish_reason != "error" and same(last, fine)
    found = dict(zip(reasons, others, strict=True))
    failed = {way: rollout for way, rollout in found.items() if rollout.reward is None}
    assert set(failed) == {way for way, why in reasons.items() if why}
    assert {rollout.finish_reason for rollout in failed.values()} == {"error"}
    told = {way: rollout.metadata["generate_error"] for way, rollout in failed.items()}
    assert not {way: why for way, why in told.items() if reasons[way] not in why}
    assert failed["says why"].metadata["last_words"] == "2\n3\n4\n5\n6"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_agents_that_go_wrong_end_no_run_and_touch_no_other_sample(encoding):
    draw = random.Random(7)
    names = [*worlds.ways(), *worlds.calls(SimpleNamespace(api_key="k"))]
    mixed = ["fine"] * 50 + names + [draw.choice(names) for _ in range(200 - len(names))]
    draw.shuffle(mixed)
    limits = {"options": {"seconds": 10.0, "max_bytes": worlds.MAX_BYTES}}
    (alone,) = played(encoding, ["fine"], "agent", **limits)
    rollouts = played(encoding, mixed, "agent", **limits)
    assert_none_is_left(60)
    for way, rollout in zip(mixed, rollouts, strict=True):
        if way == "asks too much":
            assert rollout.finish_reason == "length" and rollout.reward is not None
        else:
            assert same(rollout, alone) if way == "fine" else rollout.reward is None, way


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_episodes_that_go_wrong_end_no_run_and_touch_no_other_sample(encoding):
    mixed = ["fine"] * 250 + worlds.drawn(1000, seed=7)
    random.Random(7).shuffle(mixed)
    limits = {"options": {"step_s": 10.0, "cpu_s": 2, "max_bytes": 256 << 20, "max_turns": 6}}
    (alone,) = played(encoding, ["fine"], "class", **limits)
    rollouts = played(encoding, mixed, "class", **limits)
    assert_none_is_left(60)
    harmless, failed = Counter(), Counter()
    for answer, rollout in zip(mixed, rollouts, strict=True):
        if answer == "fine":
            assert same(rollout, alone)
        elif rollout.finish_reason == "error":
            assert rollout.metadata["generate_error"].startswith(("reset", "step", "end", "ValueError: ")), rollout
            failed[answer.partition(" in ")[0]] += 1
        else:
            harmless[answer] += 1
    assert set(failed) == set(worlds.ways()) and sum(failed.values()) + sum(harmless.values()) == 1000
    assert set(harmless) <= {"leaves a daemon in step", "never ends in step", "answers nothing in reset"}
