"""How a model writes tool calls, and how they are read out of an answer while it grows.

Three formats: nanodag's own, where a call is text between two special tokens (`nanodag.tokenizer.layout`); that of
Hermes and Qwen, JSON between <tool_call> and </tool_call>; and that of Llama 3, an answer that is JSON and nothing
else. A tokenizer that brings a `response_template` of its own is read by that. The reader is transformers'
ResponseParser, but for the first and the last.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from nanodag.api.bodies import Tool
from nanodag.api.refusals import Refused
from nanodag.tokenizer.chat import ChatRenderer, NativeRenderer, TemplateRenderer
from nanodag.tokenizer.encoding import Encoding

HERMES: Mapping[str, Any] = {
    "start_anchor": "\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "content_args": {"allow_non_json": True},
            "repeats": True,
        },
    },
}


@dataclass(frozen=True)
class Call:
    """A tool call of an answer. arguments: JSON."""

    name: str
    arguments: str


class Reader(Protocol):
    """Takes an answer's tokens; gives the text that is no call, and the calls. is_cut: the last of them was not closed;
    it is a call all the same, as a client was told of it."""

    calls: list[Call]
    is_cut: bool

    def told(self) -> Call | None:
        """The call that is open, with what is certain of its arguments, to be told to a client: it stays a call then,
        whatever becomes of it. None where there is none, or its name is not known yet."""
        ...

    def take(self, token: int, piece: str) -> str:
        """What this token adds to the content."""
        ...

    def end(self) -> str:
        """What is left when no more comes."""
        ...


class PlainReader:
    """All is content. names: special tokens that are to be seen all the same."""

    is_cut = False

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self.calls: list[Call] = []

    def told(self) -> Call | None:
        return None

    def take(self, token: int, piece: str) -> str:
        return self._names.get(token, "") + piece

    def end(self) -> str:
        return ""


class NativeReader:
    """nanodag's own format. A call has no name and is one text: it goes to the one tool, as its one argument."""

    def __init__(self, renderer: NativeRenderer, tool: Tool, *, is_open: bool) -> None:
        """is_open: the prompt ended with the token that opens a call."""
        self._renderer, self._tool = renderer, tool
        self._text = "" if is_open else None
        self._is_told = self.is_cut = False
        self.calls: list[Call] = []

    def told(self) -> Call | None:
        if self._text is None:
            return None
        self._is_told = True
        return Call(self._tool.function.name, self._arguments().removesuffix('"}'))

    def _arguments(self) -> str:
        return json.dumps({argument_of(self._tool): self._text}, ensure_ascii=False)

    def take(self, token: int, piece: str) -> str:
        if token == self._renderer.call_begin:
            self._text = (self._text or "") if self._is_told else ""
        elif self._text is None:
            return piece
        elif token == self._renderer.call_end:
            self.calls.append(Call(self._tool.function.name, self._arguments()))
            self._text, self._is_told = None, False
        else:
            self._text += piece
        return ""

    def end(self) -> str:
        """A call that was never closed is content, where nobody was told of it."""
        if self._is_told and (cut := self.told()) is not None:
            self.calls.append(cut)
            self._text, self.is_cut = None, True
        text, self._text = self._text, None
        return text or ""


class TemplateReader:
    """A format that a response template describes."""

    def __init__(self, template: Mapping[str, Any], forced: str) -> None:
        """forced: how the answer was made to begin, in the prompt."""
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(dict(template), prefix="")
        calls = template["fields"]["tool_calls"]
        # Around a call that is none, which is content; a template may have patterns in their place.
        self._open, self._close = calls.get("open") or "", calls.get("close") or ""
        self._raw = ""  # of the call that is open
        self._is_told = self.is_cut = False
        self._is_lost = False  # the parser could not read on: what follows is content
        self.calls: list[Call] = []
        self.take(-1, forced)

    def take(self, token: int, piece: str) -> str:
        return piece if self._is_lost else self._read(lambda: self._parser.feed(piece))

    def told(self) -> Call | None:
        call = None if self._is_lost else _begun(self._raw)
        self._is_told = self._is_told or call is not None
        return call

    def end(self) -> str:
        self._close = ""  # a call that is open now was never closed by the model
        return "" if self._is_lost else self._read(lambda: self._parser.finalize()[1])

    def _read(self, parse: Callable[[], Sequence[Mapping[str, Any]]]) -> str:
        try:
            return self._events(parse())
        except (ValueError, KeyError, TypeError):  # the model wrote what its own template does not allow
            self._is_lost = True
            return self._no_call()

    def _events(self, events: Sequence[Mapping[str, Any]]) -> str:
        content = ""
        for event in events:
            is_call = event["field"] == "tool_calls"
            if event["type"] == "region_chunk":
                if is_call:
                    self._raw += event["text"]
                elif not (self.calls and event["text"].isspace()):  # such as line ends between calls
                    content += event["text"]
            elif event["type"] == "region_close" and is_call:
                content += self._called(event["value"])
                self._raw, self._is_told = "", False
        return content

    def _called(self, value: Any) -> str:
        """Note a call; what is none is content."""
        call = value.get("function", value) if isinstance(value, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return self._no_call()
        if self._is_told and (begun := _begun(self._raw)) is not None:
            self.calls.append(begun)  # in the model's own spelling, as its parts were told
            return ""
        arguments = call.get("arguments", call.get("parameters", {}))
        self.calls.append(Call(call["name"], _as_json(arguments)))
        return ""

    def _no_call(self) -> str:
        """What an open call that is none is as content; nothing where a client was told of it."""
        if self._is_told and (begun := _begun(self._raw)) is not None:
            self.calls.append(begun)
            self.is_cut = True
            return ""
        return f"{self._open}{self._raw}{self._close}"


class BareReader:
    """Llama 3's format: an answer that is one JSON object with a name and `parameters` is a call. Nobody is told of it
    before it is whole."""

    is_cut = False

    def __init__(self) -> None:
        self._text = ""  # all of it while it may be a call, then nothing
        self._is_content = False
        self.calls: list[Call] = []

    def told(self) -> Call | None:
        return None

    def take(self, token: int, piece: str) -> str:
        text, self._text = self._text + piece, ""
        self._is_content = self._is_content or text.lstrip()[:1] not in ("", "{")
        if self._is_content:
            return text
        self._text = text
        return ""

    def end(self) -> str:
        text, self._text = self._text, ""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if not isinstance(found.get("name"), str) or not isinstance(found.get("parameters"), dict):
            return text
        self.calls.append(Call(found["name"], json.dumps(found["parameters"], ensure_ascii=False)))
        return ""


def _as_json(arguments: Any) -> str:
    """Arguments as JSON; so also a text that the model wrote in their place, as templates take JSON alone."""
    if isinstance(arguments, str):
        try:
            json.loads(arguments)
            return arguments
        except (ValueError, RecursionError):
            pass
    return json.dumps(arguments, ensure_ascii=False)


_BEGIN = re.compile(r'\s*\{\s*"name"\s*:\s*("[^"\\]*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


def _begun(raw: str) -> Call | None:
    """The call that a text of Hermes' format begins, with its arguments as far as they go. None before its arguments
    begin, and where its keys stand in another order: such a call is told when it is whole."""
    match = _BEGIN.match(raw)
    if match is None:
        return None
    depth, is_text, begin = 0, False, match.end()
    characters = enumerate(raw[begin:], begin)
    for place, character in characters:
        if is_text and character == "\\":
            next(characters, None)
        elif character == '"':
            is_text = not is_text
        elif not is_text:
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return Call(json.loads(match[1]), raw[begin : place + 1])
    return Call(json.loads(match[1]), raw[begin:])


def response_template(renderer: ChatRenderer) -> Mapping[str, Any] | None:
    """How a model of another chat format writes calls; None where that is not known."""
    if not isinstance(renderer, TemplateRenderer):
        return None
    if renderer.response_template is not None and "tool_calls" in renderer.response_template.get("fields", {}):
        return renderer.response_template
    return HERMES if "<tool_call>" in renderer.template and "<function=" not in renderer.template else None


def knows_calls(renderer: ChatRenderer) -> bool:
    """Whether a model of this chat format is told of tools, and writes calls in a form that is known here."""
    if not isinstance(renderer, TemplateRenderer):
        return True
    return renderer.takes_tools and (response_template(renderer) is not None or _is_bare(renderer))


def _is_bare(renderer: TemplateRenderer) -> bool:
    return '"parameters": ' in renderer.template and "<|eot_id|>" in renderer.template


def reader_of(renderer: ChatRenderer, tools: Sequence[Tool], *, is_open: bool = False, forced: str = "") -> Reader:
    """What reads an answer of a model that `knows_calls`. is_open, forced: how the prompt made it begin. Raises Refused
    for a tool that a call in its format cannot be for."""
    if isinstance(renderer, NativeRenderer):
        return NativeReader(renderer, tools[0], is_open=is_open) if tools else PlainReader(renderer.tool_tokens)
    template = response_template(renderer) if tools else None
    if template is not None:
        return TemplateReader(template, forced)
    return BareReader() if tools else PlainReader({})


def read_whole(reader: Reader, encoding: Encoding, ids: Sequence[int]) -> str:
    """The content of a whole answer; reader.calls has its calls then. ids: without the token that ended the turn."""
    content = ""
    for is_special, run in groupby(ids, encoding.special_ids.__contains__):
        if is_special:
            content += "".join(reader.take(token, "") for token in run)
        else:
            content += reader.take(-1, encoding.decode(list(run)))
    return content + reader.end()


def argument_of(tool: Tool) -> str:
    """The one argument that a call in nanodag's format gives. Raises Refused for a tool that takes others."""
    properties = tool.function.parameters.get("properties") or {}
    required = tool.function.parameters.get("required") or list(properties)
    if len(required) != 1 or not isinstance(properties.get(required[0]), dict):
        raise Refused(
            f"A call in this model's chat format is one text, so a tool takes one required argument; "
            f"{tool.function.name!r} takes {len(required)}.",
            param="tools",
        )
    return str(required[0])
