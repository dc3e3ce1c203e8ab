"""Environments of tests: some that work, and one, an agent and a function that go wrong in every way that we know.

They run in processes of their own, which find them by this module's name.
"""

import asyncio
import json
import os
import random
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.rl import agents

MAX_BYTES = 512 << 20  # of an episode, where a test bounds it


class Echo:
    """Says again what it hears, `rounds` times; a reward of 0.25 a turn, and parts of it."""

    def __init__(self, *, rounds: int = 2, greeting: str = "") -> None:
        self.rounds, self.greeting = rounds, greeting

    def reset(self, *, seed, record):
        self.seed, self.left = seed, self.rounds
        return self.greeting or None

    def step(self, action):
        self.left -= 1
        info = {"components": {"told": 0.25, "noise": random.random()}}
        return f"{action.text}!", 0.25, self.left == 0, info

    def metrics(self):
        return {"left": self.left, "seed": float(self.seed % 1000)}


class Shop:
    """One tool that takes a text; an answer without a call ends it. Right is what the last call found."""

    def tools(self):
        properties = {"properties": {"goods": {"type": "string"}}, "required": ["goods"]}
        return [{"type": "function", "function": {"name": "price", "parameters": {"type": "object", **properties}}}]

    def reset(self, *, seed, record):
        self.found = ""

    def step(self, action):
        if action.calls:
            self.found = str(len(action.calls[0].arguments["goods"]))
            return self.found, 0.0, False, {}
        return "", float(action.text == self.found), True, {}


class Court:
    """A solver that is trained and a judge that may not be: the judge's word is the solver's reward."""

    def __init__(self, *, judge_is_trained: bool = False) -> None:
        self.roles = {"solver": True, "judge": judge_is_trained}

    def reset(self, *, seed, record):
        self.tries = 0
        return {"to": "solver", "messages": "go"}

    def step(self, action):
        if action.role == "solver":
            return {"to": "judge", "messages": f"is {action.text} good", "anew": True}, 0.0, False, {}
        self.tries += 1
        is_good = action.text == "yes"
        rewards = {"solver": float(is_good), "judge": 0.125}
        return {"to": "solver", "messages": "once more"}, rewards, is_good or self.tries == 3, {}


def ways() -> dict[str, Callable[[], Any]]:
    """Ways to go wrong in a step, by name: each returns what the step answers, if it comes to that."""
    fine = ("ok", 0.0, False, {})
    return {
        "raises": lambda: {}["none"],
        "says why": lambda: [print(number) for number in range(7)] and _raised("told"),
        "exits": lambda: sys.exit(3),
        "dies": lambda: os._exit(7),
        "sleeps": lambda: time.sleep(3600),
        "spins": _spin,
        "leaks": _leak,
        "forks": lambda: [os.fork() or time.sleep(3600) for _ in range(40)] and time.sleep(3600),
        "leaves a daemon": lambda: _daemon() or fine,
        "floods": lambda: ("x" * (16 << 20), 0.0, False, {}),
        "prints": _print,
        "closes": lambda: os.closerange(0, 256) or fine,
        "writes over it": lambda: [_scribble(number) for number in range(3, 400)] and fine,
        "is killed": lambda: os.kill(os.getpid(), 9) or time.sleep(60),
        "crashes": lambda: __import__("ctypes").string_at(0),
        "recurses": lambda: _deep(0),
        "answers nothing": lambda: None,
        "answers a set": lambda: ({1}, 0.0, False, {}),
        "answers a number": lambda: (3, 0.0, False, {}),
        "rewards NaN": lambda: ("ok", float("nan"), False, {}),
        "rewards a text": lambda: ("ok", "much", False, {}),
        "is done perhaps": lambda: ("ok", 0.0, "perhaps", {}),
        "knows no such role": lambda: ({"to": "nobody", "messages": "ok"}, 0.0, False, {}),
        "speaks for the policy": lambda: ([{"role": "assistant", "content": "ok"}], 0.0, False, {}),
        "never ends": lambda: fine,
    }


WHEN = ("reset", "step", "metrics")


def drawn(count: int, seed: int) -> list[str]:
    """So many episodes that go wrong, as Hostile takes them: a way and when, each drawn."""
    draw, names = random.Random(seed), list(ways())
    return [f"{draw.choice(names)} in {draw.choice(WHEN)}" for _ in range(count)]


class Hostile:
    """An episode goes wrong in the way and at the time that the prompt's answer names, as `drawn` has them; without a
    time in the second step. With any other answer it is an Echo's."""

    def reset(self, *, seed, record):
        way, _, when = record["answer"].partition(" in ")
        self.way, self.when, self.left = ways().get(way), when or "step", 3
        return self.way() if self._is_time("reset") else None

    def step(self, action):
        self.left -= 1
        if self.left < 2 and self._is_time("step"):
            return self.way()
        return f"{action.text}!", 0.25, self.left == 0, {}

    def metrics(self):
        return self.way() if self._is_time("metrics") else {}

    def _is_time(self, now):
        return self.way is not None and self.when == now


def calls(task) -> dict[str, Callable[[], Any]]:
    """What an agent does wrong with the API, by name; each returns what its function does."""
    own = task.api_key
    guessed = [own[:-1] + "x", own[::-1], "nanodag-", "Bearer", own.upper(), "nanodag-" + "A" * 43]
    bodies = [b"", b"{" * 9, b"[]", b"{}", b"null", b'{"messages": 3}', b'{"messages": [{"role": "tool"}]}']
    many = json.dumps({"messages": [agents.user("?")], "n": 128, "temperature": 9}).encode()
    rewards = [b'{"reward": NaN}', b'{"reward": "1"}', b'{"x": 1}']
    return {
        "guesses keys": lambda: _told([_code(task, _HELLO, key=key) for key in guessed]),
        "guesses keys of rewards": lambda: _told([_code(task, b'{"reward": 9}', "/reward", key) for key in guessed]),
        "calls after the end": lambda: _late(task),
        "asks nonsense": lambda: _told([_code(task, body) for body in bodies]),
        "asks for many": lambda: [_code(task, many)] and {}["none"],
        "says too much": lambda: _told([_code(task, b'{"messages": "' + b"x" * (1 << 22) + b'"}')]),
        "asks too much": lambda: _told([_code(task, json.dumps({"messages": [agents.user("x" * 100_000)]}).encode())]),
        "reports nonsense": lambda: _told([_code(task, reward, "/reward") for reward in rewards]),
        "asks for what is not there": lambda: _told(
            [_code(task, None, path, method="GET") for path in ("/x", "/../reward", "/models/" + "x" * 5000)]
        ),
        "never asks": lambda: 1.0,
        "hangs up": lambda: [_hung_up(task) for _ in range(5)] and {}["none"],
        "rewards infinity": lambda: float("inf"),
        "rewards a table": lambda: {"reward": 1},
    }


def agent(task):
    """Asks once and is worth 0.5, unless the prompt's answer names another way, which comes after the call."""
    way = task.record["answer"]
    if way == "never asks":
        return 1.0
    if _code(task, _HELLO) != 200:
        raise RuntimeError("the first call was refused")
    if way == "leaves a thread":
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    return 0.5 if way in ("fine", "leaves a thread") else {**ways(), **calls(task)}[way]()


def samples(before, sample) -> dict[str, Callable[[], Any]]:
    """What a function gives back that cannot be trained, by name. before: the sample without a turn."""
    return {
        "gives no turn": lambda: before,
        "gives junk": lambda: "a string",
        "gives an unknown token": lambda: sample.with_tool([1 << 20]),
        "forgets the prompt": lambda: replace(sample, spans=sample.spans[1:]),
        "gives too much": lambda: sample.with_tool([1] * 300),
        "gives branches of branches": lambda: replace(sample, branches=(replace(sample, branches=(sample,)),)),
        "gives a branch without a turn": lambda: replace(sample, branches=(sample.beginning([1]),)),
        "trains no role without a name": lambda: replace(sample, is_trained=False),
        "trains nothing": lambda: replace(sample, role="judge", is_trained=False),
        "reports NaN": lambda: replace(sample, reward=float("nan")),
    }


async def function(sampler, sample):
    """One turn that is worth 0.5, unless the prompt's answer names another way, which comes after the turn."""
    before, way = sample, sample.record["answer"]
    sample = await sampler.turn(sample)
    if way == "waits":
        await asyncio.sleep(3600)
    return replace(sample, reward=0.5) if way == "fine" else {**ways(), **samples(before, sample)}[way]()


_HELLO = json.dumps({"model": "policy", "messages": [agents.user("hi")]}).encode()


def _code(task, body, path: str = "/chat/completions", key: str = "", method: str = "POST") -> int:
    try:
        with urllib.request.urlopen(agents.request(task, path, body, key, method), timeout=30) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def _told(codes: list[int]) -> None:
    """Fail with the codes that calls were refused with."""
    raise RuntimeError(f"refused with {sorted(set(codes))}")


def _late(task) -> None:
    """Leave a process that calls when the sample has ended, and raise."""
    _daemon(lambda: [_code(task, _HELLO) for _ in range(50) if not time.sleep(0.02)])
    raise RuntimeError("left")


def _hung_up(task) -> None:
    host, _, port = task.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 900\r\n\r\n{")


class Killed(Echo):
    """Is killed in its first turns, as often as `times` says; a folder counts them, where it is there."""

    def __init__(self, *, counts: str, times: int = 2) -> None:
        super().__init__()
        self.counts, self.times = counts, times

    def step(self, action):
        if os.path.isdir(self.counts) and len(os.listdir(self.counts)) < self.times:
            open(f"{self.counts}/{os.getpid()}", "x").close()
            os.kill(os.getpid(), 9)
        return super().step(action)


class Unmade(Echo):
    """Cannot be made, in the way that its option names."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        if how == "raises":
            raise RuntimeError("no luck")
        if how == "dies":
            os._exit(7)
        if how == "forks":
            self.child = os.fork() or time.sleep(3600)
            return
        self.roles = {"judge": False}


def _raised(why: str) -> None:
    raise RuntimeError(why)


def _spin() -> None:
    while True:
        pass


def _leak() -> None:
    held = []
    while True:
        held.append(bytearray(16 << 20))


def _print() -> None:
    while True:
        sys.stdout.write("y" * 65536)


def _daemon(work: Callable[[], Any] = lambda: time.sleep(3600)) -> None:
    """A process that nobody waits for, in a session of its own."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    work()
    os._exit(0)


def _scribble(number: int) -> None:
    try:
        if os.path.exists(f"/proc/self/fd/{number}") and "socket" in os.readlink(f"/proc/self/fd/{number}"):
            socket.socket(fileno=os.dup(number)).send(b'{"observation": "mine"')
    except OSError:
        pass


def _deep(number: int) -> int:
    return _deep(number + 1) + 1
