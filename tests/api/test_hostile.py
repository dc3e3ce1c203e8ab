"""Who may ask, and what a body may not do."""

import asyncio
import json
import shutil
import time

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from nanodag.api.command import main, parse_arguments
from nanodag.api.served_model import Limits
from nanodag.tokenizer import bounds
from tests.api.scripted import Scripted, app_of, ask, chat, model_of, refusal

USER = {"role": "user", "content": "hi"}
KEY = "a-key-of-24-characters-."


@pytest.fixture
def app(folder, ids_of):
    return app_of(model_of(folder, Scripted(ids_of("a", "<|end|>"))), limits=Limits(max_body_bytes=1 << 20))


# ---- long texts


def test_a_text_is_tokenised_no_further_than_the_context(folder, ids_of):
    counted = []
    bound = bounds.Bound(100)
    with pytest.raises(bounds.TooManyTokens):
        bound.check_texts(["a " * (1 << 23)], lambda part: counted.append(part) or len(part))
    assert len(counted) == 1 and len(counted[0]) == bounds.SLICE_CHARS
    many = ["a" * 1000] * 100_000
    with pytest.raises(bounds.TooManyTokens):
        bound.check_texts(many, lambda part: counted.append(part) or len(part))
    assert len(counted) == 2 and len(counted[1]) < bounds.SLICE_CHARS + 1000


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
def test_a_large_body_delays_nobody_and_is_told_the_context(folder, ids_of, path, content):
    app = app_of(model_of(folder, Scripted(ids_of("a", "<|end|>"))), limits=Limits(max_body_bytes=1 << 25))
    body = {"messages": [USER | {"content": content}]} if "chat" in path else {"prompt": content}
    ended = []

    async def asked(client, name, *how, **what):
        reply = await client.post(*how, **what)
        ended.append(name)
        return reply

    async def main():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            large = [asyncio.ensure_future(asked(client, "large", path, content=json.dumps(body))) for _ in range(3)]
            await asyncio.sleep(0.05)
            small = await asked(client, "small", "/v1/completions", json={"prompt": "a"})
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


def test_a_template_that_loops_ends_at_its_time_and_others_are_answered(folder, ids_of, tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "TEMPLATE_CPU_S", 0.3)
    shutil.copytree(folder, tmp_path / "model")
    loop = "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}{{ messages[0].content }}<|end|>"
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        path = tmp_path / "model" / name
        if name.endswith(".json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
        elif path.exists():
            path.write_text(template)
    app = app_of(model_of(tmp_path / "model", Scripted(ids_of("a", "<|end|>"))))
    error = refusal(chat(app, "loop"))
    assert "the chat template took more than 0.3 s of CPU time" in error["message"]
    assert chat(app, "hi").status_code == 200


# ---- bodies


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", 10**30),
        ("n", True),
        ("n", "2"),
        ("max_tokens", -5),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_logprobs", 5),
        ("logprobs", 3),
        ("seed", 2**63),
        ("stop", ["x"] * 100_000),
        ("stop", "y" * 100_000),
        ("stop", [""]),
        ("stop", [None]),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [USER] * 20_000),
        ("messages", [{"role": "wizard", "content": "hi"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "maybe"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {str(token): 1 for token in range(20_000)}),
        ("logit_bias", [5]),
        ("presence_penalty", 0.5),
        ("min_p", 0.1),
        ("reasoning_effort", "high" * 10),
        ("reasoning_effort", 3),
        ("functions", [{"name": "f"}]),
        ("chat_template_kwargs", {"documents": ["x"]}),
        ("chat_template_kwargs", {str(number): 1 for number in range(65)}),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
        ("beam_size", 4),
    ],
)
def test_a_field_that_is_wrong_is_named(app, field, value):
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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [USER]}),
        ("/tokenize", {"prompt": [1]}),
        ("/tokenize", {"prompt": "a", "truncate": 3}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [600_000]}),
        ("/detokenize", {"tokens": [-1] * 100_000}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {}),
    ],
)
def test_what_is_neither_text_nor_ids_is_refused(app, path, body):
    refusal(ask(app, path, body))


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [-1], [True], [1, "a"], ["a", 1], {"a": 1}, [1.5], ["a"] * 2000]
)
def test_a_prompt_of_no_known_form_is_refused(app, prompt):
    if prompt == "":  # begins with <|bos|>, so it is one
        assert ask(app, "/v1/completions", {"prompt": prompt}).status_code == 200
    else:
        refusal(ask(app, "/v1/completions", {"prompt": prompt}))


# ---- who asks


def test_a_key_is_wanted_of_all_but_health_and_the_page(folder, ids_of):
    page = Route("/", lambda http: PlainTextResponse("page"), methods=["GET"])
    tool = Route("/chat/tool", lambda http: PlainTextResponse("ran"), methods=["POST"])
    app = app_of(
        model_of(folder, Scripted(ids_of("a"))), keys=[KEY, "another-key-of-24-chars"], extra_routes=[page, tool]
    )
    assert ask(app, "/health").status_code == 200 and ask(app, "/").text == "page"
    for path in ("/v1/models", "/metrics", "/version"):
        assert refusal(ask(app, path), 401)["code"] == "invalid_api_key"
        assert ask(app, path, headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    assert (
        refusal(ask(app, "/tokenize", {"prompt": "a"}), 401)
        and refusal(chat(app), 401)
        and refusal(ask(app, "/chat/tool", {}), 401)
    )
    for wrong in (KEY, f"Bearer {KEY}x", "Bearer ", f"Basic {KEY}"):
        refusal(ask(app, "/v1/models", headers={"authorization": wrong}), 401)
    assert ask(app, "/chat/tool", {}, headers={"authorization": f"Bearer {KEY}"}).text == "ran"


def test_a_name_that_was_made_to_point_here_is_refused(app):
    assert ask(app, "/v1/models", host="127.0.0.1").status_code == 200
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example"):
        assert ask(app, "/v1/models", host=host).status_code == 421


def test_pages_of_other_origins_may_ask_only_where_they_are_named(folder, ids_of):
    model = model_of(folder, Scripted(ids_of("a")))
    origin = {"origin": "https://page.example"}
    assert ask(app_of(model), "/v1/models", headers=origin).status_code == 403
    reply = ask(app_of(model, origins=["https://page.example"]), "/v1/models", headers=origin)
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "https://page.example"
    other = ask(app_of(model, origins=["https://page.example"]), "/v1/models", headers={"origin": "https://x.example"})
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers


# ---- the command


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
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "config.json").write_text("{}")
    (tmp_path / "short").write_text("abc\n")
    (tmp_path / "empty").write_text("# none\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--port", "0", "--model", f"tiny={model}", *options]) == 2
    assert said in capsys.readouterr().err


def test_the_command_serves_on_loopback_unless_told():
    assert parse_arguments(["--model", "a=b"]).host == "127.0.0.1"
