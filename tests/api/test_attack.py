"""A served model under clients that mean ill or go: at the end nothing runs, and it answers as before."""

import asyncio
import json
import random
import re
import socket

import httpx
import psutil
import pytest

from tests.api.real_engines import served
from tests.evaluation.tiny import save_tiny_model
from tests.fault.processes import wait_until

pytestmark = pytest.mark.slow
NUM_CLIENTS, AT_ONCE = 1000, 100
KEY = "a-key-of-24-characters-."
HEADERS = {"authorization": f"Bearer {KEY}"}
BODY = {"prompt": "the cat", "max_tokens": 100, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    save_tiny_model(folder, "qwen3")
    (folder / "keys").write_text(KEY + "\n")
    options = ["--deterministic", "--max-batch", "8", "--api-key-file", str(folder / "keys")]
    with served(folder, folder / "log", *options) as (process, said):
        yield process, int(re.search(r":(\d+)/v1", said)[1])


def asked(port, path="/v1/completions", **how):
    return httpx.post(f"http://127.0.0.1:{port}{path}", json=BODY, headers=HEADERS, trust_env=False, timeout=60, **how)


def in_flight(port):
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", headers=HEADERS, trust_env=False, timeout=60).text
    return int(float(re.search(r"^nanodag_samples_in_flight (\S+)", text, re.M)[1])), text


def check_idle(port):
    """Nothing runs or waits, in the API and in its engine."""

    def is_idle():
        info = f"http://127.0.0.1:{port}/server_info"
        engine = httpx.get(info, headers=HEADERS, trust_env=False, timeout=60).json()
        return (in_flight(port)[0], engine["num_running_samples"], engine["num_waiting_samples"]) == (0, 0, 0)

    wait_until(is_idle, every_s=0.1)


def head(length, *, key=KEY):
    lines = ["POST /v1/completions HTTP/1.1", "host: 127.0.0.1", f"authorization: Bearer {key}"]
    return "\r\n".join([*lines, "content-type: application/json", f"content-length: {length}", "", ""]).encode()


async def leaves(port, dice):
    """Ask, whole or in half, streamed or not, and be gone after a moment, with or without a word."""
    body = json.dumps({**BODY, "stream": dice.random() < 0.5, "n": dice.choice([1, 1, 4])}).encode()
    sent = head(len(body)) + body
    if dice.random() < 0.2:
        sent = sent[: dice.randrange(len(sent))]
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await asyncio.sleep(dice.expovariate(10))
    if dice.random() < 0.5:
        writer.transport.abort()
    writer.close()


def test_a_thousand_clients_that_leave_at_random_moments_leave_nothing_behind(server):
    process, port = server
    alone = asked(port).json()["choices"][0]["text"]
    num_files = psutil.Process(process.pid).num_fds()

    async def main():
        dice, places = random.Random(3), asyncio.Semaphore(AT_ONCE)

        async def one():
            async with places:
                await leaves(port, dice)

        await asyncio.gather(*(one() for _ in range(NUM_CLIENTS)))

    asyncio.run(main())
    check_idle(port)
    assert asked(port).json()["choices"][0]["text"] == alone
    wait_until(lambda: psutil.Process(process.pid).num_fds() <= num_files + 10, 30, 0.1)  # no connections are kept


def test_wrong_keys_and_foreign_hosts_reach_no_engine(server):
    _, port = server
    before = re.search(r"^nanodag_prompt_tokens_total.* (\S+)$", in_flight(port)[1], re.M)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        for key in ("x", "x" * len(KEY), KEY[:-1], KEY + "x", "\xff", f"Basic {KEY}"):
            said = {"authorization": f"Bearer {key}".encode("latin1")}
            assert client.post("/v1/completions", json=BODY, headers=said).status_code == 401
            assert client.get("/metrics", headers=said).status_code == 401
        for wrong, status in (({"host": "evil.example"}, 421), ({"origin": "http://evil.example"}, 403)):
            assert client.post("/v1/completions", json=BODY, headers=HEADERS | wrong).status_code == status
    after = re.search(r"^nanodag_prompt_tokens_total.* (\S+)$", in_flight(port)[1], re.M)
    assert (before and before[1]) == (after and after[1])


def test_who_does_not_read_keeps_no_other_waiting(server):
    _, port = server
    body = json.dumps({**BODY, "stream": True, "n": 16, "logprobs": 5}).encode()
    slow = []
    for _ in range(20):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        one.connect(("127.0.0.1", port))
        one.sendall(head(len(body)) + body)
        slow.append(one)
    assert asked(port).status_code == 200
    for one in slow:
        one.close()
    check_idle(port)


def test_an_engine_that_is_killed_under_load_is_told_and_comes_back(server):
    process, port = server
    alone = asked(port).json()["choices"][0]["text"]

    async def main():
        async with httpx.AsyncClient(trust_env=False, timeout=60, headers=HEADERS) as client:
            url = f"http://127.0.0.1:{port}/v1/completions"
            asking = [asyncio.ensure_future(client.post(url, json=BODY | {"stream": n % 2 == 0})) for n in range(64)]
            await asyncio.sleep(0.05)
            (engine,) = psutil.Process(process.pid).children()
            engine.kill()
            return await asyncio.gather(*asking)

    replies = asyncio.run(main())
    assert {reply.status_code for reply in replies} <= {200, 503}
    told = [reply for reply in replies if "engine_lost" in reply.text or "engine_starting" in reply.text]
    assert told and all(reply.text.endswith("data: [DONE]\n\n") for reply in replies[::2] if reply.status_code == 200)
    for reply in replies[1::2]:
        assert reply.status_code == 503 or reply.json()["choices"][0]["text"] == alone
    wait_until(lambda: asked(port).status_code == 200, every_s=0.2)
    assert asked(port).json()["choices"][0]["text"] == alone
    check_idle(port)
