"""The formats in which well-known families of models write tool calls, and which one a template writes.

    object   {"name": ..., "arguments": {...}} behind a mark or alone, also in a list
    json     the name in marks, then its arguments as JSON
    pairs    the name in marks, then each argument with its value in marks
    python   [name(argument='value')]

The first three are read by transformers' ResponseParser, the last by Python's own parser. A template has the first
format in which known calls that it renders are read back as what they were. No model is known by its name.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecoder
from typing import Any, Literal

from nanodag.errors import SourceError
from nanodag.host.beside import table_beside

Messages = Sequence[Mapping[str, Any]]
# messages, whether the assistant speaks next -> their text, with PROBED declared
Render = Callable[[Messages, bool], str]
Shape = Literal["object", "json", "pairs", "python", "own"]
Read = tuple[str, Any]  # name and arguments of a call

AROUND = "around"  # in a response template: marks that are no content
_NAME, _ID, _ANSWER, _KEYS = "zqname", "zqcallidx", "zqsaid", ("zqone", "zqtwo")  # nine letters are an id to Mistral
_FIRST, _SECOND = ("zq first", "zq second"), ("zq third", "zq fourth")
_QUESTION = {"role": "user", "content": "zqask"}
PROBED = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "zqmeaning",
        "parameters": {"type": "object", "properties": {key: {"type": "string", "description": key} for key in _KEYS}},
    },
}


@dataclass(frozen=True)
class _Family:
    """mark: where a region of calls begins; head: from there to the arguments; close: behind them. around: marks before
    the first call and behind the last. pair: an argument. quote: around texts, in JSON with bare keys.

    White space stands for any or none; «name», «key» and «value» for themselves, «id» for what differs by call."""

    shape: "Shape"
    mark: str
    head: str
    close: str = ""
    around: Sequence[str] = ()
    pair: str = ""
    quote: str = ""

    @property
    def keys(self) -> tuple[str, str]:
        """Keys of the name and the arguments of an object."""
        *_, name, arguments = ["name", "arguments", *re.findall(r'"(\w+)":', self.head)]
        return name, arguments


_STANDS_FOR = {"«name»": r"(?P<name>[^\s<>\[\]{\"]+)", "«key»": r"(?P<key>[^<>\"\s]+)", "«id»": r"[^<\[\]\s]*"}
_ROWS: list[dict[str, Any]] = table_beside(__file__, "call_formats.yaml")
_FAMILIES = tuple(_Family(**row) for row in _ROWS)


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """template: of transformers' ResponseParser; None where an answer is calls and nothing else. opening, middle,
    closing: what a call has before its name, between that and its arguments, and behind them; opening is empty where it
    cannot be said beforehand. mark: what a region begins with, where it is always the same. keys: of the name and the
    arguments in an object. is_single: an object has a region of its
    own. pair: a pattern of an argument. written: calls as the template writes them."""

    shape: Shape
    template: Mapping[str, Any] | None
    opening: str = ""
    middle: str = ""
    closing: str = ""
    mark: str = ""
    keys: tuple[str, str] = ("name", "arguments")
    is_single: bool = True
    pair: str = ""
    written: str = ""

    def read(self, value: Any, raw: str, *, is_closed: bool = True) -> list[Read]:
        """The calls of a region. value: as the parser gives it; raw: its text. Raises ValueError where it is no call,
        and where JSON or UTF-8 has no place for what it says: NaN, half of a surrogate pair."""
        calls = self._read(value, raw, is_closed)
        json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()
        return calls

    def _read(self, value: Any, raw: str, is_closed: bool) -> list[Read]:
        match self.shape:
            case "object":
                return [self._named(call) for call in _objects(raw)]
            case "python":
                return _python(raw)
            case "own":
                return [self._named(call) for call in (value if isinstance(value, list) else [value])]
        name, arguments = self._named(value)
        if self.shape == "json" and not is_closed:
            arguments = self._json(raw)
        if not isinstance(arguments, dict):
            raise ValueError(f"no arguments: {raw[:80]!r}")
        if self.shape == "pairs" and not (is_closed and not re.sub(self.pair, "", raw, flags=re.DOTALL).strip()):
            raise ValueError(f"no arguments, or not all of them: {raw[:80]!r}")
        return [(name, arguments)]

    def _json(self, raw: str) -> Any:
        from transformers.utils.chat_parsing.content_parsers import parse_content

        assert self.template is not None
        return parse_content(raw, "json", self.template["fields"]["tool_calls"]["content_args"])

    def _named(self, call: Any) -> Read:
        call = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(call, dict):
            raise ValueError("a call is an object")
        arguments = [call[key] for key in (self.keys[1], "arguments", "parameters") if key in call]
        if not isinstance(call.get(self.keys[0]), str) or (self.template is None and not arguments):
            raise ValueError("a call has a name, and arguments")
        return call[self.keys[0]], arguments[0] if arguments else {}


def call_format(render: Render) -> CallFormat | None:
    """The format of a chat template; None where it writes no calls, or writes them as no family does."""
    try:
        one_call = _answered(render, _FIRST)
        plain = render([_QUESTION, {"role": "assistant", "content": _ANSWER}], False)
    except SourceError:
        return None
    try:
        two_calls = _answered(render, _FIRST, _SECOND)
    except SourceError:
        two_calls = ""
    end = plain[plain.rfind(_ANSWER) + len(_ANSWER) :].strip()
    formats = (_format_of(family, one_call, two_calls, end) for family in _FAMILIES)
    return next((fitting for fitting in formats if fitting is not None), None)


def _format_of(family: _Family, one: str, two: str, end: str) -> CallFormat | None:
    """A family's format, with the white space of a template; None where that writes another. one, two: a conversation
    that ends with one call and with two, empty where the template refuses them. end: of a turn."""
    before, after = family.head.split("«name»")
    first = rf"(?:(?:{_any_of(family.around)})\s*)?" if family.around else ""
    call = re.compile(f"({first}{_pattern(family.mark + before)}){_NAME}({_pattern(after)})")
    match = call.search(one, one.rfind(_QUESTION["content"]))
    if match is None:
        return None
    opening, middle = ("" if _ID in part or _NAME in part else part for part in match.groups())
    answers = [text[match.start() :].rstrip().removesuffix(end) for text in (one, two)]
    has_two = _SECOND[0] in two
    calls = CallFormat(
        shape=family.shape, template=_response_template(family), opening=opening, middle=middle, closing=family.close,
        keys=family.keys, is_single=bool(family.mark) and answers[1].count(family.mark) > 1, pair=_pair(family.pair),
        written=answers[has_two],
    )  # fmt: skip
    is_read = _reads(calls, answers[0], _FIRST) and (not has_two or _reads(calls, answers[1], _FIRST, _SECOND))
    return calls if is_read else None


def _response_template(family: _Family) -> dict[str, Any] | None:
    """A template of transformers' ResponseParser; None where calls have no mark."""
    if not family.mark:
        return None
    opening, closing = _pattern(family.mark), _pattern(family.close)
    how: dict[str, Any] = {"content": "text", "transform": {"opened": "{opened}", "content": "{content}"}}
    if family.shape in ("json", "pairs"):
        closing = rf"\s*{closing}" if closing else rf"(?={opening}.)"  # the next call, where nothing closes this one
        opening = _pattern(family.mark + family.head)
        function = {"name": "{name}", "arguments": "{content}"}
        how = {"content": "xml-inline", "content_args": {"tag_pattern": _pair(family.pair)}}
        if family.shape == "json":
            dialect = {"unquoted_keys": True, "string_delims": [[family.quote] * 2]} if family.quote else {}
            how = {"content": "json", "content_args": {"allow_non_json": True, **dialect}}
        how["transform"] = {"opened": "{opened}", "function": function}
    ends = {"close_pattern": closing} if closing else {}
    calls = {"open_pattern": f"(?P<opened>{opening})", **ends, "repeats": True, **how}
    fields: dict[str, Any] = {"content": {}, "tool_calls": calls}
    if family.around:
        fields[AROUND] = {"open_pattern": _any_of(family.around), "close_pattern": "(?=.)|$"}
    return {"start_anchor": "\n", "fields": fields}


def own_format(template: Mapping[str, Any], probed: CallFormat | None) -> CallFormat:
    """The format of a response template that a tokenizer brings, with a field `tool_calls`. probed: that of its chat
    template, which says how a call begins where both begin with the same mark."""
    calls = template["fields"]["tool_calls"]
    literals = (calls.get(name) or [] for name in ("open", "close"))  # one, or a list
    begins, ends = ([marks] if isinstance(marks, str) else marks for marks in literals)
    patterns = [calls.get(name, "").replace("\\", "") for name in ("open_pattern", "close_pattern")]
    mark, closing = (marks[0] if len(marks) == 1 else "" for marks in (begins, ends))
    is_same = probed is not None and mark and probed.opening.startswith(mark)
    opening, middle = (probed.opening, probed.middle) if probed is not None and is_same else ("", "")
    return CallFormat(
        shape="own", template=template, opening=opening, middle=middle, closing=closing, mark=mark,
        written=" ".join([*begins, *ends, *patterns]),
    )  # fmt: skip


def declares_tools(render: Render) -> bool:
    """True when a prompt tells of the tools that are declared."""
    try:
        return _NAME in render([_QUESTION], True)
    except SourceError:
        return False


def _answered(render: Render, *calls: tuple[str, str]) -> str:
    functions = [{"name": _NAME, "arguments": _arguments(values)} for values in calls]
    made = [{"id": _ID, "type": "function", "function": function} for function in functions]
    return render([_QUESTION, {"role": "assistant", "content": "", "tool_calls": made}], False)


def _arguments(values: tuple[str, str]) -> dict[str, str]:
    return dict(zip(_KEYS, values, strict=True))


def _reads(calls: CallFormat, answer: str, *values: tuple[str, str]) -> bool:
    """True when calls that a template wrote are read as what they were."""
    try:
        return _all_calls(calls, answer) == [(_NAME, _arguments(each)) for each in values]
    except ValueError:
        return False


def _all_calls(found: CallFormat, text: str) -> list[Read]:
    """The calls of a text that begins with one. Raises ValueError where it is none."""
    from transformers.utils.chat_parsing import ResponseParser

    if found.template is None:
        return found.read(None, text)
    parser, raw, calls = ResponseParser(dict(found.template), prefix=""), "", []
    for event in [*parser.feed(text), *parser.finalize()[1]]:
        if event["field"] == "tool_calls":
            raw += event.get("text", "")
            if event["type"] == "region_close":
                calls += found.read(event["value"], raw)
                raw = ""
    return calls


def _objects(text: str) -> Iterator[Any]:
    """The objects of a text: alone, in a list, or one after the other."""
    place = 0
    while match := re.compile(r"\s*(?=\S)").match(text, place):
        value, place = JSONDecoder().raw_decode(text, match.end())
        yield from value if isinstance(value, list) else [value]


def _python(text: str) -> list[Read]:
    """Calls as Python writes them, in a list."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no calls: {text[:80]!r}") from error
    calls = body.elts if isinstance(body, ast.List) else [body]
    return [_python_call(call) for call in calls]


def _python_call(call: ast.expr) -> Read:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError("a call has a name and named arguments")
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("an argument has a name")
    try:
        arguments = {str(keyword.arg): ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in call.keywords}
        return call.func.id, json.loads(json.dumps(arguments, allow_nan=False))
    except TypeError as error:
        raise ValueError(f"what JSON has no place for: {error}") from error


class _JsonNames(ast.NodeTransformer):
    """JSON's names for Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


def _pattern(literal: str) -> str:
    parts = re.split(r"(\s+|«\w+»)", literal)
    return "".join(_STANDS_FOR.get(part, r"\s*" if part.isspace() else re.escape(part)) for part in parts)


def _any_of(marks: Sequence[str]) -> str:
    return "|".join(map(_pattern, marks))


def _pair(literal: str) -> str:
    """The pattern of an argument. A line end beside its value is the mark's, if it is there."""
    if not literal:
        return ""
    begin = _pattern(literal[: literal.index("«key»")])
    before, after = literal.split("«value»")
    gap = r"\n?" if before.endswith("\n") else ""
    value = rf"(?P<value>(?:(?!{begin}).)*?)"
    return f"{_pattern(before.rstrip())}{gap}{value}{gap}{_pattern(after.lstrip())}"
