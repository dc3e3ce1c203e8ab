"""How a chat template writes tool calls, found by letting it write one. Nothing here knows a model by its name.

A known call is rendered, and what stands around its name, its arguments' names and their values is the format:

    object   {"name": ..., "arguments": {...}} with a mark before it or none (Hermes, Qwen3, Llama 3), also in a list
    json     the name in marks, then its arguments as JSON (DeepSeek, gpt-oss, Mistral, Kimi)
    pairs    the name in marks, then each argument with its value in marks (Qwen3-Coder, GLM, MiniMax)
    python   [name(argument='value')] (LFM2)

The first three are read by transformers' ResponseParser, the last by Python's own parser. A format counts as found
where calls that the template wrote are read as what they were.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from json import JSONDecoder
from typing import Any, Literal

from nanodag.errors import SourceError

Messages = Sequence[Mapping[str, Any]]
# messages, whether the assistant speaks next -> their text, with PROBED declared
Render = Callable[[Messages, bool], str]
Shape = Literal["object", "json", "pairs", "python", "own"]
Read = tuple[str, Any]  # name and arguments of a call

AROUND = "around"  # in a response template: marks that are no content
_NAME, _ID, _SAID, _KEYS = "zqname", "zqcallidx", "zqsaid", ("zqone", "zqtwo")  # nine letters are an id to Mistral
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
_MARKS = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]|\d+|.", re.DOTALL)
_IS_VALUE = re.compile(r"[\"']?(?:7|[Tt]rue)|\[|\{")


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """template: of transformers' ResponseParser; None where an answer is calls and nothing else. opening, middle,
    closing: what a call has before its name, between that and its arguments, and behind them; opening is empty where it
    cannot be said beforehand. mark: what a region begins with, where it is always the same. keys: of the name and the
    arguments in an object; the first is empty where the name itself is a key. is_single: an object has a region of its
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
                return [self._named(found) for found in _objects(raw)]
            case "python":
                return _python(raw)
            case "own":
                return [self._named(found) for found in (value if isinstance(value, list) else [value])]
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

    def _named(self, found: Any) -> Read:
        found = found.get("function", found) if isinstance(found, dict) else found
        if not isinstance(found, dict):
            raise ValueError("a call is an object")
        if not self.keys[0]:
            if len(found) != 1:
                raise ValueError("a call is one name with its arguments")
            return next(iter(found.items()))
        named = [found[key] for key in (self.keys[1], "arguments", "parameters") if key in found]
        if not isinstance(found.get(self.keys[0]), str) or (self.template is None and not named):
            raise ValueError("a call has a name, and arguments")
        return found[self.keys[0]], named[0] if named else {}


def call_format(render: Render) -> CallFormat | None:
    """The format of a chat template; None where it writes no calls, or writes them as nothing here reads."""
    try:
        probe = _Probe(render)
        found = probe.format()
        return found if found is not None and _reads_itself(found, probe) else None
    except (SourceError, ValueError):
        return None


def own_format(template: Mapping[str, Any], probed: CallFormat | None) -> CallFormat:
    """The format of a response template that a tokenizer brings, with a field `tool_calls`. probed: that of its chat
    template, which says how a call begins where both begin with the same mark."""
    calls = template["fields"]["tool_calls"]
    begins, ends = (_literals(calls.get(name)) for name in ("open", "close"))
    patterns = [calls.get(name, "").replace("\\", "") for name in ("open_pattern", "close_pattern")]
    mark, closing = (marks[0] if len(marks) == 1 else "" for marks in (begins, ends))
    is_same = probed is not None and mark and probed.opening.startswith(mark)
    opening, middle = (probed.opening, probed.middle) if probed is not None and is_same else ("", "")
    return CallFormat(
        shape="own", template=template, opening=opening, middle=middle, closing=closing, mark=mark,
        written=" ".join([*begins, *ends, *patterns]),
    )  # fmt: skip


def declares_tools(render: Render) -> bool:
    """Whether a prompt tells of the tools that are declared."""
    try:
        return _NAME in render([_QUESTION], True)
    except SourceError:
        return False


class _Probe:
    """What a template makes of known calls. Raises SourceError or ValueError where that shows no format."""

    def __init__(self, render: Render) -> None:
        self._render = render
        prompt, self.one = render([_QUESTION], True), _answered(render, _FIRST)
        shared = len(prompt) if self.one.startswith(prompt) else len(_common_begin(self.one, prompt))
        self.first = self.one.index(_FIRST[0])  # the places of the first value, its key and the name before it
        self.key = self.one.rindex(_KEYS[0], 0, self.first)
        self.name = self.one.rindex(_NAME, 0, self.key)
        plain = render([_QUESTION, {"role": "assistant", "content": _SAID}], False)
        self.end = plain[plain.rindex(_SAID) + len(_SAID) :].strip()
        self.opening = self.one[shared : self.name]
        with_text = _answered(render, _FIRST, content=_SAID)
        begin = with_text.find(_SAID)
        if begin >= 0 and (name := with_text.rfind(_NAME, 0, with_text.index(_FIRST[0]))) > begin:
            self.opening = _common_end(self.opening, with_text[begin + len(_SAID) : name])
        self.opening = self.opening.lstrip()
        try:
            self.two = _answered(render, _FIRST, _SECOND)
        except SourceError:
            self.two = ""

    def format(self) -> CallFormat | None:
        return self._object() or self._json() or self._dialect() or self._python() or self._pairs()

    def _object(self) -> CallFormat | None:
        begin = self.name - len(self.opening)
        for brace in (place for place in range(begin, self.name) if self.one[place] == "{"):
            try:
                value, end = JSONDecoder().raw_decode(self.one, brace)
            except ValueError:
                continue
            if end < self.first or (keys := _keys(value)) is None:
                continue
            mark = self.one[begin:brace].rstrip().removesuffix("[").strip()
            close = self._first_mark(re.sub(r"^\s*\]", "", self.one[end:]))
            middle = self.one[self.name + len(_NAME) : self.one.rindex("{", 0, self.key)]
            return CallFormat(
                shape="object", template=_marked(mark, close), opening=_sayable(self.opening),
                middle=_sayable(middle), closing=close, keys=keys,
                is_single=bool(mark) and self.two.count(mark, begin) > 1, written=self._written(),
            )  # fmt: skip
        return None

    def _json(self) -> CallFormat | None:
        brace = self.one.rindex("{", 0, self.key) if "{" in self.one[self.name : self.key] else -1
        try:
            value, end = JSONDecoder().raw_decode(self.one, brace) if brace >= 0 else (None, 0)
        except ValueError:
            return None
        middle = self.one[self.name + len(_NAME) : brace]
        how = {"allow_non_json": True}
        is_found = value == _arguments(_FIRST)
        return self._after_name("json", middle, end, content="json", content_args=how) if is_found else None

    def _dialect(self) -> CallFormat | None:
        """JSON with bare keys, whose texts have quotes of their own."""
        before, quote = self.one[self.name + len(_NAME) : self.key], self._between()[1:]
        if not before.endswith("{") or self._between()[:1] != ":":
            return None
        end = self.one.index("}", self.first) + 1
        how = {"unquoted_keys": True, "string_delims": [[quote, quote]], "allow_non_json": True}
        return self._after_name("json", before[:-1], end, content="json", content_args=how)

    def _python(self) -> CallFormat | None:
        if not self.opening.endswith("[") or self.one[self.name + len(_NAME) : self.key] != "(":
            return None
        mark, end = self.opening[:-1], self.one.index(")", self.first) + 1
        close = self._first_mark(self.one[end:].lstrip().removeprefix("]"))
        return CallFormat(
            shape="python", template=_marked(mark, close), opening=self.opening, middle="(", closing=close,
            written=self._written(),
        )  # fmt: skip

    def _pairs(self) -> CallFormat | None:
        last = self.one.index(_FIRST[1])
        key = self.one.rindex(_KEYS[1], 0, last)
        first_end = self.first + len(_FIRST[0])
        before, between = self.one[self.name + len(_NAME) : self.key], self.one[first_end:key]
        opening = _common_end(before, between)
        ending = between[: len(between) - len(opening)]
        end = last + len(_FIRST[1]) + len(ending)
        if not opening.strip() or not ending.strip() or self.one[end - len(ending) : end] != ending:
            return None
        within = {self._between(), *self._between_others()}
        begin = _pattern(opening.lstrip())
        pair = (
            rf"{begin}(?P<key>[^<>\"\s]+){_either(map(_before_value, within))}"
            rf"(?P<value>(?:(?!{begin}).)*?){_after_value(ending)}"
        )
        middle = before[: len(before) - len(opening)]
        return self._after_name(
            "pairs", middle, end, pair=pair, content="xml-inline", content_args={"tag_pattern": pair}
        )

    def _after_name(self, shape: Shape, middle: str, end: int, pair: str = "", **content: Any) -> CallFormat:
        """A format with the name in marks. end: of the arguments."""
        tail = self.one[end:]
        last = self.two.rfind(_SECOND[0])
        between = ""
        if last >= 0:
            name = self.two.rindex(_NAME, 0, last)
            between = self.two[end:name] if self.two.startswith(self.one[:end]) else ""
        each = _common_end(self.opening, between).lstrip() if between else self.opening
        around = self.opening[: len(self.opening) - len(each)].strip()
        # Where a next call follows at once, each ends where it begins.
        behind = between[: len(between) - len(each)].strip()
        close = _common_begin(behind, tail.lstrip()).strip() if between else self._first_mark(tail)
        rest = self._first_mark(tail.lstrip().removeprefix(close))
        marks = {around, behind.removeprefix(close).strip(), rest} - {""}
        opened = rf"(?P<opened>{_pattern(each)}(?P<name>[^\s<>\[\]{{\"]+){_pattern(middle)})"
        closed = rf"\s*{_pattern(close)}" if close else rf"(?={_pattern(each)}.)"
        transform = {"opened": "{opened}", "function": {"name": "{name}", "arguments": "{content}"}}
        return CallFormat(
            shape=shape, template=_region(opened, closed, marks, **content, transform=transform), pair=pair,
            opening=_sayable(self.opening), middle=_sayable(middle), closing=close, written=self._written(),
        )  # fmt: skip

    def _written(self) -> str:
        text = (self.two if _SECOND[0] in self.two else self.one).rstrip()
        return text[self.name - len(self.opening) :].removesuffix(self.end)

    def _between(self) -> str:
        """What stands between the first key and its value."""
        return self.one[self.key + len(_KEYS[0]) : self.first]

    def _between_others(self) -> Iterator[str]:
        """The same for values that are no text."""
        for value in (7, True, [7], {_KEYS[1]: 7}):
            call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": {_KEYS[0]: value}}}
            text = self._render([_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], False)
            begin = text.rindex(_KEYS[0], 0, text.rindex("7") if value is not True else None) + len(_KEYS[0])
            found = _IS_VALUE.search(text, begin)
            if found is not None and found.start() - begin < 80:
                yield text[begin : found.start()]

    def _first_mark(self, tail: str) -> str:
        """What a text begins with: a mark, or letters without white space. Empty where the answer ends there."""
        found = re.match(r"<[^<>\s]+>|\[[A-Z_/]+\]|[^\s<]+", tail.lstrip())
        return "" if found is None or self.end.startswith(found[0]) else found[0]


def _answered(render: Render, *calls: tuple[str, str], content: str = "") -> str:
    functions = [{"name": _NAME, "arguments": _arguments(values)} for values in calls]
    made = [{"id": _ID, "type": "function", "function": function} for function in functions]
    return render([_QUESTION, {"role": "assistant", "content": content, "tool_calls": made}], False)


def _arguments(values: tuple[str, str]) -> dict[str, str]:
    return dict(zip(_KEYS, values, strict=True))


def _reads_itself(found: CallFormat, probe: _Probe) -> bool:
    """Whether calls that the template wrote are read as what they were."""
    for text, calls in ((probe.one, (_FIRST,)), (probe.two, (_FIRST, _SECOND))):
        if all(values[0] in text for values in calls):
            answer = text[probe.name - len(probe.opening) :].rstrip().removesuffix(probe.end)
            if _all_calls(found, answer) != [(_NAME, _arguments(values)) for values in calls]:
                return False
    return True


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


def _sayable(text: str) -> str:
    """Empty for what another call has in another way."""
    return "" if _ID in text or _NAME in text else text


def _marked(mark: str, close: str) -> dict[str, Any] | None:
    """A response template with calls behind a mark; None where there is none."""
    if not mark:
        return None
    transform = {"opened": "{opened}", "content": "{content}"}
    return _region(f"(?P<opened>{_pattern(mark)})", _pattern(close), transform=transform)


def _region(opening: str, closing: str, around: Collection[str] = (), **how: Any) -> dict[str, Any]:
    """A response template with calls between two patterns; an empty closing is the answer's end. around: marks that
    stand before the first call and behind the last."""
    ends = {"close_pattern": closing} if closing else {}
    calls = {"open_pattern": opening, **ends, "content": "text", "repeats": True} | how
    fields: dict[str, Any] = {"content": {}, "tool_calls": calls}
    if around:
        fields[AROUND] = {"open_pattern": _either(map(_pattern, around)), "close_pattern": "(?=.)|$"}
    return {"start_anchor": "\n", "fields": fields}


def _keys(value: Any) -> tuple[str, str] | None:
    """The keys of name and arguments in a call that is an object."""
    value = value.get("function", value) if isinstance(value, dict) else {}
    if value == {_NAME: _arguments(_FIRST)}:
        return "", ""
    names = [key for key, one in value.items() if one == _NAME]
    arguments = [key for key, one in value.items() if one == _arguments(_FIRST)]
    return (names[0], arguments[0]) if names and arguments else None


def _objects(text: str) -> Iterator[Any]:
    """The objects of a text: alone, in a list, or one after the other."""
    place = 0
    while found := re.compile(r"\s*(?=\S)").match(text, place):
        value, place = JSONDecoder().raw_decode(text, found.end())
        yield from value if isinstance(value, list) else [value]


def _literals(marks: str | Sequence[str] | None) -> Sequence[str]:
    """Of a response template, which has one or a list of them."""
    return [marks] if isinstance(marks, str) else marks or []


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
    if any(one.arg is None for one in call.keywords):
        raise ValueError("an argument has a name")
    try:
        given = {str(one.arg): ast.literal_eval(_JsonNames().visit(one.value)) for one in call.keywords}
        return call.func.id, json.loads(json.dumps(given, allow_nan=False))
    except TypeError as error:
        raise ValueError(f"what JSON has no place for: {error}") from error


class _JsonNames(ast.NodeTransformer):
    """JSON's names for Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


def _marks(text: str) -> list[str]:
    return _MARKS.findall(text)


def _common_end(one: str, other: str) -> str:
    """The marks and letters of `one` that both end with; numbers count as equal."""
    pairs = zip(reversed(_marks(one)), reversed(_marks(other)), strict=False)
    same = takewhile(lambda pair: pair[0] == pair[1] or (pair[0].isdigit() and pair[1].isdigit()), pairs)
    return "".join(reversed([mark for mark, _ in same]))


def _common_begin(one: str, other: str) -> str:
    """The marks and letters of `one` that both begin with."""
    pairs = zip(_marks(one), _marks(other), strict=False)
    return "".join(mark for mark, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _pattern(literal: str) -> str:
    """A literal in which white space, numbers and the identity of a call may be others."""
    parts = re.split(rf"(\s+|\d+|{_ID}|{_NAME})", literal)
    return "".join(_part(part) for part in parts if part)


def _part(part: str) -> str:
    if part in (_ID, _NAME):
        return r"[^<\[\]\s]*"
    return r"\s*" if part.isspace() else r"\d+" if part.isdigit() else re.escape(part)


def _before_value(literal: str) -> str:
    """The same where a value follows: white space at its end is the mark's, if it is there."""
    bare = literal.rstrip()
    return _pattern(bare) + "".join(re.escape(space) + "?" for space in literal[len(bare) :])


def _after_value(literal: str) -> str:
    bare = literal.lstrip()
    spaces = literal[: len(literal) - len(bare)]
    return "".join(re.escape(space) + "?" for space in spaces) + _pattern(bare)


def _either(patterns: Iterable[str]) -> str:
    found = sorted(set(patterns), key=len, reverse=True)
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
