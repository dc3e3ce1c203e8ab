"""The `verifiers` package in its own environment: tasks, rollouts with a tool, and what goes wrong there."""

import asyncio
import json
import shutil

import pytest
from aiohttp import web

from benchmarks.boxes.box_numbers import EMPTY, answer, content, question, tasks
from nanodag.children.forks import EpisodeFailed
from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.data.adapters import open_adapter
from nanodag.data.opening import open_source
from nanodag.errors import ConfigError, SourceError
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.verifiers_benchmarks import run_environment
from nanodag.external_envs.verifiers_process import VerifiersProcess, block_of, module_file
from nanodag.host.folders import PROJECT
from tests.evaluation.tiny import asked_by, save_tiny_model
from tests.guest_pythons import verifiers_python

pytestmark = pytest.mark.slow
ASKED = web.AppKey("asked", list)
BOXES = PROJECT / "benchmarks" / "boxes"


@pytest.fixture
def boxes(tmp_path, monkeypatch):
    """The environment `boxes`, beside a pipeline file."""
    verifiers_python()
    shutil.copytree(BOXES, tmp_path, dirs_exist_ok=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    module_file.cache_clear()
    return tmp_path


def said(delta, reason):
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    part = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "policy", "choices": [choice]}
    return f"data: {json.dumps(part)}\n\n".encode()


async def policy(request):
    """Opens one box after the other until it finds something and tells it; with the key `wrong` it opens the first."""
    body, key = await request.json(), request.headers["Authorization"].removeprefix("Bearer ")
    request.app[ASKED].append((key, body))
    heard = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    boxes = body["messages"][0]["content"].split()[1:]
    if not heard or (heard[-1] == EMPTY and key != "wrong"):
        arguments = json.dumps({"number": boxes[len(heard)]})
        call = {"index": 0, "id": f"c{len(heard)}", "type": "function"}
        delta = {"tool_calls": [{**call, "function": {"name": "open_box", "arguments": arguments}}]}
        reason = "tool_calls"
    else:
        delta, reason = {"content": heard[-1]}, "stop"
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(said({"role": "assistant", **delta}, None) + said({}, reason) + b"data: [DONE]\n\n")
    return response


async def with_policy(work, options):
    """What `work(process, base_url)` comes to, and what the policy was asked."""
    app = web.Application()
    app[ASKED] = []
    app.add_routes([web.post("/v1/chat/completions", policy)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    process = VerifiersProcess(block_of("boxes", options))
    try:
        port = site._server.sockets[0].getsockname()[1]
        return await work(process, f"http://127.0.0.1:{port}/v1"), app[ASKED]
    finally:
        await process.close()
        await runner.cleanup()


def test_the_tasks_of_a_taskset_are_prompts_whose_reward_the_environment_reports(boxes):
    url = "verifiers:boxes?size=4&seed=1[1:3]"
    rows = list(open_source(url).rows())
    record = open_adapter("auto", url, "prompt", {})(*rows[0])
    assert len(rows) == 2 and record["reward"] == "reported"
    assert record["messages"] == [{"role": "user", "content": record["metadata"]["task"]["prompt"]}]
    identity = open_source(url).identity()
    (boxes / "boxes.py").write_text((boxes / "boxes.py").read_text() + "\n")
    assert open_source(url).identity() != identity, "other code, other rows"
    endless = (boxes / "boxes.py").read_text().replace("    def load", "    INFINITE = True\n\n    def load")
    (boxes / "boxes.py").write_text(endless)
    assert list(open_source(url).rows()) == rows, "of what has no end, a slice"
    with pytest.raises(SourceError, match=r"BoxTaskset has no end, .* take a slice of it"):
        list(open_source("verifiers:boxes?size=4").rows())
    with pytest.raises(SourceError, match=r"(?s)cannot load the tasks of boxes:.*colour"):
        list(open_source("verifiers:boxes?colour=1").rows())
    with pytest.raises(SourceError, match="There is no module crates"):
        open_source("verifiers:crates").identity()


def task_of(first_is_empty):
    pair = next(pair for pair in tasks(size=99, seed=0, held_out=True) if (content(pair[0]) == EMPTY) == first_is_empty)
    return {"prompt": question(pair), "answer": answer(pair)}


def test_rollouts_beside_one_another_bear_their_own_keys_and_are_judged_by_the_rubric(boxes):
    async def work(process, base_url):
        keys = [f"key-{number}" for number in range(8)] + ["wrong"]
        task = task_of(first_is_empty=True)
        asking = (process.rollout(task, base_url=base_url, api_key=key, model="policy") for key in keys)
        return await asyncio.gather(*asking)

    found, asked = asyncio.run(with_policy(work, {}))
    assert [one["reward"] for one in found] == [1.0] * 8 + [0.0]
    assert found[0]["components"] == {"told": 1.0} and found[0]["metrics"] == {"opened": 2.0} and found[0]["turns"] == 3
    assert sorted(key for key, _ in asked) == sorted([f"key-{number}" for number in range(8)] * 3 + ["wrong"] * 2)


def test_a_limit_on_turns_cuts_a_rollout_and_an_address_that_does_not_answer_fails_it(boxes):
    task = task_of(first_is_empty=False)

    async def work(process, base_url):
        cut = await process.rollout(task, base_url=base_url, api_key="k", model="policy")
        with pytest.raises(EpisodeFailed, match=r"ProviderError|HarnessError|InterceptionError"):
            await process.rollout(task, base_url="http://127.0.0.1:9/v1", api_key="k", model="policy")
        with pytest.raises(EpisodeFailed, match=r"(?s)ValidationError.*answer"):
            await process.rollout({"prompt": "x"}, base_url=base_url, api_key="k", model="policy")
        return cut

    cut, asked = asyncio.run(with_policy(work, {"agent.max_turns": 1}))
    assert cut["is_cut"] and cut["turns"] == 1 and cut["reward"] == 0.0 and len(asked) == 1


def test_a_benchmark_of_a_taskset_asks_a_model_behind_the_api(boxes, tmp_path):
    save_tiny_model(tmp_path / "model", "qwen3")
    model = EvaluatedModel(tmp_path / "model", asked_by(max_new_tokens=12))
    config = BenchmarkConfig(name="boxes", form="verifiers", source="verifiers:boxes?size=3&held_out=true")
    result = run_environment(model, config, chat=True, seed=0, mirror="")
    assert result.scores["reward"].num_items == 3 and {"told", "opened", "turns"} < set(result.scores)
    assert all(record["output"] and "details" not in record for record in result.records)
    assert model.tokens_written > 0


def test_options_that_the_environment_does_not_know_are_an_error_of_the_config(boxes):
    async def work(process, base_url):
        with pytest.raises(ConfigError, match=r"(?s)does not start: it ended with code 1.*colour"):
            await process.rollout({}, base_url=base_url, api_key="k", model="policy")

    asyncio.run(with_policy(work, {"agent.colour": 1}))
