"""Engines that die, come back, are chosen and take weights; processes are played."""

import asyncio
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanodag.engines import replica, watch
from nanodag.engines.fleet import Fleet
from nanodag.errors import BadRequest, SamplerError, SamplerLost
from nanodag.inference.protocol import Completion, FinishReason, Request

FOLDER = Path("/weights/1")


class Process:
    """What a Fleet sees of a server. It lives until `kill`."""

    pids = itertools.count(100)

    def __init__(self, number, folder, version):
        self.number, self.folder, self.version = number, folder, version
        self.pid, self.is_alive = next(self.pids), True
        self.url = f"http://engine-{self.pid}"
        self.process = SimpleNamespace(returncode=None)

    def kill(self):
        self.is_alive, self.process.returncode = False, -9

    stop = kill

    def tail(self):
        return "the end of its log"


class Client:
    """Answers with its engine's version, after `released`."""

    def __init__(self, process):
        self.process = process
        self.is_closed = False
        self.released = asyncio.Event()
        self.released.set()
        self.took = []

    async def generate(self, requests):
        await self.released.wait()
        if not self.process.is_alive:
            raise SamplerLost("gone")
        version = self.took[-1][1] if self.took else self.process.version
        reason = FinishReason(type="length")
        return [[
            Completion(
                rid=self.process.url, output_ids=[1], logprobs=[], finish_reason=reason, weight_version=version,
                weight_versions=[], num_prompt_tokens=1,
            )
        ]]  # fmt: skip

    async def health(self):
        return True

    async def update_weights_from_disk(self, path, version, flush_cache=True):
        if "other" in path:
            raise BadRequest("of another shape")
        if "failing" in path:
            raise SamplerError("answered 500")
        self.took.append((path, version))

    async def close(self):
        self.is_closed = True


@pytest.fixture
def play(monkeypatch):
    """play(scenario, num_replicas=1, faults=..., held=...): run scenario(engines, processes, clients). held: what later
    engines wait for before they are up."""
    monkeypatch.setattr(watch, "LOOK_S", 0.001)

    def run(scenario, num_replicas=1, faults=(), held=None):
        faults = list(faults)
        processes, clients = [], {}

        def launch(number, folder, version):
            if processes and faults and len(processes) >= num_replicas:
                raise faults.pop()
            processes.append(Process(number, folder, version))
            if held is not None and len(processes) > num_replicas:
                held.wait(10)
            return processes[-1]

        def connect(url):
            (process,) = [process for process in processes if process.url == url]
            clients[process.pid] = Client(process)
            return clients[process.pid]

        def check(folder):
            if "misshapen" in str(folder):
                raise BadRequest("of another shape")

        async def main():
            engines = Fleet(
                model=FOLDER, version="1", launch=launch, connect=connect, name="tiny", max_restarts=None,
                is_watched_idle=True, check=check,
            )  # fmt: skip
            await engines.start(num_replicas)
            try:
                await asyncio.wait_for(scenario(engines, processes, clients), 10)
            finally:
                await engines.end()
            assert not any(process.is_alive for process in processes)
            assert all(client.is_closed for client in clients.values())

        asyncio.run(main())

    return run


async def takes(engines, folder, version):
    """Whether they took the weights."""
    try:
        await engines.take_weights(folder, version)
    except SamplerError:
        return False
    return True


async def said(engines):
    return [completion async for completion in engines.answer(Request(input_ids=[1]), stream=False)][-1]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_an_engine_that_dies_is_started_again_and_lost_meanwhile(play, caplog):
    async def scenario(engines, processes, clients):
        assert (await said(engines)).rid == processes[0].url
        processes[0].kill()
        with pytest.raises(SamplerLost, match="no engine of tiny is up"):
            await said(engines)
        await until(lambda: len(processes) == 2 and engines.is_ready)
        assert (await said(engines)).rid == processes[1].url
        assert engines.num_restarts == 1

    play(scenario)
    assert "was lost and is started again" in caplog.text and "the end of its log" in caplog.text


def test_an_engine_that_does_not_start_is_tried_again(play, monkeypatch):
    monkeypatch.setattr(replica, "FIRST_PAUSE_S", 0.001)

    async def scenario(engines, processes, clients):
        processes[0].kill()
        await until(lambda: len(processes) == 2 and engines.is_ready)
        assert engines.num_restarts == 1

    play(scenario, faults=[SamplerLost("no memory"), SamplerLost("no memory")])


def test_the_least_busy_engine_is_asked_and_a_dead_one_is_not(play):
    async def scenario(engines, processes, clients):
        for client in clients.values():
            client.released.clear()
        asking = [asyncio.ensure_future(said(engines)) for _ in range(4)]
        await asyncio.sleep(0.01)
        for client in clients.values():
            client.released.set()
        answers = [completion.rid for completion in await asyncio.gather(*asking)]
        assert sorted(answers) == sorted([processes[0].url, processes[1].url] * 2)
        engines.is_stopping = lambda: True  # so that it stays dead
        processes[0].kill()
        assert {(await said(engines)).rid for _ in range(3)} == {processes[1].url}

    play(scenario, num_replicas=2)


def test_new_weights_are_taken_and_an_engine_that_dies_comes_back_with_them(play):
    async def scenario(engines, processes, clients):
        assert await takes(engines, Path("/weights/2"), "2")
        assert (await said(engines)).weight_version == "2" == engines.weight_version
        processes[0].kill()
        await until(lambda: len(processes) == 2 and engines.is_ready)
        assert (processes[1].folder, processes[1].version) == (Path("/weights/2"), "2")

    play(scenario)


def test_an_engine_that_was_starting_when_new_weights_came_comes_back_with_them(play):
    async def scenario(engines, processes, clients):
        processes[0].kill()
        await until(lambda: len(processes) == 2)  # in a thread: it is not up yet
        assert not engines.is_ready and await takes(engines, Path("/weights/2"), "2")
        launching.set()
        await until(lambda: engines.is_ready)
        assert (await said(engines)).weight_version == "2"

    launching = threading.Event()
    play(scenario, held=launching)


def test_weights_of_another_shape_leave_the_old_ones(play):
    async def scenario(engines, processes, clients):
        assert not await takes(engines, Path("/weights/other"), "2")
        assert (await said(engines)).weight_version == "1" == engines.weight_version

    play(scenario)


def test_weights_of_another_shape_are_refused_while_no_engine_is_up_and_an_engine_that_fails_at_some_is_no_end(play):
    async def scenario(engines, processes, clients):
        assert not await takes(engines, Path("/weights/failing"), "2")
        processes[0].kill()
        await until(lambda: len(processes) == 2)
        assert not engines.is_ready and not await takes(engines, Path("/weights/misshapen"), "3")
        launching.set()
        await until(lambda: engines.is_ready)
        assert (await said(engines)).weight_version == "1"

    launching = threading.Event()
    play(scenario, held=launching)


def test_a_request_that_is_given_up_leaves_its_engine_idle(play):
    async def scenario(engines, processes, clients):
        for client in clients.values():
            client.released.clear()
        asking = asyncio.ensure_future(said(engines))
        await asyncio.sleep(0.005)
        assert engines.least_busy().load == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert engines.least_busy().load == 0

    play(scenario)
