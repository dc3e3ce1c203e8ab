"""Who may ask, and what a body may not do."""

import asyncio
import json
import shutil
import time

import httpx
import pytest

from nanodag.api.command import parse_arguments, serve
from nanodag.api.served_model import Limits
from nanodag.tokenizer import bounds
from tests.api.scripted import Scripted, app_of, ask, chat, model_of, refusal, with_template

USER = {"role": "user", "content": "hi"}
KEY = "a-key-of-24-characters-."


@pytest.fixture
def app(saying):
    return saying("a", "<|end|>", limits=Limits(max_body_bytes=1 << 20))[0]


def test_a_text_is_tokenised_no_further_than_the_context():
    for texts, num_chars in ((["a " * (1 << 23)], bounds.SLICE_CHARS), (["a" * 1000] * 100_000, 66_000)):
        counted = []
        with pytest.raises(bounds.TooManyTokens):
            bounds.Bound(100).check_texts(texts, lambda part, counted=counted: counted.append(part) or len(part))
        assert [len(part) for part in counted] == [num_chars]


def test_what_nobody_waits_for_is_not_tokenised_further():
    bound = bounds.Bound(1 << 30)
    counted = []

    def leave(part):
        counted.append(part)
        bound.give_up()
        return 0

    with pytest.raises(bounds.GivenUp):
        bound.check_texts(["a " * (1 << 23)], leave)
    assert len(counted) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("content", ["a " * 7_000_000, [5] * 5_000_000], ids=["text", "ids"])
def test_a_large_body_delays_nobody_and_is_told_the_context(saying, path, content):
    app, _ = saying("a", "<|end|>", limits=Limits(max_body_bytes=1 << 25))
    body = {"messages": [USER | {"content": content}]} if "chat" in path else {"prompt": content}

    async def main():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            large = [asyncio.ensure_future(client.post(path, content=json.dumps(body))) for _ in range(3)]
            await asyncio.sleep(0.05)
            small = await client.post("/v1/completions", json={"prompt": "a"})
            return small, await asyncio.gather(*large)

    small, replies = asyncio.run(main())
    assert small.status_code == 200
    for reply in replies:
        error = refusal(reply)
        if path == "/v1/completions" or isinstance(content, str):
            assert error["code"] == "context_length_exceeded" and "maximum context length is 200" in error["message"]
        else:
            field = "content" if "chat" in path else "prompt"
            assert error["message"] == f"{field} has 5000000 items; at most 10000"


def test_a_template_that_loops_ends_at_its_time_and_others_are_answered(folder, saying, tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "TEMPLATE_CPU_S", 0.3)
    loop = "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}{{ messages[0].content }}<|end|>"
    app, _ = saying("a", "<|end|>", where=with_template(folder, tmp_path / "model", template))
    error = refusal(chat(app, "loop"))
    assert "the chat template took more than 0.3 s of CPU time" in error["message"]
    assert chat(app, "hi").status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe",
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "hi"}], "seed": 1' + b"0" * 5000 + b"}",
    ],
)
def test_what_is_no_json_for_us_is_refused(app, raw):
    assert refusal(ask(app, "/v1/chat/completions", raw=raw))["type"] == "invalid_request_error"


WRONG = {
    "n": [0, -1, 10**30, True, "2"],
    "max_tokens": [-5, 1.5],
    "temperature": [-0.1, "hot"],
    "top_p": [0, 1.1],
    "top_logprobs": [5],
    "logprobs": [3],
    "seed": [2**63],
    "stop": [["x"] * 100_000, "y" * 100_000, [""], [None]],
    "messages": [
        *([], "hi", [USER] * 20_000, [{"role": "wizard", "content": "hi"}], [{"role": "user", "content": 3}]),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
    "tools": [[{"type": "function", "function": {"name": ""}}], [{"type": "web_search"}]],
    "tool_choice": ["maybe"],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}],
    "logit_bias": [{"5": 101}, {str(token): 1 for token in range(20_000)}, [5]],
    "presence_penalty": [0.5],
    "min_p": [0.1],
    "reasoning_effort": ["high" * 10, 3],
    "functions": [[{"name": "f"}]],
    "chat_template_kwargs": [{"documents": ["x"]}, {str(number): 1 for number in range(65)}],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
    "beam_size": [4],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_field_that_is_wrong_is_named(app, field):
    for value in WRONG[field]:
        began = time.monotonic()
        error = refusal(ask(app, "/v1/chat/completions", {"messages": [USER], field: value}))
        assert field in error["message"] or (error["param"] or "").startswith(field)
        assert len(error["message"]) < 600 and time.monotonic() - began < 5


def test_what_no_answer_depends_on_is_passed_over(app):
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "logit_bias": {}, "presence_penalty": 0.0}
    harmless |= {"stop": None, "tools": None, "response_format": {"type": "text"}, "top_logprobs": None, "seed": None}
    assert chat(app, **harmless).status_code == 200


def test_a_body_above_the_limit_is_413_whether_or_not_it_says_its_length(app):
    big = json.dumps({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}).encode()
    assert refusal(ask(app, "/v1/chat/completions", raw=big), 413)
    assert refusal(ask(app, "/v1/chat/completions", raw=big, headers={"content-length": "10"}), 413)


def test_what_is_neither_text_nor_ids_is_refused(app):
    for body in ({}, {"prompt": "a", "messages": [USER]}, {"prompt": [1]}, {"prompt": "a", "truncate": 3}):
        refusal(ask(app, "/tokenize", body))
    for body in ({}, *({"tokens": tokens} for tokens in ([-1], [600_000], [-1] * 100_000, "a"))):
        refusal(ask(app, "/detokenize", body))


def test_a_prompt_of_no_known_form_is_refused(app):
    for prompt in (None, [], [[]], [-1], [True], [1, "a"], ["a", 1], {"a": 1}, [1.5], ["a"] * 2000):
        refusal(ask(app, "/v1/completions", {"prompt": prompt}))
    assert ask(app, "/v1/completions", {"prompt": ""}).status_code == 200, "it begins with <|bos|>"


def test_a_key_is_wanted_of_all_but_health(folder, ids_of):
    app = app_of(model_of(folder, Scripted(ids_of("a"))), keys=[KEY, "another-key-of-24-chars"])
    assert ask(app, "/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/version"):
        assert refusal(ask(app, path), 401)["code"] == "invalid_api_key"
        assert ask(app, path, headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    for path, body in (("/tokenize", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [USER]})):
        refusal(ask(app, path, body), 401)
    for wrong in (KEY, f"Bearer {KEY}x", "Bearer ", f"Basic {KEY}"):
        refusal(ask(app, "/v1/models", headers={"authorization": wrong}), 401)


def test_a_name_that_was_made_to_point_here_is_refused(app):
    assert ask(app, "/v1/models", host="127.0.0.1").status_code == 200
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example"):
        assert ask(app, "/v1/models", host=host).status_code == 421


def test_pages_of_other_origins_may_ask_only_where_they_are_named(folder, ids_of):
    model, page = model_of(folder, Scripted(ids_of("a"))), "https://page.example"
    assert ask(app_of(model), "/v1/models", headers={"origin": page}).status_code == 403
    app = app_of(model, origins=[page])
    reply = ask(app, "/v1/models", headers={"origin": page})
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == page
    other = ask(app, "/v1/models", headers={"origin": "https://x.example"})
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--api-key-file", "missing"], "cannot be read"),
        (["--api-key-file", "short"], "16 ASCII characters"),
        (["--api-key-file", "empty"], "one key a line"),
        (["--model", "x=nowhere"], "no model folder"),
        (["--model", "nowhere"], "is not NAME=FOLDER"),
    ],
)
def test_the_command_refuses_before_it_starts_anything(folder, tmp_path, monkeypatch, capsys, options, said):
    assert parse_arguments(["--model", "a=b"]).host == "127.0.0.1"
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "config.json").write_text("{}")
    (tmp_path / "short").write_text("abc\n")
    (tmp_path / "empty").write_text("# none\n")
    monkeypatch.chdir(tmp_path)
    assert serve(parse_arguments(["--port", "0", "--model", f"tiny={model}", *options])) == 2
    assert said in capsys.readouterr().err
