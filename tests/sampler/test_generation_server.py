"""The embedded sampler as a process: SGLang's protocol, every kind of bad request, pause, abort, weights, death."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import weakref
from types import SimpleNamespace

import aiohttp
import httpx
import pytest

from nanodag.engines.start import start_engine
from nanodag.errors import BadRequest, SamplerError, SamplerLost
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.sampler.generation_server import SamplerServer
from tests.fault.processes import is_running, wait_until
from tests.sampler.reference import make_engine, request, token_versions, with_client
from tests.server_info import server_info


@pytest.fixture(scope="module")
def server(text_folder, tmp_path_factory):
    log_path = tmp_path_factory.mktemp("log") / "sampler.log"
    with start_engine(EngineSettings(model=text_folder, max_batch=8, deterministic=True), log_path=log_path) as process:
        yield process


async def until_running(client, task):
    while (await server_info(client))["num_running_samples"] == 0:
        assert not task.done(), "it was over before it was seen to run"
        await asyncio.sleep(0.001)


async def slow_generation(client, rid="slow"):
    """A generation that is under way and will not end soon: 3,000 samples through 8 slots."""
    task = asyncio.create_task(client.generate([request(rid=rid, n=3000, max_new_tokens=250)]))
    await until_running(client, task)
    return task


async def idle(client):
    while True:
        info = await server_info(client)
        if info["num_running_samples"] == info["num_waiting_samples"] == 0:
            return
        await asyncio.sleep(0.01)


# ---- the wire


def test_one_prompt_is_answered_by_an_object_in_sglangs_words(post, text_folder):
    body = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0.5, "sampling_seed": 9},
        "return_logprob": True,
        "rid": "mine",
    }
    answer = post("/generate", body).json()
    wanted = Request(input_ids=[1, 2, 3], params=SamplingParams(**body["sampling_params"]))
    (expected,) = make_engine(text_folder, max_batch=8, deterministic=True).generate([wanted])[0]
    assert answer["output_ids"] == expected.output_ids
    assert answer["text"] == " ".join(f"w{token}" for token in expected.output_ids)
    triples = zip(expected.logprobs, expected.output_ids, strict=True)
    meta = {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 5},
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "output_token_logprobs": [[logprob, token, None] for logprob, token in triples],
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": 5}],
    }
    assert {name: answer["meta_info"][name] for name in meta} == meta


def test_several_prompts_and_samples_come_grouped_by_prompt(post):
    params = [{"max_new_tokens": 2, "n": 2, "ignore_eos": True}, {"max_new_tokens": 3, "ignore_eos": True}]
    answers = post("/generate", {"input_ids": [[1, 2], [3]], "sampling_params": [params[0] | {"n": 1}, params[1]]})
    assert [len(answer["output_ids"]) for answer in answers.json()] == [2, 3]
    answers = post("/generate", {"input_ids": [[1, 2], [3]], "sampling_params": params, "rid": "x"}).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["x_0_0", "x_0_1", "x_1"]
    single = post("/generate", {"input_ids": [1, 2], "sampling_params": params[0]}).json()
    assert [len(answer["output_ids"]) for answer in single] == [2, 2]
    assert "output_token_logprobs" not in single[0]["meta_info"]


def test_a_prompt_as_text_is_the_same_as_its_tokens(post):
    params = {"max_new_tokens": 5, "sampling_seed": 1}
    ids = post("/generate", {"input_ids": [4, 5], "sampling_params": params}).json()
    text = post("/generate", {"text": "w4 w5", "sampling_params": params}).json()
    texts = post("/generate", {"text": ["w4 w5"], "sampling_params": params}).json()
    assert ids["output_ids"] == text["output_ids"] == texts[0]["output_ids"]


def events_of(server, body):
    """The events of a stream."""
    with httpx.stream("POST", server.url + "/generate", json=body | {"stream": True}, trust_env=False) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_stream_holds_all_so_far_and_ends_with_done(server):
    events = events_of(server, {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}})
    assert [len(event["output_ids"]) for event in events] == [1, 2, 3, 4]
    assert [event["meta_info"]["finish_reason"] for event in events[:3]] == [None] * 3
    assert events[3]["output_ids"][:2] == events[1]["output_ids"]
    assert events[3]["text"].startswith(events[0]["text"])


def test_an_incremental_stream_tells_each_token_once_and_no_text(post, server):
    params = {"max_new_tokens": 4, "ignore_eos": True, "sampling_seed": 3}
    body = {"input_ids": [1, 2], "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    whole = post("/generate", body).json()["meta_info"]
    events = events_of(server, body | {"incremental": True})
    assert all(len(event["output_ids"]) == 1 and "text" not in event for event in events)
    metas = [event["meta_info"] for event in events]
    assert [meta["completion_tokens"] for meta in metas] == [1, 2, 3, 4]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert [entry for meta in metas for entry in meta[name]] == whole[name]
    assert metas[-1]["finish_reason"] == whole["finish_reason"] == {"type": "length", "length": 4}


def test_a_stream_that_is_left_takes_its_own_request_with_it_and_no_other(server):
    async def waiting(other, num_samples):
        while (await server_info(other))["num_waiting_samples"] != num_samples:
            await asyncio.sleep(0.01)

    async def run(other):
        async with SamplerClient(server.url, is_embedded=True) as client:
            await other.pause("in_place")
            left, kept = (asyncio.ensure_future(anext(client.stream(request((n,))))) for n in (1, 2))
            await waiting(other, 2)
            left.cancel()
            await waiting(other, 1)
            assert not kept.done()
            await client.close()
            with pytest.raises(SamplerLost):
                await kept
            await waiting(other, 0)
            await other.resume()

    with_client(server, run)


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-le"]
)
def test_who_waits_for_an_answer_of_which_a_part_has_come_learns_that_the_client_was_closed(sent):
    async def call(client, ask):
        async with asyncio.timeout(10.0):
            with pytest.raises((SamplerLost, aiohttp.ClientConnectionError)):
                await ask(client)

    async def read(client):
        await (await client.open("GET", "/model_info", None)).read()

    async def run():
        asked = asyncio.Semaphore(0)

        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
            asked.release()
            await reader.read()
            writer.close()

        fake = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = SamplerClient(f"http://127.0.0.1:{fake.sockets[0].getsockname()[1]}")
        asks = (lambda c: c.generate([request((1,))]), lambda c: anext(c.stream(request((1,)))), read)
        calls = [asyncio.ensure_future(call(client, ask)) for ask in asks]
        for _ in calls:
            await asked.acquire()
        await asyncio.sleep(0.1)  # it is read by now
        await client.close()
        await asyncio.gather(*calls)
        fake.close()
        await asyncio.sleep(0.05)  # the fake's ends

    asyncio.run(run())


def test_the_streams_of_several_samples_are_told_apart_by_index(server):
    body = {"input_ids": [[1], [2]], "sampling_params": {"max_new_tokens": 3, "n": 2, "ignore_eos": True}}
    ended = [event["index"] for event in events_of(server, body) if event["meta_info"]["finish_reason"]]
    assert sorted(ended) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_embedded", [False, True])
def test_the_client_streams_one_sample(server, is_embedded):
    async def run(client):
        return [completion async for completion in client.stream(request(max_new_tokens=5))]

    parts = with_client(server, run, is_embedded=is_embedded)
    assert [len(part.output_ids) for part in parts] == [1, 2, 3, 4, 5]
    assert parts[-1].finish_reason.type == "length"


# ---- bad requests

GOOD = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}


def params(**changes):
    return {"input_ids": [1, 2, 3], "sampling_params": changes}


BAD_BODIES = {
    "input_ids or text": [b"", GOOD | {"text": "w1"}],
    "not JSON": [b"{", b"\xff\xfe", b"[" * 100_000, b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}'],
    "must be a JSON object": [b"[1, 2]"],
    "there is no such field": [GOOD | {"inputs": [1]}, params(max_tokens=5)],
    "SGLang knows this field": [GOOD | {"session_params": {}}, params(min_p=0.1)],
    "stream": [GOOD | {"stream": 1}],
    "rid": [GOOD | {"rid": 5}],
    "rid is a list of 1 for 1 prompts": [GOOD | {"rid": ["a"]}],
    "same rid": [{"input_ids": [[1], [2]], "rid": ["a", "a"]}],
    "sampling_params is a list of 1 for 2": [{"input_ids": [[1], [2]], "sampling_params": [{}]}],
    "sampling_params": [{"input_ids": [1], "sampling_params": 5}],
    "not empty": [{"input_ids": []}],
    "empty prompt": [{"input_ids": [[]]}, {"input_ids": [[1], 2]}],
    "no integer": [{"input_ids": [1, [2]]}, {"input_ids": [True]}],
    "list of token ids": [{"input_ids": "1"}],
    "outside the vocabulary of 150": [{"input_ids": [token]} for token in (150, 10**30, -1)],
    "do not fit": [{"input_ids": [1] * 256}, params(max_new_tokens=254), params(max_new_tokens=10**30)],
    "text": [{"text": ""}, {"text": 5}],
    "max_new_tokens": [params(max_new_tokens=0), params(max_new_tokens=True)],
    "temperature": [params(temperature=-0.1), b'{"input_ids": [1], "sampling_params": {"temperature": 1e999}}'],
    "top_p": [params(top_p=0.0)],
    "top_k": [params(top_k=0)],
    "n: ": [params(n=0), params(n=10**9)],
    "stop_token_ids": [params(stop_token_ids=[150]), params(stop_token_ids=["x"])],
    "stop": [params(stop="")],
    "sampling_seed": [params(sampling_seed=0.5)],
}


@pytest.mark.parametrize("reason", BAD_BODIES)
def test_a_bad_request_is_answered_with_400_and_a_reason_and_the_server_serves_on(post, reason):
    for body in BAD_BODIES[reason]:
        response = post("/generate", body)
        assert response.status_code == 400, response.text
        assert reason in response.json()["error"]["message"]
    assert post("/generate", GOOD).status_code == 200


def test_a_trace_goes_into_a_folder_that_is_there_one_at_a_time(post, tmp_path):
    for folder, why in ((tmp_path / "nowhere", "not the absolute path of a folder"), ("here", "not the absolute path")):
        answer = post("/start_profile", {"output_dir": str(folder)})
        assert answer.status_code == 400 and why in answer.text
    assert "no trace is under way" in post("/stop_profile", {}).text
    assert post("/start_profile", {"output_dir": str(tmp_path)}).status_code == 200
    assert "a trace is under way" in post("/start_profile", {"output_dir": str(tmp_path)}).text
    post("/generate", GOOD)
    assert post("/stop_profile", {}).status_code == 200
    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".trace.json.gz") and b"aten::" in gzip.decompress(path.read_bytes())


def test_a_paused_server_lives_but_does_not_generate(post):
    assert post("/pause_generation", {"mode": "in_place"}).status_code == 200
    try:
        assert [post(path, method="GET").status_code for path in ("/health", "/health_generate")] == [200, 503]
    finally:
        post("/continue_generation", {})
    assert [post(path, method="GET").status_code for path in ("/health", "/health_generate")] == [200, 200]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/pause_generation", {"mode": "now"}, "mode"),
        ("/pause_generation", {"modes": "abort"}, "no such field"),
        ("/continue_generation", {"x": 1}, "no such field"),
        ("/abort_request", {}, "give a rid"),
        ("/abort_request", {"rid": 5}, "rid"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/nowhere/at/all"}, "no config.json"),
        ("/update_weights_from_disk", {"model_path": "/etc/hostname"}, "no config.json"),
        ("/update_weights_from_disk", {"model_path": "x", "weights": "y"}, "no such field"),
    ],
)
def test_a_bad_control_request_changes_nothing(post, path, body, reason):
    before = post("/generate", params(max_new_tokens=8, sampling_seed=1)).json()
    response = post(path, body)
    assert response.status_code == 400
    told = response.json()
    assert reason in (told["error"]["message"] if "error" in told else told["message"]) and not told.get("success")
    after = post("/generate", params(max_new_tokens=8, sampling_seed=1)).json()
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_versions"] == before["meta_info"]["weight_versions"]


def test_unknown_paths_and_methods_are_answered_in_json(post):
    assert post("/v1/nothing").status_code == 404
    wrong = post("/generate", method="GET")
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (405, "Method Not Allowed")


def test_a_client_that_knows_the_limits_sends_nothing_beyond_them():
    async def run(client):
        for wrong in (request((150,)), request((-1,)), request(()), request([1] * 250), request([1] * 256)):
            with pytest.raises(BadRequest):
                await client.generate([wrong])
        with pytest.raises(SamplerLost, match=r"127\.0\.0\.1:1"):
            await client.generate([request()])

    with_client(SimpleNamespace(url="http://127.0.0.1:1"), run, vocab_size=150, context_length=256)


# ---- control


def test_a_rid_in_use_is_refused_and_free_again_afterwards(server):
    async def run(client):
        task = await slow_generation(client, rid="same")
        with pytest.raises(BadRequest, match="'same' belongs to a request in flight"):
            await client.generate([request(rid="same")])
        await client.abort("same")
        await task
        await client.generate([request(rid="same")])

    with_client(server, run)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_away_takes_its_requests_with_it(server, streams):
    async def run(client):
        params = {"max_new_tokens": 250, "ignore_eos": True, "n": 3000}
        body = {"input_ids": [1], "sampling_params": params, "stream": True}

        if streams:
            async with client._http.post(f"{client.url}/generate", json=body) as response:
                await response.content.readline()
        else:
            (await slow_generation(client)).cancel()
        await asyncio.wait_for(idle(client), timeout=60)

    with_client(server, run)


def test_pausing_with_abort_ends_what_runs_and_holds_what_comes(server):
    async def run(client):
        slow = await slow_generation(client)
        await client.pause("abort")
        (aborted,) = await slow
        assert aborted[-1].finish_reason.type == "abort"
        late = asyncio.create_task(client.generate([request()]))
        await asyncio.sleep(0.1)
        assert not late.done()
        await client.resume()
        ((completion,),) = await late
        assert completion.finish_reason.type == "length"
        assert await client.health()

    with_client(server, run)


def test_a_weight_update_without_pause_waits_for_what_runs(server, text_folder, make_checkpoint):
    async def run(client):
        other = make_checkpoint("qwen3", seed=1)

        running = asyncio.create_task(client.generate([request(n=400, max_new_tokens=250)]))
        await until_running(client, running)
        (first,), _ = await asyncio.gather(running, client.update_weights_from_disk(other, 5))
        ((second,),) = await client.generate([request()])
        await client.update_weights_from_disk(text_folder, "default")
        assert {version for sample in first for version in token_versions(sample)} == {"default"}
        assert second.weight_version == "5"

    with_client(server, run)


def test_the_cache_is_flushed_only_when_nothing_runs(server):
    async def run(client):
        slow, refused = await slow_generation(client), 0
        for _ in range(3):  # the eight that run are of one length: between two steps all of them may have ended
            try:
                await client._call("POST", "/flush_cache", {})
            except BadRequest as error:
                refused += "not flushed" in str(error)
        assert refused >= 2
        await client.abort()
        await slow
        await client._call("POST", "/flush_cache", {})

    with_client(server, run)


def test_the_server_says_what_it_serves(server, text_folder):
    info = with_client(server, lambda client: client.model_info())
    assert info["model_path"] == str(text_folder)
    assert (info["vocab_size"], info["context_length"], info["weight_version"]) == (150, 256, "default")


# ---- life and death


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_server_that_is_killed_or_stopped_under_a_request_is_lost_at_once(text_folder, tmp_path, is_killed):
    process = start_engine(EngineSettings(model=text_folder, max_batch=8), log_path=tmp_path / "log")

    async def run(client):
        task = await slow_generation(client)
        if is_killed:
            os.kill(process.pid, signal.SIGKILL)
        else:
            await asyncio.to_thread(process.stop)
        async with asyncio.timeout(30):
            with pytest.raises(SamplerError, match="was lost at /generate" if is_killed else None):
                await task
            with pytest.raises(SamplerLost, match="was lost at /health"):
                await client.health()

    with_client(process, run)
    process.stop()
    assert not process.is_alive


def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path):
    with pytest.raises(SamplerLost, match=r"ended with code 1 (.|\n)*no config.json"):
        start_engine(EngineSettings(model=tmp_path), log_path=tmp_path / "log")


def test_a_port_in_use_is_reported(server, text_folder, tmp_path):
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(SamplerLost, match="Address already in use"):
        start_engine(EngineSettings(model=text_folder, port=port), log_path=tmp_path / "log")


def test_a_server_ends_with_its_parent(text_folder, tmp_path):
    code = (
        "import os, sys; from nanodag.engines.start import EngineSettings, start_engine; "
        "process = start_engine(EngineSettings(model=sys.argv[1]), log_path=sys.argv[2]); "
        "print(process.pid, flush=True); os._exit(9)"
    )
    command = [sys.executable, "-c", code, str(text_folder), str(tmp_path / "log")]
    pid = int(subprocess.run(command, capture_output=True, text=True).stdout)
    wait_until(lambda: not is_running(pid))


class Running:
    """A request under way."""


def test_who_leaves_is_held_until_the_abort_has_run_so_that_no_other_s_request_comes_to_lie_in_its_place():
    asked, aborted = [], []
    engine = SimpleNamespace(abort=lambda is_meant, reason: aborted.append((is_meant(mine()), is_meant(Running()))))
    server = SamplerServer(engine, SimpleNamespace(call=asked.append), max_text_bytes=0)
    leaver = Running()
    mine = weakref.ref(leaver)
    server._drop([leaver])
    del leaver
    assert mine() is not None  # it may have ended meanwhile: the engine has it no more
    asked.pop()()
    assert aborted == [(True, False)]
    assert mine() is None
