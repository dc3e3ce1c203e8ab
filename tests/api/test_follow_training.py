"""A run that really trains, followed by a server in a process of its own."""

import asyncio
import json
import os
import re
import signal
import time

import httpx
import pytest

from nanodag.store import Store
from nanodag.store.checkpoints import steps_in
from tests.fault.processes import wait_until
from tests.forks import CPU_ONLY, start_module
from tests.run_records import built, run_record, stage_record
from tests.train import stages

pytestmark = pytest.mark.slow
KEY = "ab" * 20
FACTS = {"config": {}, "lineage": {}, "sources": {}, "metrics": {}, "cost": {}, "environment": {}}


def train_until(trainer, workspace, step):
    """Let the trainer go on until a checkpoint of this step, or a later one, is there; returns its step."""
    trainer.send_signal(signal.SIGCONT)
    until(lambda: [s for s, _ in steps_in(workspace / "checkpoints") if s >= step], workspace / "worker.log")
    trainer.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    return steps_in(workspace / "checkpoints")[-1][0]


def until(is_true, log):
    wait_until(is_true, 120, said=log.read_text)


def test_each_checkpoint_is_taken_without_a_restart_and_every_answer_is_of_one_set_of_weights(tmp_path):
    stages.write_prose(tmp_path / "prose.jsonl")
    stages.write_tokenizer(tmp_path / "tokenizer")
    config = stages.pretrain(tmp_path, checkpoint_every=2, horizon_tokens=512 * 60)
    workspace = stages.make_job(tmp_path / "work", config, {"tokenizer": tmp_path / "tokenizer"})
    store, log = Store(tmp_path / "store"), tmp_path / "api.log"
    record = stage_record("pretrain", state="running", key=KEY, workspace=str(workspace))
    store.write_run(run_record("run", state="running", stages={"pretrain": record}))
    trainer, server = stages.start(workspace), None
    try:
        steps = [train_until(trainer, workspace, 2)]
        options = ["--follow", "run", f"--store={store.url}", "--port", "0", "--device", "cpu", "--deterministic"]
        server = start_module("nanodag.chat.web", *options, environment={**os.environ, **CPU_ONLY}, log=log)
        until(lambda: "Ctrl-C ends it" in log.read_text(), log)
        url = re.search(r"at (http://127.0.0.1:\d+)/v1", log.read_text())[1]

        def go_on():
            """One more checkpoint, then the artifact of the whole stage; the server says that it has each."""
            steps.append(train_until(trainer, workspace, steps[0] + 4))
            until(lambda: f"step-{steps[1]} now." in log.read_text(), log)
            trainer.send_signal(signal.SIGCONT)
            trainer.wait(timeout=120)
            artifact = store.publish(KEY, workspace / "output", kind="pretrain", stage="pretrain", **FACTS)
            store.write_run(run_record("run", stages={"pretrain": built(artifact)}))
            until(lambda: f"{KEY[:8]}/0001 now." in log.read_text(), log)

        texts = asyncio.run(texts_while(url, go_on))
        assert server.poll() is None and log.read_text().count("Ctrl-C ends it") == 1
    finally:
        for process in filter(None, (server, trainer)):
            process.kill()
            process.wait(timeout=30)
    expected = [f"pretrain@{KEY[:8]}:step-{step}" for step in steps] + [f"pretrain@{KEY[:8]}/0001"]
    assert set(expected) <= set(texts), "beside them it may have taken others on the way to the end"
    assert all(len(of_one) == 1 for of_one in texts.values()), "the same weights gave the same request two answers"
    assert len(set.union(*(texts[version] for version in expected))) == 3, "other weights gave the same answer"


async def texts_while(url, work):
    """Weights -> what they answered to one request, which three clients stream again and again while work runs."""
    texts, is_over = {}, asyncio.Event()
    body = {"prompt": "river stone", "max_tokens": 100, "seed": 1, "ignore_eos": True, "stream": True}

    async def one_client(client):
        while not is_over.is_set():
            text, versions = "", set()
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        versions.add(event["system_fingerprint"])
                        text += event["choices"][0]["text"]
            (version,) = versions
            texts.setdefault(version, set()).add(text)

    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        clients = [asyncio.ensure_future(one_client(client)) for _ in range(3)]
        try:
            await asyncio.to_thread(work)
            await asyncio.sleep(1.0)
        finally:
            is_over.set()
            await asyncio.gather(*clients)
    return texts
