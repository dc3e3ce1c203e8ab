"""The application over the embedded engine in its own process: what only both together show."""

import asyncio
import json
import re
import signal

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from nanodag.engines.start import start_engine
from nanodag.inference.engine_settings import EngineSettings
from nanodag.model.headers import weights_digest
from tests.api.real_engines import client_over, fleet_over, served
from tests.api.scripted import model_of
from tests.evaluation.tiny import VOCABULARY

TOKEN = "of-this-test"
LONG = {"prompt": "the cat", "max_tokens": 180, "ignore_eos": True}


@pytest.fixture(scope="module")
def process(model_folder):
    options = {"deterministic": True, "max_batch": 4, "stream_every_s": 0.01, "token": TOKEN}
    settings = EngineSettings(model=model_folder, **options)
    with start_engine(settings, log_path=model_folder / "sampler.log") as process:
        yield process


@pytest.fixture
def serve(model_folder, process):
    """serve(scenario): run scenario(client of the API, client of the engine)."""

    def run(scenario, **limits):
        async def main():
            engines = fleet_over(process, model_folder, TOKEN)
            async with client_over(model_folder, engines, **limits) as client:
                return await asyncio.wait_for(scenario(client, (await engines.choose()).client), 60)

        return asyncio.run(main())

    return run


def oracle(folder, ids):
    """(T, V) log-probabilities by transformers."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits, dim=-1)


async def num_running(engine):
    info = json.loads(await engine._call("GET", "/get_server_info"))
    return info["num_running_samples"] + info["num_waiting_samples"]


def test_logprobs_of_prompt_and_answer_are_those_of_transformers(serve, model_folder):
    ids = [5, 17, 103, 44]

    async def scenario(client, engine):
        body = {"prompt": ids, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 3, "ignore_eos": True}
        return (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]

    scores = serve(scenario)
    model = model_of(model_folder, None)
    names = [model.tokens.name(token) for token in range(VOCABULARY)]
    sampled = [names.index(name) for name in scores["tokens"][len(ids) :]]
    expected = oracle(model_folder, [*ids, *sampled])
    for place in range(1, len(ids) + 3):
        token = [*ids, *sampled][place]
        assert scores["token_logprobs"][place] == pytest.approx(float(expected[place - 1, token]), abs=1e-3)
        values, best = expected[place - 1].topk(3)
        told = scores["top_logprobs"][place]
        for value, other in zip(values.tolist(), best.tolist(), strict=True):
            assert told[names[other]] == pytest.approx(value, abs=1e-3)


def test_an_answer_among_others_is_the_same_as_alone(serve):
    bodies = [{"prompt": [place + 3], "max_tokens": 24, "seed": place, "ignore_eos": True} for place in range(7)]

    async def scenario(client, engine):
        async def said(body):
            return (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]

        together = await asyncio.gather(*(said(body) for body in bodies))
        assert together == [await said(body) for body in bodies]
        assert len(set(together)) == len(bodies)
        two = (await client.post("/v1/completions", json={**bodies[2], "n": 2})).json()["choices"]
        assert two[0]["text"] == together[2] != two[1]["text"]

    serve(scenario)


def test_a_stop_string_and_a_time_limit_free_the_engine_at_once(serve):
    async def scenario(client, engine):
        whole = (await client.post("/v1/completions", json={**LONG, "seed": 1})).json()["choices"][0]["text"]
        stop = whole[10:12]
        body = {**LONG, "seed": 1, "stop": stop}
        (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
        assert choice["text"] == whole[: whole.index(stop)] and choice["stop_reason"] == stop
        await nothing_runs(engine)

    serve(scenario)

    async def too_slow(client, engine):
        assert (await client.post("/v1/completions", json={**LONG, "n": 100})).status_code == 504
        await nothing_runs(engine)

    serve(too_slow, request_timeout_s=0.05)


async def nothing_runs(engine):
    async with asyncio.timeout(10):
        while await num_running(engine):
            await asyncio.sleep(0.01)


def test_who_leaves_frees_the_engine(serve):
    async def scenario(client, engine):
        asking = asyncio.ensure_future(client.post("/v1/completions", json={**LONG, "n": 100, "stream": True}))
        while not await num_running(engine):
            await asyncio.sleep(0.001)
        asking.cancel()
        await nothing_runs(engine)
        assert await engine.health()

    serve(scenario)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_process_says_what_it_serves_and_its_engine_ends_with_it(model_folder, tmp_path, signum):
    log = tmp_path / "log"
    with served(model_folder, log) as (server, said):
        url = re.match(r"Serving tiny \(context 192\) by 1 embedded engine at (http://127.0.0.1:\d+)/v1", said)[1]
        assert httpx.get(f"{url}/health", trust_env=False).json()["status"] == "ok"
        body = {"prompt": "the", "max_tokens": 2}
        reply = httpx.post(f"{url}/v1/completions", json=body, trust_env=False).json()
        assert reply["usage"]["completion_tokens"] == 2
        assert reply["system_fingerprint"] == weights_digest(model_folder)
        engines = psutil.Process(server.pid).children()
        assert len(engines) == 1
        server.send_signal(signum)
        assert server.wait(30) == (0 if signum == signal.SIGTERM else -signum), log.read_text()
        assert "ERROR" not in log.read_text()
        assert not psutil.wait_procs(engines, timeout=30)[1]


def test_sglangs_protocol_is_passed_on_as_it_is(serve):
    async def scenario(client, engine):
        assert (await client.get("/model_info")).json() == await engine.model_info()
        assert (await client.get("/health_generate")).status_code == 200
        params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [3, 4], "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
        passed = (await client.post("/generate?model=tiny", json=body)).json()
        direct = json.loads(await engine._call("POST", "/generate", body))
        for answer in (passed, direct):
            answer["meta_info"].pop("id"), answer["meta_info"].pop("cached_tokens")
        assert passed == direct and len(passed["meta_info"]["output_top_logprobs"][0]) == 2
        streamed = await client.post("/generate", json={**body, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        many = ({"input_ids": [3], "sampling_params": {"n": 4096}}, {"input_ids": [[3]] * 1025})
        for wrong in (*({"input_ids": ids} for ids in ([VOCABULARY], [True], [], "ab")), *many, {"nonsense": 1}):
            assert (await client.post("/generate", json=wrong)).status_code == 400, wrong
        assert (await client.post("/generate?model=other", json=body)).status_code == 404
        for closed in ("/update_weights_from_disk", "/abort_request", "/pause_generation", "/flush_cache"):
            assert (await client.post(closed, json={})).status_code == 404

    serve(scenario)
