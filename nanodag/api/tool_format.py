"""Readers of tool calls out of an answer while it grows.

nanodag's own format is text between two special tokens (`nanodag.tokenizer.layout`). Other chat templates show how they
write calls (`nanodag.tokenizer.call_format`); a tokenizer that brings a `response_template` of its own is read by that.
The reader is transformers' ResponseParser, but for nanodag's format, and for answers that are calls and nothing else.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from nanodag.api.bodies import Tool
from nanodag.api.refusals import Refused
from nanodag.tokenizer.call_format import AROUND, CallFormat
from nanodag.tokenizer.chat import ChatRenderer, NativeRenderer, TemplateRenderer
from nanodag.tokenizer.encoding import Encoding

_NEVER = "\0"


@dataclass(frozen=True)
class Call:
    """A tool call of an answer. arguments: JSON."""

    name: str
    arguments: str


class Reader:
    """Takes an answer's tokens; gives the text that is no call, and the calls. This one reads all as content. names:
    special tokens that are to be seen all the same.

    is_cut: the last of the calls was not closed; it is a call all the same, as a client was told of it.
    """

    def __init__(self, names: Mapping[int, str] = {}) -> None:
        self._names = names
        self.calls: list[Call] = []
        self.is_cut = False

    def told(self) -> Call | None:
        """The call that is open, with what is certain of its arguments, to be told to a client: it stays a call then,
        whatever becomes of it. None where there is none, or its name is not known yet."""
        return None

    def take(self, token: int, piece: str) -> str:
        """Content that this token adds."""
        return self._names.get(token, "") + piece

    def end(self) -> str:
        """Rest of the content at the end."""
        return ""


class NativeReader(Reader):
    """nanodag's own format. A call has no name and is one text: it goes to the one tool, as its one argument."""

    def __init__(self, renderer: NativeRenderer, tool: Tool, *, is_open: bool) -> None:
        """is_open: the prompt ended with the token that opens a call."""
        super().__init__()
        self._renderer, self._tool = renderer, tool
        self._text = "" if is_open else None
        self._is_told = False

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


class TemplateReader(Reader):
    """A format whose calls stand among content."""

    def __init__(
        self, calls: CallFormat, forced: str = "", *, names: Mapping[int, str] = {}, tools: Sequence[Tool] = ()
    ) -> None:
        """forced: how the answer was made to begin, in the prompt. names: special tokens that are marks of calls.
        tools: whose schemas give arguments in marks their types."""
        from transformers.utils.chat_parsing import ResponseParser

        assert calls.template is not None
        super().__init__(names)
        typed = [tool.model_dump() for tool in tools] if calls.shape in ("pairs", "own") else None
        self._parser = ResponseParser(dict(calls.template), prefix="", tools=typed)
        self._format = calls
        self._raw = ""  # of the call that is open
        self._is_open = self._is_told = self._has_ended = False
        self._is_lost = False  # the parser could not read on: what follows is content
        self.take(-1, forced)

    def take(self, token: int, piece: str) -> str:
        name, was_open = self._names.get(token, ""), self._is_open
        piece = name or piece
        content = piece if self._is_lost else self._read(lambda: self._parser.feed(piece))
        return content if was_open else content.removesuffix(name)  # what marks no call is as invisible as elsewhere

    def told(self) -> Call | None:
        call = None if self._is_lost else self._begun()
        self._is_told = self._is_told or call is not None
        return call

    def end(self) -> str:
        if self._is_lost:
            return ""
        content = ""
        if self._format.shape != "own":  # whose values are read of all that its region holds
            # A pattern at the end of the text might go on: what none goes on with shows that it does not.
            content = self._read(lambda: self._parser.feed(_NEVER))
        self._has_ended = True  # a call that is open now was never closed by the model
        self._raw = self._raw.removesuffix(_NEVER)
        if not self._is_lost:
            content += self._read(lambda: self._parser.finalize()[1])
        return content.replace(_NEVER, "")

    def _read(self, parse: Callable[[], Sequence[Mapping[str, Any]]]) -> str:
        try:
            return self._events(parse())
        # The model wrote what its own template does not allow.
        except (ValueError, KeyError, TypeError, RecursionError):
            self._is_lost = True
            return self._no_call(None)

    def _events(self, events: Sequence[Mapping[str, Any]]) -> str:
        content = ""
        for event in events:
            is_call = event["field"] == "tool_calls"
            if event["type"] == "region_open":
                self._is_open = is_call
            elif event["type"] == "region_chunk":
                if is_call:
                    self._raw += event["text"]
                elif event["field"] != AROUND and not (self.calls and event["text"].isspace()):
                    content += event["text"]  # but line ends between calls
            elif event["type"] == "region_close" and is_call:
                content += self._called(event["value"])
                self._raw, self._is_open, self._is_told = "", False, False
        return content

    def _called(self, value: Any) -> str:
        """Note a region's calls; what is none is content."""
        try:
            read = self._format.read(value, self._raw, is_closed=not self._has_ended)
        except (ValueError, RecursionError):
            return self._no_call(value)
        calls = [Call(name, _as_json(arguments)) for name, arguments in read]
        if self._is_told and (begun := self._begun()) is not None:
            calls[:1] = [begun]  # in the model's own spelling, as its parts were told
        self.calls += calls
        return ""

    def _no_call(self, value: Any) -> str:
        """Text of an open call that is none; empty where a client was told of it."""
        if self._is_told and (begun := self._begun()) is not None:
            self.calls.append(begun)
            self.is_cut = True
            return ""
        opened = value.get("opened", self._format.mark) if isinstance(value, dict) else self._format.mark
        return f"{opened}{self._raw}{'' if self._has_ended else self._format.closing}"

    def _begun(self) -> Call | None:
        if self._format.shape not in ("object", "own") or not self._format.is_single:
            return None
        return _begun(self._raw, self._format.keys)


class BareReader(Reader):
    """A format without marks, such as Llama 3's: an answer that is calls and nothing else has calls. Nobody is told of
    them before it is whole."""

    def __init__(self, calls: CallFormat, forced: str = "") -> None:
        """forced: how the answer was made to begin, in the prompt."""
        super().__init__()
        self._format = calls
        self._text = forced  # all of it while it may be a call, then nothing
        self._is_content = False

    def take(self, token: int, piece: str) -> str:
        text, self._text = self._text + piece, ""
        self._is_content = self._is_content or text.lstrip()[:1] not in ("", self._format.written[:1])
        if self._is_content:
            return text
        self._text = text
        return ""

    def end(self) -> str:
        text, self._text = self._text, ""
        try:
            read = self._format.read(None, text)
        except (ValueError, RecursionError):
            return text
        self.calls += [Call(name, _as_json(arguments)) for name, arguments in read]
        return ""


def _as_json(arguments: Any) -> str:
    """Arguments as JSON; so also a text that the model wrote in their place, as templates take JSON alone."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            json.loads(arguments)
            return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _begun(raw: str, keys: tuple[str, str]) -> Call | None:
    """The call that a text with an object begins, with its arguments as far as they go. None before its arguments
    begin, and where its keys stand in another order: such a call is told when it is whole."""
    name, arguments = (json.dumps(key) for key in keys)
    match = re.match(
        rf'\s*\{{\s*{re.escape(name)}\s*:\s*("[^"\\]*")\s*,\s*(?:{re.escape(arguments)}|"arguments"|"parameters")\s*:\s*(?=\{{)',
        raw,
    )
    if match is None:
        return None
    try:
        end = json.JSONDecoder().raw_decode(raw, match.end())[1]
    except (ValueError, RecursionError):  # it is not whole yet
        end = len(raw)
    return Call(json.loads(match[1]), raw[match.end() : end])


def knows_calls(renderer: ChatRenderer) -> bool:
    """True when a model of this chat format is told of tools, and writes calls in a form that is read here."""
    if not isinstance(renderer, TemplateRenderer):
        return True
    return renderer.takes_tools and renderer.calls is not None


def reader_of(renderer: ChatRenderer, tools: Sequence[Tool], *, is_open: bool = False, forced: str = "") -> Reader:
    """Reader of an answer of a model that `knows_calls`. is_open, forced: how the prompt made it begin. Raises Refused
    for a tool that a call in its format cannot be for."""
    if isinstance(renderer, NativeRenderer):
        return NativeReader(renderer, tools[0], is_open=is_open) if tools else Reader(renderer.tool_tokens)
    assert isinstance(renderer, TemplateRenderer)
    calls = renderer.calls if tools else None
    if calls is None:
        return Reader()
    if calls.template is None:
        return BareReader(calls, forced)
    return TemplateReader(calls, forced, names=renderer.special_tokens_in(calls.written), tools=tools)


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
