"""OpenAI's protocol over an engine that says what a test wrote down."""

import asyncio
import json

import httpx
import pytest

from nanodag.api.served_model import Limits
from nanodag.errors import BadRequest, SamplerError, SamplerLost
from tests.api.scripted import Scripted, app_of, ask, chat, events, model_of, refusal, scope_of, text_of

GREETING = "Grüße, 世界 🙂!"  # characters of one to four bytes, most of them across tokens


@pytest.fixture
def greeting(saying):
    return saying(GREETING, "<|end|>")[1]


@pytest.fixture
def app(folder, greeting):
    return app_of(model_of(folder, greeting))


def test_a_chat_reply_has_openais_form(app, greeting, ids_of):
    reply = chat(app).json()
    (choice,) = reply["choices"]
    num_sampled = len(greeting.ids)
    assert choice["message"] == {"role": "assistant", "content": GREETING, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    prompt = ids_of("<|bos|>", "<|user|>", "hi", "<|end|>", "<|assistant|>")
    assert list(greeting.asked[0].input_ids) == prompt
    assert reply["usage"]["prompt_tokens"] == len(prompt) and reply["usage"]["completion_tokens"] == num_sampled
    assert reply["usage"]["total_tokens"] == len(prompt) + num_sampled
    assert reply["object"] == "chat.completion" and reply["model"] == "tiny" and reply["system_fingerprint"] == "3"
    assert reply["id"].startswith("chatcmpl-")


def test_a_stream_says_the_same_as_the_whole_reply_and_splits_no_character(app):
    parts = events(chat(app, stream=True))
    assert text_of(parts) == GREETING and not any("\ufffd" in text_of([part]) for part in parts)
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert {part["object"] for part in parts} == {"chat.completion.chunk"} and len({part["id"] for part in parts}) == 1


def test_usage_comes_last_in_a_stream_where_it_is_asked_for(app):
    *parts, last = events(chat(app, stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == [] and last["usage"] == chat(app).json()["usage"]
    assert not any("usage" in part for part in parts)


def test_tokens_that_come_fast_are_joined_to_a_few_events(saying):
    app, backend = saying(" ".join("abcdefghijklmnopqrstuvwxyz"), pause_s=0.004, limits=Limits(events_per_s=20))
    said = [part for part in events(chat(app, stream=True)) if text_of([part])]
    assert len(backend.ids) > 20 and len(said) <= 6  # a tenth of a second or a little more


def test_a_long_silence_has_keep_alive_comments(saying):
    reply = chat(saying("a", "<|end|>", pause_s=0.05, limits=Limits(keep_alive_s=0.02))[0], stream=True)
    assert reply.text.count(": keep-alive\n\n") >= 2 and len(events(reply)) == 3


def test_n_choices_are_requests_of_their_own_with_seeds_in_a_row(app, greeting):
    reply = chat(app, n=3, seed=7).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [request.params.sampling_seed for request in greeting.asked] == [7, 8, 9]
    assert reply["usage"]["prompt_tokens"] == len(greeting.asked[0].input_ids)  # once
    assert reply["usage"]["completion_tokens"] == 3 * len(greeting.ids)
    streamed = events(chat(app, n=3, stream=True))
    assert [text_of(streamed, index) for index in range(3)] == [GREETING] * 3


def test_sampling_settings_reach_the_engine(app, greeting):
    chat(app, temperature=0.25, top_p=0.5, top_k=3, max_completion_tokens=9, stop_token_ids=[5])
    params = greeting.asked[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_new_tokens) == (0.25, 0.5, 3, 9)
    assert 5 in params.stop_token_ids and params.n == 1
    chat(app)  # it may fill the context
    assert greeting.asked[1].params.max_new_tokens == 200 - len(greeting.asked[1].input_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "left"), [("世界", "Grüße, "), (["zz", "e, 世"], "Grüß"), ("G", "")])
def test_a_stop_string_ends_an_answer_across_the_borders_of_tokens(app, greeting, stop, left, stream):
    reply = chat(app, stop=stop, stream=stream)
    parts = events(reply) if stream else [reply.json()]
    (ended,) = parts[-1]["choices"]
    assert (text_of(parts) if stream else ended["message"]["content"]) == left
    assert ended["finish_reason"] == "stop" and ended["stop_reason"] in stop and greeting.num_open == 0


def test_what_only_looks_like_a_stop_string_is_said_at_the_end(app):
    assert text_of(events(chat(app, stop="!!", stream=True))) == GREETING


def test_the_token_that_ends_an_answer_is_no_part_of_it(saying, ids_of):
    reply = chat(saying("one", "|", "two")[0], stop_token_ids=ids_of("|"), logprobs=True).json()
    (choice,) = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one", "stop")
    assert choice["stop_reason"] == ids_of("|")[0]
    assert len(choice["logprobs"]["content"]) == len(ids_of("one"))
    assert reply["usage"]["completion_tokens"] == len(ids_of("one")) + 1


def test_limits_of_the_server_are_told(folder, greeting):
    app = app_of(model_of(folder, greeting), limits=Limits(max_prompt_tokens=8, max_new_tokens=4))
    chat(app)
    assert greeting.asked[0].params.max_new_tokens == 4
    assert "this server takes 8" in refusal(chat(app, "a b c d e f g h"))["message"]
    assert "more than the 4" in refusal(chat(app, max_tokens=5))["message"]


def test_logprobs_are_told_for_the_tokens_that_are_said(app, greeting, encoding):
    reply = chat(app, logprobs=True, top_logprobs=2).json()
    scored = reply["choices"][0]["logprobs"]["content"]
    assert len(scored) == len(greeting.ids) - 1  # not the token that ends the turn
    assert [entry["logprob"] for entry in scored] == [-0.5 * (place + 1) for place in range(len(scored))]
    assert b"".join(bytes(entry["bytes"]) for entry in scored).decode() == GREETING
    assert [top["logprob"] for top in scored[0]["top_logprobs"]] == [-0.1, -0.2]
    assert greeting.asked[0].top_logprobs == 2
    parts = events(chat(app, logprobs=True, top_logprobs=2, stream=True))
    streamed = [entry for part in parts for entry in (part["choices"][0]["logprobs"] or {}).get("content", ())]
    assert streamed == scored


def test_logprobs_end_where_a_stop_string_begins(app):
    reply = chat(app, logprobs=True, stop="世界").json()
    scored = reply["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in scored).decode() == "Grüße, "


def test_a_completion_begins_as_a_document_of_ours_does(app, greeting, ids_of):
    reply = ask(app, "/v1/completions", {"prompt": "The cat", "max_tokens": 4}).json()
    assert list(greeting.asked[0].input_ids) == ids_of("<|bos|>", "The cat")
    assert reply["object"] == "text_completion" and reply["choices"][0]["finish_reason"] == "length"
    ask(app, "/v1/completions", {"prompt": ids_of("The cat")})
    assert list(greeting.asked[1].input_ids) == ids_of("The cat")  # as they were given
    assert greeting.asked[1].params.max_new_tokens == 16


@pytest.mark.parametrize("end", ["<|end|>", "<|bos|>"])
def test_a_completion_ends_with_its_turn_or_before_the_next_document(saying, ids_of, end):
    app, _ = saying("one", end, "two")
    (choice,) = ask(app, "/v1/completions", {"prompt": "a"}).json()["choices"]
    assert (choice["text"], choice["finish_reason"], [choice["stop_reason"]]) == ("one", "stop", ids_of(end))
    (on,) = ask(app, "/v1/completions", {"prompt": "a", "ignore_eos": True}).json()["choices"]
    assert (on["text"], on["finish_reason"]) == ("onetwo", "length")


def test_the_token_that_ends_a_completion_has_its_logprob_so_that_lm_eval_counts_right(saying):
    app, _ = saying("<|bos|>")
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    for stream in (False, True):
        reply = ask(app, "/v1/completions", {**body, "stream": stream})
        parts = events(reply) if stream else [reply.json()]
        scores = [choice["logprobs"] for part in parts for choice in part["choices"]]
        assert [one for part in scores for one in part["token_logprobs"]] == [None, -1.0, -1.0, -0.5]
        assert scores[-1]["tokens"][-1] == "<|bos|>"


def test_echo_with_logprobs_scores_the_prompt_alone_where_no_token_is_wanted(app, greeting, ids_of, encoding):
    prompt = ids_of("The cat sat")
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = ask(app, "/v1/completions", body).json()["choices"]
    request = greeting.asked[0]
    assert request.score_prompt and request.params.max_new_tokens == 0
    scores = choice["logprobs"]
    assert choice["text"] == "The cat sat" == "".join(scores["tokens"])
    assert scores["token_logprobs"] == [None, *[-1.0] * (len(prompt) - 1)]
    first, second = scores["top_logprobs"][:2]
    assert first is None and second.keys() == {encoding.decode([token]) for token in (5, prompt[1])}
    assert scores["text_offset"] == [len("".join(scores["tokens"][:place])) for place in range(len(prompt))]
    spelled = {"prompt": "The cat sat", "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = ask(app, "/v1/completions", spelled).json()["choices"]
    assert choice["logprobs"]["text_offset"] == [0, *scores["text_offset"]]  # <|bos|> is no part of the text


def test_a_token_that_is_no_whole_character_is_named_by_its_bytes(app, ids_of):
    body = {"prompt": ids_of("世"), "echo": True, "logprobs": 0, "max_tokens": 0}
    tokens = ask(app, "/v1/completions", body).json()["choices"][0]["logprobs"]["tokens"]
    assert all(token.startswith("bytes:\\x") for token in tokens)


def test_echo_in_a_stream_says_the_prompt_first(app):
    parts = events(ask(app, "/v1/completions", {"prompt": "The cat", "echo": True, "stream": True, "max_tokens": 2}))
    said = "".join(part["choices"][0]["text"] for part in parts)
    assert said.startswith("The catG") and parts[-1]["choices"][0]["finish_reason"] == "length"


def test_models_are_listed_and_asked_by_name(folder, ids_of):
    one, other = Scripted(ids_of("one", "<|end|>")), Scripted(ids_of("other", "<|end|>"))
    app = app_of(model_of(folder, one, name="sft"), model_of(folder, other, name="rl", context=100))
    listed = ask(app, "/v1/models").json()
    assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [("sft", 200), ("rl", 100)]
    assert ask(app, "/v1/models/rl").json()["weight_version"] == "3"
    assert chat(app, model="rl").json()["choices"][0]["message"]["content"] == "other"
    assert chat(app).json()["model"] == "sft"
    error = refusal(chat(app, model="gpt-4"), 404)
    assert error["code"] == "model_not_found" and "there is sft, rl" in error["message"]


def test_a_context_that_overflows_has_openais_code(app):
    error = refusal(chat(app, "a b c " * 100))
    assert error["code"] == "context_length_exceeded" and "maximum context length is 200 tokens" in error["message"]
    error = refusal(chat(app, max_tokens=500))
    assert error["code"] == "context_length_exceeded"
    assert refusal(ask(app, "/v1/completions", {"prompt": [600_000]}))["param"] == "prompt"


def test_more_than_may_wait_is_answered_429_and_a_place_is_free_again(saying):
    app, _ = saying("a b c", "<|end|>", pause_s=0.02, limits=Limits(max_waiting=4))

    async def two_at_once():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            body = {"prompt": "a", "n": 3}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(2)))

    first, second = sorted(asyncio.run(two_at_once()), key=lambda reply: reply.status_code)
    assert first.status_code == 200
    assert refusal(second, 429)["code"] == "queue_full" and second.headers["retry-after"] == "1"
    assert chat(app, n=4).status_code == 200


def test_more_than_may_ever_wait_is_refused_for_good_before_anything_is_made(saying):
    app, _ = saying("a", limits=Limits(max_waiting=4))
    assert "5 choices each" in refusal(chat(app, n=5))["message"]
    assert refusal(ask(app, "/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}))["param"] == "n"


def test_an_answer_that_takes_too_long_is_ended_with_504(saying):
    app, backend = saying("a b c d e f", pause_s=0.05, limits=Limits(request_timeout_s=0.1))
    assert refusal(chat(app), 504)["code"] == "timeout"
    *_, last = events(chat(app, stream=True))
    assert last["error"]["code"] == "timeout"
    assert backend.num_open == 0


@pytest.mark.parametrize(
    ("error", "status"),
    [(SamplerLost("gone"), 503), (SamplerError("NaN"), 500), (BadRequest("no"), 400), (MemoryError("x"), 500)],
)
def test_what_an_engine_fails_with_is_told_in_openais_form(saying, error, status):
    app, _ = saying("a b", error=error, error_at=1)
    refusal(chat(app), status)
    *_, last = events(chat(app, stream=True))
    assert last["error"].keys() == {"message", "type", "param", "code"}


def test_an_engine_that_is_not_up_is_503_and_health_says_which(app, greeting):
    assert ask(app, "/health").status_code == 200
    greeting.is_ready = False
    assert refusal(chat(app), 503)["code"] == "engine_starting"
    assert ask(app, "/health").status_code == 503 and ask(app, "/health").json()["down"] == ["tiny"]


def test_a_path_that_is_not_there_is_404_in_openais_form(app):
    assert refusal(ask(app, "/v1/embeddings", {"input": "a"}), 404)["code"] == "unknown_url"
    assert refusal(ask(app, "/v1/chat/completions"), 405)["code"] == "unknown_url"


def leave_after(app, body, num_messages):
    """Send a request by hand, and leave after so many messages of the reply."""

    async def main():
        left, sent = asyncio.Event(), []
        bodies = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive():
            if bodies:
                return bodies.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) == num_messages:
                left.set()

        if num_messages == 0:
            asyncio.get_running_loop().call_later(0.05, left.set)
        await asyncio.wait_for(app(scope_of("/v1/chat/completions"), receive, send), 5)

    asyncio.run(main())


@pytest.mark.parametrize(("stream", "num_messages"), [(True, 3), (False, 0)])
def test_who_leaves_takes_the_request_along(saying, stream, num_messages):
    app, backend = saying("a b c d e f g h" * 50, pause_s=0.01, context=2000, limits=Limits(events_per_s=1000))
    leave_after(app, {"messages": [{"role": "user", "content": "hi"}], "stream": stream, "n": 2}, num_messages)
    assert len(backend.asked) == 2 and backend.num_open == 0
    assert chat(app, n=2, max_tokens=1).status_code == 200  # and the places are free


def test_metrics_count_requests_and_tokens(app, greeting):
    chat(app)
    chat(app, model="none")
    assert set(ask(app, "/metrics").text.splitlines()) >= {
        f'nanodag_sampled_tokens_total{{model="tiny"}} {float(len(greeting.ids))}',
        'nanodag_samples_total{model="tiny",reason="stop"} 1.0',
        'nanodag_replies_total{path="/v1/chat/completions",status="200"} 1.0',
        "nanodag_samples_in_flight 0.0",
        'nanodag_engine_ready{model="tiny"} 1.0',
        'nanodag_engine_restarts{model="tiny"} 0.0',
    }
