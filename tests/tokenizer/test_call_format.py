"""The format of tool calls, found by letting a chat template write them; and calls read in each."""

import json

import pytest

from nanodag.api.bodies import Tool
from nanodag.api.tool_format import BareReader, Call, TemplateReader
from nanodag.tokenizer.call_format import CallFormat, call_format, declares_tools, own_format
from tests.tokenizer.chat_templates import CODER, DEEPSEEK, GLM, SHAPES, format_of, render_of, template

SCHEMA = {
    "code": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"}, "is_on": {"type": "boolean"},
    "parts": {"type": "array"}, "inner": {"type": "object"},
}  # fmt: skip
TOOL = Tool.model_validate({"function": {"name": "run", "parameters": {"type": "object", "properties": SCHEMA}}})
PLAIN = {"code": "two words", "count": 12, "share": 0.5, "is_on": True}
DEEP = {"parts": [1, "a"], "inner": {"a": {"b": 1}}}
HARD = {"code": "if x < 1 and y > 2:\n    print(\"é\", '}]', {'a': 1})\n", "count": 0}


def written(text, *calls, content=""):
    """An answer with calls, as the template writes it, without what ends it."""
    made = [{"id": "c", "type": "function", "function": {"name": "run", "arguments": one}} for one in calls]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": made}]
    whole = render_of(text)(messages, False)
    _, _, answer = whole.rpartition("<|assistant|>")
    return answer.removesuffix("<|end|>").removesuffix("<|call|>")


def read(text, answer, *, step=1, forced=""):
    """Content and calls of an answer that comes in pieces of so many characters."""
    found = format_of(text)
    reader = BareReader(found, forced) if found.template is None else TemplateReader(found, forced, tools=[TOOL])
    content = "".join(reader.take(-1, answer[place : place + step]) for place in range(0, len(answer), step))
    return (content + reader.end()).strip(), [(call.name, json.loads(call.arguments)) for call in reader.calls]


def own(calls, written=None):
    return own_format({"start_anchor": "\n", "fields": {"content": {}, "tool_calls": calls}}, written)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("step", [1, 7, 9999])
def test_content_and_calls_that_a_template_writes_are_read_whatever_pieces_they_come_in(name, step):
    calls = [PLAIN, DEEP, HARD] if name != "pythonic" else [PLAIN, DEEP]  # whose template writes quotes as they are
    calls = [PLAIN | DEEP | HARD] if name in ("llama", "harmony") else calls
    content = "Let me see: 1 < 2." if name != "llama" else ""
    answer = written(SHAPES[name], *calls, content=content)
    assert read(SHAPES[name], answer, step=step) == (content, [("run", one) for one in calls])


@pytest.mark.parametrize("name", SHAPES)
def test_a_call_that_is_cut_off_is_content(name):
    whole = written(SHAPES[name], {"code": "a b"})
    cut = whole[: whole.index(" b")]
    content, calls = read(SHAPES[name], cut)
    assert calls == [] and len(content) > 9 and cut.endswith(content)
    assert read(SHAPES[name], "No call.") == ("No call.", [])


@pytest.mark.parametrize("name", SHAPES)
def test_an_answer_that_is_made_to_begin_as_a_call_does_is_one(name):
    found, whole = format_of(SHAPES[name]), written(SHAPES[name], {"code": "a"})
    begin = whole.index(found.opening)
    forced = f"{found.opening}run{found.middle}"
    assert whole[begin:].startswith(forced)
    rest = whole[begin + len(forced) :]
    assert read(SHAPES[name], rest, forced=forced) == ("", [("run", {"code": "a"})])


def test_a_call_that_begins_with_its_identity_is_read_but_not_begun_for_the_model():
    call = """{{- '{"tool_call_id": "' + c.id + '", "tool_name": "' + name + '", "parameters": ' }}"""
    call += "{{- args | tojson }}{{- '}' }}"
    identified = template(call, begin="<|START_ACTION|>[", between=", ", end="]<|END_ACTION|>")
    assert read(identified, written(identified, PLAIN)) == ("", [("run", PLAIN)])
    assert format_of(identified).opening == ""


def test_arguments_in_marks_have_the_types_of_the_tools_schema():
    answer = "<tool_call><function=run><parameter=code>\n12\n</parameter><parameter=count>\n12\n</parameter>"
    answer += "<parameter=is_on>False</parameter>\n<parameter=other>7</parameter></function></tool_call>"
    assert read(CODER, answer) == ("", [("run", {"code": "12", "count": 12, "is_on": False, "other": "7"})])


@pytest.mark.parametrize("name", ["coder", "glm"])
def test_marks_that_make_no_argument_make_no_call(name):
    broken = written(SHAPES[name], PLAIN).replace("two words</", "two words<").replace("two words\n</", "two words\n<")
    content, calls = read(SHAPES[name], broken)
    assert calls == [] and "two words" in content
    assert read(SHAPES[name], written(SHAPES[name], {})) == ("", [("run", {})])


def test_json_that_is_none_is_content_with_its_marks():
    broken = written(DEEPSEEK, PLAIN).replace('"count"', "count")
    content, calls = read(DEEPSEEK, broken)
    assert calls == [] and content.startswith("<｜tool▁call▁begin｜>function<｜tool▁sep｜>run") and "count" in content


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("pythonic", "<|tool_call_start|>[run(code={[]: 1})]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[run(code=1e999)]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[run(code=b'x', **{})]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[run(code=print('x'))]<|tool_call_end|>"),
        ("hermes", "<tool_call>\n[[], 1]\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "run", "arguments": {"code": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "run", "arguments": {"share": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "run", "arguments": ' + 9999 * "[" + "</tool_call>"),
        ("mistral", "[TOOL_CALLS]run[ARGS]" + 9999 * "["),
        ("coder", "<tool_call>\n<function=run>\n<parameter=parts>" + 9999 * "[" + "<parameter=parts>"),
    ],
)
def test_what_is_no_call_is_content_whatever_it_holds(name, answer):
    content, calls = read(SHAPES[name], answer, step=100)
    assert calls == [] and len(content) > 20 and answer.endswith(content)


def test_special_tokens_that_are_marks_are_read_by_name():
    reader = TemplateReader(format_of(GLM), names={5: "<tool_call>", 6: "</tool_call>"})
    said = [reader.take(number, text) for number, text in ((5, ""), (9, "run\n"), (6, ""), (7, "x"))]
    assert ("".join(said), reader.calls) == ("x", [Call("run", "{}")])


def test_calls_behind_one_that_was_told_of_are_calls_too():
    reader = TemplateReader(format_of(SHAPES["hermes"]))
    reader.take(-1, '<tool_call>{"name": "run", "arguments": {"count":')
    assert reader.told() == Call("run", '{"count":')
    said = reader.take(-1, '1}}\n{"name": "run", "arguments": {"count": 2}}</tool_call>') + reader.end()
    assert (said, reader.calls) == ("", [Call("run", '{"count":1}'), Call("run", '{"count": 2}')])


def test_a_special_token_that_ends_a_call_is_no_content_where_none_is_open():
    found = own({"open": "<call>", "close": ["</call>", "<|end|>"], "content": "json"})
    for text, content in (("Hello", "Hello"), ("<call>[1]", "<call>[1]"), ('<call>{"name": "run"}', "")):
        reader = TemplateReader(found, names={5: "<|end|>"})
        said = [reader.take(9, text), reader.take(5, ""), reader.end()]
        assert ("".join(said), len(reader.calls)) == (content, not content)


@pytest.mark.parametrize(
    "text",
    [
        template(""),  # leaves calls out
        template("{{- name + ' with ' + (args | length | string) }}"),  # and their arguments
        template("{{- args | tojson }}"),
        template("{{- '<tool_call>' + c | tojson + '</tool_call>' }}"),  # begins with its identity
        template("{{- '<other>' + name + '|' + args | tojson + '</other>' }}"),
        template("{{- 'call ' + name }}" + "{%- for key, value in args.items() %}{{- key + value }}{%- endfor %}"),
    ],
)
def test_a_template_whose_calls_cannot_be_read_has_no_format(text):
    assert call_format(render_of(text)) is None


def test_a_template_that_does_not_tell_of_tools_is_found_out():
    assert declares_tools(render_of(CODER)) and not declares_tools(render_of(CODER.replace("if tools", "if other")))


def test_a_response_template_of_the_tokenizers_own_is_read_with_the_tools_types():
    marked = {"open_pattern": "<call (?P<name>[^>]+)>", "close": "</call>", "content": "xml-inline", "repeats": True}
    marked["content_args"] = {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"}
    marked["transform"] = {"function": {"name": "{name}", "arguments": "{content}"}}
    own = CallFormat(shape="own", template={"start_anchor": "\n", "fields": {"content": {}, "tool_calls": marked}})
    reader = TemplateReader(own, tools=[TOOL])
    said = reader.take(-1, "So<call run><code>12</code><count>12</count></call>") + reader.end()
    assert (said, reader.calls) == ("So", [Call("run", '{"code": "12", "count": 12}')])


def test_a_call_of_the_tokenizers_own_template_that_the_answers_end_closes_is_a_call():
    found = own({"open": "<call>", "close": ["<c>", "<end>"], "content": "json"})
    reader = TemplateReader(found)
    said = reader.take(-1, '<call>{"name": "run", "arguments": {"count": 1}}') + reader.end()
    assert (said, reader.calls) == ("", [Call("run", '{"count": 1}')])
    reader = TemplateReader(found)
    assert reader.take(-1, "<call>[1]<c>") + reader.end() == "<call>[1]"  # which of the two ended it is not told


def test_a_call_of_the_tokenizers_own_template_begins_as_its_chat_template_writes_it():
    calls = {"open": "<tool_call>", "close": "</tool_call>", "content": "json"}
    found = own(calls, format_of(SHAPES["hermes"]))
    assert (found.opening, found.middle) == ('<tool_call>\n{"name": "', '", "arguments": ')
    assert own(calls, format_of(DEEPSEEK)).opening == own(calls).opening == ""
    marked = own({"open_pattern": r"<\|call\|>\w+", "close": ["<|a|>", "<|b|>"], "content": "json"})
    assert all(mark in marked.written for mark in ("<|call|>", "<|a|>", "<|b|>"))
