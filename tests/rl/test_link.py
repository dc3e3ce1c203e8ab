"""Controller and ranks notice each other's end, and hear each other's errors."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest

from nanodag.errors import StageFailed, TrainingDiverged
from nanodag.rl.trainer.link import ADDRESS_VARIABLE, RankLink
from nanodag.worker.children import Children

RANK = """
import os, sys, time
from nanodag.errors import TrainingDiverged
from nanodag.rl.trainer.link import ControllerLink
rank = int(sys.argv[1])
link = ControllerLink(rank)
link.reply({"ready": True})
while (message := link.next())["do"] != "end":
    if message["do"] == "die" and rank == message["rank"]:
        os.kill(os.getpid(), 9)
    elif message["do"] == "fail" and rank == message["rank"]:
        link.fail(TrainingDiverged("the loss is nan at step 3"))
        sys.exit(1)
    elif message["do"] == "hang":
        print("at work", flush=True)
        time.sleep(1000)
    else:
        link.reply({"rank": rank, "said": message.get("word")})
"""


@pytest.fixture
def ranks():
    link = RankLink(2)
    environment = os.environ | {ADDRESS_VARIABLE: link.address}
    processes = [subprocess.Popen([sys.executable, "-c", RANK, str(rank)], env=environment) for rank in (1, 0)]
    link.accept(timeout_s=300, check=lambda: None)
    yield link
    link.close()
    for process in processes:
        process.kill()
        process.wait()


async def test_replies_come_in_rank_order_beside_other_work_and_behind_those_that_were_given_up(ranks):
    given_up = asyncio.ensure_future(ranks.exchange("say", word="first"))
    await asyncio.sleep(0)
    given_up.cancel()
    worked = 0
    replies = asyncio.ensure_future(ranks.exchange("say", word="hello"))
    while not replies.done():
        worked += 1
        await asyncio.sleep(0)
    assert worked > 1 and await replies == [{"rank": rank, "said": "hello"} for rank in (0, 1)]


FAILS = ("fail", TrainingDiverged, "Trainer rank 1: the loss is nan at step 3")
DIES = ("die", StageFailed, "Trainer rank 1 ended while it was asked to die")


@pytest.mark.parametrize(("do", "error", "why"), [FAILS, DIES])
def test_an_error_of_a_rank_is_raised_by_its_kind_and_its_end_is_noticed_at_once(ranks, do, error, why):
    began = time.monotonic()
    with pytest.raises(error, match=why):
        asyncio.run(ranks.exchange(do, rank=1))
    assert time.monotonic() - began < 60


CONTROLLER = """
import asyncio
from nanodag.rl.trainer.link import RankLink
link = RankLink(2)
print(link.address, flush=True)
link.accept(timeout_s=300, check=lambda: None)
asyncio.run(link.exchange("hang"))
"""


def test_ranks_end_when_the_controller_is_killed_even_in_the_middle_of_work():
    with subprocess.Popen([sys.executable, "-c", CONTROLLER], stdout=subprocess.PIPE, text=True) as controller:
        environment = os.environ | {ADDRESS_VARIABLE: controller.stdout.readline().strip()}
        command = [sys.executable, "-c", RANK]
        ranks = [subprocess.Popen([*command, n], env=environment, stdout=subprocess.PIPE, text=True) for n in "01"]
        try:
            assert [rank.stdout.readline() for rank in ranks] == ["at work\n"] * 2
            controller.kill()
            assert [rank.wait(timeout=60) for rank in ranks] == [1, 1]
        finally:
            for process in (controller, *ranks):
                process.kill()
                process.communicate()


@pytest.fixture
def link():
    link = RankLink(1)
    yield link
    link.close()


def connected(link, hello: bytes = b""):
    """A connection to the link that has said this, or is of rank 0."""
    host, port, token = link.address.split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(hello or json.dumps({"token": token, "rank": 0}).encode() + b"\n")
    return connection


def rounds(count: int):
    return Mock(side_effect=[None] * count + [StageFailed("waited for in vain")])


@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_whoever_looks_what_listens_here_is_sent_away_and_a_rank_may_be_ready_with_its_hello_or_later(link, pause_s):
    with connected(link, b"GET / HTTP/1.1\r\n"), connected(link, b"[1]\n"), connected(link) as rank:
        late = threading.Timer(pause_s, rank.sendall, [b'{"ready": true}\n'])
        late.start()
        link.accept(timeout_s=10, check=rounds(50))
        late.join()


def test_while_a_rank_loads_its_model_the_end_of_another_is_noticed(link):
    with connected(link), pytest.raises(StageFailed, match="waited for in vain"):
        link.accept(timeout_s=10, check=rounds(4))


def test_a_rank_that_never_comes_is_named(link):
    with pytest.raises(StageFailed, match=r"ranks \[0\] did not connect within 0 s"):
        link.accept(timeout_s=0.1, check=lambda: None)


# the second one as of a trainer's node whose torchrun was killed
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise SystemExit(137)"])
def test_a_child_that_ends_unasked_ends_the_others_and_is_named(end):
    children = Children()
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    lasting = children.start("The sampler", sleep, os.environ)
    children.check()
    children.start("Trainer rank 0", [sys.executable, "-c", f"import os; {end}"], os.environ)
    assert lasting.wait(60)
    with pytest.raises(StageFailed, match=r"Trainer rank 0 \(pid \d+\) was ended by SIGKILL"):
        children.check()
    assert children.exit_code == 137
    assert str(children.cause_of(ValueError("broken pipe"))).startswith("Trainer rank 0")
    children.end()


def test_while_stopping_a_child_may_end():
    children = Children(is_stopping=lambda: True)
    process = children.start("The sampler", [sys.executable, "-c", ""], os.environ)
    assert process.wait(60)
    time.sleep(0.5)
    children.check()
    children.end()
