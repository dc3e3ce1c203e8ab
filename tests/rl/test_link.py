"""Controller and ranks notice each other's end, and hear each other's errors."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time

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
while (message := link.next())["do"] != "end":
    if message["do"] == "die" and rank == message["rank"]:
        os.kill(os.getpid(), 9)
    elif message["do"] == "fail" and rank == message["rank"]:
        link.fail(TrainingDiverged("the loss is nan at step 3"))
        sys.exit(1)
    elif message["do"] == "hang":
        time.sleep(1000)
    else:
        link.reply({"rank": rank, "said": message.get("word")})
"""


@pytest.fixture
def ranks():
    """Two ranks that answer, and the link to them."""
    link = RankLink(2)
    environment = os.environ | {ADDRESS_VARIABLE: link.address}
    processes = [subprocess.Popen([sys.executable, "-c", RANK, str(rank)], env=environment) for rank in (1, 0)]
    link.accept(timeout_s=300, check=lambda: None)
    yield link, processes
    link.close()
    for process in processes:
        process.kill()
        process.wait()


def test_every_rank_is_asked_and_replies_come_in_rank_order(ranks):
    link, _ = ranks
    assert link.ask("say", word="hello") == [{"rank": 0, "said": "hello"}, {"rank": 1, "said": "hello"}]


def test_replies_are_waited_for_beside_other_work(ranks):
    link, _ = ranks

    async def ask() -> list:
        worked = 0
        replies = asyncio.ensure_future(link.exchange("say", word="hello"))
        while not replies.done():
            worked += 1
            await asyncio.sleep(0)
        assert worked > 1
        return await replies

    for _ in range(2):
        assert asyncio.run(ask()) == [{"rank": 0, "said": "hello"}, {"rank": 1, "said": "hello"}]


@pytest.mark.parametrize("beside", [False, True])
def test_an_error_of_a_rank_is_raised_by_its_kind(ranks, beside):
    link, _ = ranks
    with pytest.raises(TrainingDiverged, match="Trainer rank 1: the loss is nan at step 3"):
        asyncio.run(link.exchange("fail", rank=1)) if beside else link.ask("fail", rank=1)


def test_a_question_waits_for_the_reply_to_one_that_was_given_up(ranks):
    link, _ = ranks

    async def ask() -> list:
        given_up = asyncio.ensure_future(link.exchange("say", word="first"))
        await asyncio.sleep(0)
        given_up.cancel()
        return await link.exchange("say", word="second")

    assert asyncio.run(ask()) == [{"rank": 0, "said": "second"}, {"rank": 1, "said": "second"}]


def test_a_rank_that_is_killed_is_noticed_at_once(ranks):
    link, _ = ranks
    began = time.monotonic()
    with pytest.raises(StageFailed, match="Trainer rank 1 ended while it was asked to die"):
        link.ask("die", rank=1)
    assert time.monotonic() - began < 60


def test_ranks_end_when_the_controller_goes_even_in_the_middle_of_work(ranks):
    link, processes = ranks
    link.send("hang")
    time.sleep(0.2)
    for connection in link._connections:  # as the kernel does when the controller is killed
        connection.socket.close()
    assert [process.wait(timeout=60) for process in processes] == [1, 1]


def test_whoever_looks_what_listens_here_is_sent_away(tmp_path):
    link = RankLink(1)
    host, port, token = link.address.split(":")
    with socket.create_connection((host, int(port))) as scanner, socket.create_connection((host, int(port))) as other:
        scanner.sendall(b"GET / HTTP/1.1\r\n")
        other.sendall(b"[1]\n")
        with socket.create_connection((host, int(port))) as rank:
            rank.sendall(json.dumps({"token": token, "rank": 0}).encode() + b"\n")
            link.accept(timeout_s=10, check=lambda: None)
    link.close()


def test_a_rank_that_never_comes_is_named():
    link = RankLink(1)
    with pytest.raises(StageFailed, match=r"ranks \[0\] did not connect within 0 s"):
        link.accept(timeout_s=0.1, check=lambda: None)
    link.close()


def test_a_child_that_ends_unasked_ends_the_others_and_is_named():
    children = Children()
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    lasting = children.start("The sampler", sleep, os.environ)
    victim = children.start("Trainer rank 0", sleep, os.environ)
    children.check()
    victim.kill()
    lasting.wait(timeout=60)
    with pytest.raises(StageFailed, match=r"Trainer rank 0 \(pid \d+\) was ended by SIGKILL"):
        children.check()
    assert children.exit_code == 137
    assert str(children.cause_of(ValueError("broken pipe"))).startswith("Trainer rank 0")
    children.end()


def test_while_stopping_a_child_may_end():
    children = Children(is_stopping=lambda: True)
    process = children.start("The sampler", [sys.executable, "-c", ""], os.environ)
    process.wait()
    time.sleep(0.5)
    children.check()
    children.end()
