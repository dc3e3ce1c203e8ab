"""The format of tool calls, found by letting a chat template write them; and calls read in each."""

import json

import pytest

from nanodag.api.bodies import Tool
from nanodag.api.tool_format import BareReader, Call, TemplateReader
from nanodag.tokenizer.call_format import CallFormat, call_format, declares_tools
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


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("step", [1, 7, 9999])
def test_calls_that_a_template_writes_are_read_whatever_pieces_they_come_in(name, step):
    calls = [PLAIN, DEEP] if name not in ("llama", "harmony") else [PLAIN | DEEP]
    assert read(SHAPES[name], written(SHAPES[name], *calls), step=step) == ("", [("run", one) for one in calls])


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"pythonic"}))  # whose template writes quotes as they are
def test_values_with_marks_quotes_and_line_ends_are_read_as_they_were(name):
    assert read(SHAPES[name], written(SHAPES[name], HARD)) == ("", [("run", HARD)])


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"llama"}))
def test_what_stands_before_a_call_is_content(name):
    content, calls = read(SHAPES[name], written(SHAPES[name], PLAIN, content="Let me see: 1 < 2."))
    assert (content, calls) == ("Let me see: 1 < 2.", [("run", PLAIN)])


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
    assert calls == [] and content.startswith("<｜call▁begin｜>function<｜sep｜>run") and "count" in content


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("pythonic", "<|calls|>[run(code={[]: 1})]<|/calls|>"),
        ("pythonic", "<|calls|>[run(code=1e999)]<|/calls|>"),
        ("pythonic", "<|calls|>[run(code=b'x', **{})]<|/calls|>"),
        ("pythonic", "<|calls|>[run(code=print('x'))]<|/calls|>"),
        ("hermes", "<tool_call>\n[[], 1]\n</tool_call>"),
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


@pytest.mark.parametrize(
    "text",
    [
        template(""),  # leaves calls out
        template("{{- name + ' with ' + (args | length | string) }}"),  # and their arguments
        template("{{- args | tojson }}"),
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
