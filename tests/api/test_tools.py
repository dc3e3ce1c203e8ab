"""Tool calls: declared, forced, read out of an answer, and put back into a conversation."""

import json

import pytest

from nanodag.api.bodies import Function, Tool
from nanodag.api.choice import ParsedAnswer
from nanodag.api.served_model import Limits, TokenText
from nanodag.api.tool_format import BareReader, Call, TemplateReader, argument_of
from nanodag.inference.protocol import FinishReason
from nanodag.tokenizer.call_format import CallFormat
from nanodag.tokenizer.messages import folded
from tests.api.conftest import HERMES_TEMPLATE
from tests.api.scripted import CALCULATOR, PYTHON, ask, chat, events, refusal, tool
from tests.tokenizer.chat_templates import CODER, LLAMA, format_of

HERMES = format_of(HERMES_TEMPLATE)


WEATHER = tool("weather", "city", "day")


def message_of(reply):
    (choice,) = reply.json()["choices"]
    return choice["message"], choice["finish_reason"]


@pytest.fixture
def sums(saying):
    return saying("It is ", "<|tool_call|>", "12*34", "<|tool_call_end|>", "<|tool_result|>", "9")[0]


def test_a_call_of_our_format_goes_to_the_one_tool_as_its_argument(sums):
    message, reason = message_of(chat(sums, tools=[CALCULATOR]))
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "12*34"}'}
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert (message["content"], reason) == ("It is ", "tool_calls")


def test_a_streamed_call_is_the_same_call(sums):
    parts = [part["choices"][0] for part in events(chat(sums, tools=[CALCULATOR], stream=True))]
    assert "".join(part["delta"].get("content", "") for part in parts) == "It is "
    first, *rest = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    assert first["index"] == 0 and first["type"] == "function" and first["function"]["name"] == "calculator"
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
    assert "".join(call["function"]["arguments"] for call in [first, *rest]) == '{"expression": "12*34"}'
    assert parts[-1]["finish_reason"] == "tool_calls"


def streamed(folder, text, reason, calls=HERMES):
    """Calls and contents of an answer whose stream is looked at after every character: (name, pieces of arguments)."""
    reader = TemplateReader(calls)
    answer = ParsedAnswer(TokenText(folder), reader, stops=())
    content, calls = "", []

    def look():
        nonlocal content
        content += answer.new().content
        for number, name, arguments in answer.call_parts():
            assert (name is None) == (number < len(calls)), "a call has its name in its first piece alone"
            if name is not None:
                calls.append((name, []))
            calls[number][1].append(arguments)

    for character in text:
        answer._add(reader.take(0, character))
        look()
    answer._end(FinishReason(type=reason))
    look()
    return content, calls, answer.finish_reason


def test_arguments_are_streamed_in_pieces_as_the_model_writes_them(folder):
    text = f"a<tool_call>\n{CALL}\n</tool_call><tool_call>{CALL}</tool_call>"
    content, calls, reason = streamed(folder, text, "stop")
    assert (content, reason, [name for name, _ in calls]) == ("a", "tool_calls", ["weather"] * 2)
    for _, pieces in calls:
        assert len(pieces) > 20 and json.loads("".join(pieces)) == {"city": "Zürich", "day": "now"}


def test_a_call_in_marks_is_streamed_when_it_is_whole(folder):
    call = "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"
    content, calls, reason = streamed(folder, f"So: {call}\n{call}", "stop", format_of(CODER))
    assert (content, reason, calls) == ("So: ", "tool_calls", [("f", ['{"a": "b"}'])] * 2)
    content, calls, reason = streamed(folder, call[:-30], "length", format_of(CODER))
    assert (content, reason, calls) == (call[:-30], "length", [])


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": "}\\"{", "b": {}}}', '{"a": "}\\"{", "b": {}}'),
        ('{"name": "f", "parameters": {}}', "{}"),
        ('{"arguments": {"x": 1}, "name": "f"}', '{"x": 1}'),  # told when it is whole
    ],
)
def test_pieces_end_where_the_arguments_do(folder, call, arguments):
    _, ((name, pieces),), reason = streamed(folder, f"<tool_call>{call}</tool_call>", "stop")
    assert (name, "".join(pieces), reason) == ("f", arguments, "tool_calls")


def test_a_call_that_was_told_and_is_cut_stays_a_call_with_what_it_has(folder):
    cut = '<tool_call>{"name": "f", "arguments": {"a": "b'
    content, calls, reason = streamed(folder, cut, "length")
    assert (content, reason) == ("", "length") and [(n, "".join(p)) for n, p in calls] == [("f", '{"a": "b')]
    content, calls, reason = streamed(folder, '<tool_call>{"name": "f"', "length")
    assert (content, calls, reason) == ('<tool_call>{"name": "f"', [], "length")


def test_a_call_of_our_format_that_is_cut_stays_a_call_where_it_was_streamed(saying):
    asked, _ = saying("<|tool_call|>", "12*3", pause_s=0.001, limits=Limits(events_per_s=1e6))
    parts = [part["choices"][0] for part in events(chat(asked, tools=[CALCULATOR], stream=True))]
    calls = [call["function"]["arguments"] for part in parts for call in part["delta"].get("tool_calls", ())]
    assert "".join(calls) == '{"expression": "12*3' and parts[-1]["finish_reason"] == "length"


def test_a_forced_call_is_opened_in_the_prompt(saying, ids_of):
    app, backend = saying("1+1", "<|tool_call_end|>")
    body = {"tools": [CALCULATOR, PYTHON], "tool_choice": {"type": "function", "function": {"name": "python"}}}
    message, reason = message_of(chat(app, **body))
    assert list(backend.asked[0].input_ids)[-2:] == ids_of("<|assistant|>", "<|tool_call|>")
    assert message["tool_calls"][0]["function"] == {"name": "python", "arguments": '{"code": "1+1"}'}
    assert (message["content"], reason) == (None, "tool_calls")


def test_without_tools_a_call_is_seen_in_the_text(sums):
    for body in ({}, {"tools": [CALCULATOR], "tool_choice": "none"}):
        message, _ = message_of(chat(sums, **body))
        assert message["content"] == "It is <|tool_call|>12*34<|tool_call_end|><|tool_result|>9"
        assert "tool_calls" not in message


def test_a_call_that_is_never_closed_is_content(saying):
    message, reason = message_of(chat(saying("<|tool_call|>", "12*3")[0], tools=[CALCULATOR]))
    assert (message["content"], reason) == ("12*3", "length")


def test_tools_that_our_format_has_no_place_for_are_refused(sums):
    assert "one may be offered" in refusal(chat(sums, tools=[CALCULATOR, PYTHON]))["message"]
    assert "takes 2" in refusal(chat(sums, tools=[WEATHER]))["message"]
    assert refusal(chat(sums, tools=[CALCULATOR], tool_choice={"function": {"name": "x"}}))["param"] == "tool_choice"
    assert refusal(chat(sums, tool_choice="required"))["param"] == "tool_choice"
    messages = [{"role": "user", "content": "?"}, {"role": "tool", "content": "2"}]
    error = refusal(ask(sums, "/v1/chat/completions", {"messages": messages}))
    assert "no call stands before it" in error["message"]


def test_the_answer_goes_on_in_the_turn_that_called(saying, ids_of):
    app, backend = saying("408", "<|end|>")
    call = {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "12*34"}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "408"},
    ]
    ask(app, "/v1/chat/completions", {"messages": messages, "tools": [CALCULATOR]})
    assert list(backend.asked[0].input_ids) == ids_of(
        *("<|bos|>", "<|user|>", "?", "<|end|>", "<|assistant|>", "<|tool_call|>", "12*34", "<|tool_call_end|>"),
        *("<|tool_result|>", "408", "<|tool_result_end|>"),
    )


def test_what_follows_a_result_is_a_part_of_the_same_turn():
    call = {"function": {"name": "f", "arguments": '{"x": "1+1"}'}}
    given = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "!"},
    ]
    turns, is_open = folded(given)
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"] and not is_open
    assert [(part["type"], part["text"]) for part in turns[1]["content"]] == [
        ("text", "a"), ("tool_call", "1+1"), ("tool_result", "2"), ("text", "b"),
    ]  # fmt: skip


def test_the_argument_of_a_tool_is_its_required_one():
    optional = {"properties": {"code": {"type": "string"}, "seconds": {"type": "number"}}, "required": ["code"]}
    assert argument_of(Tool(function=Function(name="python", parameters=optional))) == "code"


CALL = '{"name": "weather", "arguments": {"city": "Zürich", "day": "now"}}'


LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Zürich"}}'
ONE = {"open": "[", "close": "]", "content": "json"}
STRICT = {"start_anchor": "x", "fields": {"content": {}, "tool_calls": ONE}}
READERS = {
    "hermes": lambda: TemplateReader(HERMES),
    "strict": lambda: TemplateReader(CallFormat(shape="own", template=STRICT, mark="[", closing="]")),
    "llama": lambda: BareReader(format_of(LLAMA)),
}


def read(reader, text):
    """Contents and calls of an answer, character by character."""
    content = "".join(reader.take(0, character) for character in text) + reader.end()
    return content, reader.calls


@pytest.mark.parametrize(
    ("of", "text", "content", "count"),
    [
        ("hermes", f"Let me see.<tool_call>\n{CALL}\n</tool_call>", "Let me see.", 1),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", 2),
        ("hermes", f"<tool_call>{CALL}", "", 1),  # its end token came instead of the tag
        ("llama", LLAMA_CALL, "", 1),
        ("llama", f" \n{LLAMA_CALL}\n", "", 1),
    ],
)
def test_calls_in_json_are_read_as_they_come(of, text, content, count):
    arguments = '{"city": "Zürich"}' if of == "llama" else '{"city": "Zürich", "day": "now"}'
    assert read(READERS[of](), text) == (content, [Call("weather", arguments)] * count)


NO_CALLS = {
    "hermes": ["<tool_call>{nonsense</tool_call>", "<tool_call>{nonsense", "a < b <tool", ""],
    "strict": ["a[{nonsense]b"],
    "llama": [f"So: {LLAMA_CALL}", LLAMA_CALL[:-1], '{"name": "weather"}', '{"name": 1, "parameters": {}}', ""],
}


@pytest.mark.parametrize("of", NO_CALLS)
def test_what_is_no_whole_call_or_in_llama_s_format_not_alone_is_content(of):
    for text in NO_CALLS[of]:
        assert read(READERS[of](), text) == (text, [])


def test_content_in_llama_s_format_is_not_held_back():
    reader = READERS["llama"]()
    assert [reader.take(0, character) for character in "So"] == ["S", "o"]


@pytest.fixture
def hermes(saying, hermes_folder, encoding):
    """hermes(text): an application over a model with that format; what its engine was asked last."""

    def make(text):
        app, backend = saying(text, "<|end|>", where=hermes_folder, context=2000)
        return app, lambda: encoding.decode(list(backend.asked[-1].input_ids))

    return make


def test_tools_are_declared_by_the_template_and_calls_streamed(hermes):
    app, prompt = hermes(f"Well.<tool_call>{CALL}</tool_call>")
    message, reason = message_of(chat(app, tools=[WEATHER, CALCULATOR]))
    assert (message["content"], reason) == ("Well.", "tool_calls")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Zürich", "day": "now"}
    assert '"name": "weather"' in prompt() and '"name": "calculator"' in prompt()
    deltas = [part["choices"][0]["delta"] for part in events(chat(app, tools=[WEATHER], stream=True))]
    assert [d["tool_calls"][0]["function"]["name"] for d in deltas if "tool_calls" in d] == ["weather"]


def test_a_named_choice_begins_the_call(hermes):
    app, prompt = hermes('{"city": "Bern", "day": "now"}}</tool_call>')
    body = {"tools": [WEATHER, CALCULATOR], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    message, _ = message_of(chat(app, **body))
    assert message["tool_calls"][0]["function"]["name"] == "weather" and not message["content"]
    assert prompt().endswith('<|assistant|><tool_call>{"name": "weather", "arguments": ')


@pytest.mark.parametrize("between", ["</tool_call><tool_call>", "\n"])
def test_only_one_call_where_parallel_ones_are_off(hermes, between):
    app, _ = hermes(f"<tool_call>{CALL}{between}{CALL}</tool_call>")
    message, reason = message_of(chat(app, tools=[WEATHER], parallel_tool_calls=False))
    assert len(message["tool_calls"]) == 1 and reason == "tool_calls"


def test_arguments_of_earlier_calls_reach_the_template_as_objects(hermes):
    app, prompt = hermes("ok")
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "is it?"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "wet"},
    ]
    ask(app, "/v1/chat/completions", {"messages": messages})
    assert "<|user|>how is it?<|end|>" in prompt()
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call><|end|><|tool|>wet' in prompt()
    for wrong in ("{", r'{"city": "\ud800"}'):  # half of a surrogate pair
        call["function"]["arguments"] = wrong
        assert "are not JSON" in refusal(ask(app, "/v1/chat/completions", {"messages": messages}))["message"]
