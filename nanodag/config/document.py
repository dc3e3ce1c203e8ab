"""YAML as a pipeline file may hold it: the core schema of YAML 1.2, and `<<` to take another table in.

Built from the parser's events, so that size and depth are bounded before anything is built: an alias counts as often as
what it stands for. Unlike PyYAML's safe loader, `yes` and `1:30` are text; a key that stands twice is refused, and so
is what YAML 1.1 and 1.2 read as different numbers (`010`). Keys are text. A whole number may have an exponent: 1e6.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nanodag.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MAX_DEPTH = 50
LARGEST = 10**15  # of any number: what is above is a slip, and would overflow somewhere

# In C it is six times as fast, and a sweep reads the file once a point.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WORDS: dict[str, Any] = {
    **{word: None for word in ("", "~", "null", "Null", "NULL")},
    **{word: True for word in ("true", "True", "TRUE")},
    **{word: False for word in ("false", "False", "FALSE")},
}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TAGS = {f"tag:yaml.org,2002:{name}": name for name in ("str", "int", "float", "bool", "null", "map", "seq")}
_FITTING = {"int": (int,), "float": (int, float), "bool": (bool,), "null": (type(None),)}  # values, by a scalar's tag


def read_yaml(file: Path) -> Any:
    """The value that a file holds. Raises ConfigError naming the file, the line and what is wrong with it."""
    try:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; name the pipeline file in it with --file.")
        if not file.exists():
            raise ConfigError(f"There is no pipeline file {file}. Name one with --file.")
        if not file.is_file():
            raise ConfigError(f"{file} is no regular file; a pipeline file is read more than once. Copy it to one.")
        if (size := file.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{file} has {size:,} bytes; a pipeline file has at most {MAX_BYTES:,}.")
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}. Save it as UTF-8."
        ) from None
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error.strerror or error}.") from None
    return parse_yaml(text, lambda line: f"{file}, line {line}")


def parse_yaml(text: str, where: Callable[[int], str]) -> Any:
    """The value that a text holds; None for an empty one. where: how a line, counted from 1, is called in messages.

    Raises ConfigError for what is not YAML, too large, too deep or ambiguous.
    """
    try:
        return _Reader(yaml.parse(text, Loader=_LOADER), where).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = where(mark.line + 1 if mark else 1)
        raise ConfigError(f"{at}: not YAML: {error.problem or error.context}.") from None
    except yaml.reader.ReaderError as error:
        character = error.character if isinstance(error.character, int) else 0
        raise ConfigError(f"{where(1)}: not YAML: it holds the character U+{character:04X}.") from None
    except UnicodeError:  # half of a surrogate pair
        raise ConfigError(f"{where(1)}: not YAML: it holds characters that are no Unicode text.") from None


class _Read(NamedTuple):
    """A value with its size and height in nodes, what its aliases stand for counted."""

    value: Any
    size: int = 1
    height: int = 1


class _Reader:
    """Events in, one value out. It calls itself for what is nested, MAX_DEPTH times at most."""

    def __init__(self, events: Iterator[yaml.Event], where: Callable[[int], str]) -> None:
        self._events, self._where = events, where
        self._anchors: dict[str, _Read | None] = {}  # None while it is read
        self._size = 0

    def document(self) -> Any:
        """The only document's value. Raises ConfigError at the beginning of a second one."""
        read: _Read | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent) and read is not None:
                raise self._wrong(event, "a second document (`---`) begins; a pipeline file is one")
            if isinstance(event, yaml.NodeEvent):
                read = self._node(event, 0)
        return read.value if read is not None else None

    def _wrong(self, event: yaml.Event, what: str) -> ConfigError:
        return ConfigError(f"{self._where(event.start_mark.line + 1)}: {what}.")

    def _node(self, event: yaml.NodeEvent, depth: int) -> _Read:
        """The value that begins with an event. depth: tables and lists around it."""
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise self._wrong(event, f"there is no &{event.anchor} above for *{event.anchor}")
            if (read := self._anchors[event.anchor]) is None:
                what = f"*{event.anchor} stands within what it names, &{event.anchor}, and would contain itself"
                raise self._wrong(event, what)
            if depth + read.height > MAX_DEPTH:
                raise self._wrong(event, f"nested deeper than {MAX_DEPTH}, what aliases stand for counted")
            self._count(event, read.size)
            return read
        self._count(event, 1)
        if depth == MAX_DEPTH:
            raise self._wrong(event, f"nested deeper than {MAX_DEPTH}")
        if isinstance(event, yaml.ScalarEvent):
            read = _Read(self._scalar(event))
        else:
            is_list = isinstance(event, yaml.SequenceStartEvent)
            if event.tag not in (None, "!") and _TAGS.get(event.tag) != ("seq" if is_list else "map"):
                raise self._wrong(event, f"the tag {_short(event.tag)} means nothing here; leave it out")
            if event.anchor is not None:
                self._anchors[event.anchor] = None
            before = self._size
            value, height = self._list(depth + 1) if is_list else self._table(depth + 1)
            read = _Read(value, 1 + self._size - before, 1 + height)
        if event.anchor is not None:
            self._anchors[event.anchor] = read
        return read

    def _count(self, event: yaml.Event, size: int) -> None:
        self._size += size
        if self._size > MAX_NODES:
            raise self._wrong(event, f"more than {MAX_NODES:,} values, those that aliases stand for counted")

    def _list(self, depth: int) -> tuple[list[Any], int]:
        """The list whose first event has passed, and the height of what is in it."""
        reads = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            reads.append(self._node(event, depth))
        return [read.value for read in reads], max((read.height for read in reads), default=0)

    def _table(self, depth: int) -> tuple[dict[str, Any], int]:
        """The table whose first event has passed, and the height of what is in it."""
        table: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: list[dict[str, Any]] = []
        height = 0
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                what = "an alias" if isinstance(event, yaml.AliasEvent) else "a table or list"
                raise self._wrong(event, f"{what} cannot be a key; braces in text need quotes")
            key, is_merge = self._text(event), event.value == "<<" and event.implicit[0]
            if key == "":
                raise self._wrong(event, "a key is missing before the colon")
            if key in lines:
                raise self._wrong(event, f"the key {key!r:.60} stands twice, first in line {lines[key]}; keep one")
            if event.anchor is not None:
                self._anchors[event.anchor] = _Read(key)
            read = self._node(inner := next(self._events), depth)
            height = max(height, read.height)
            if not is_merge:
                lines[key], table[key] = event.start_mark.line + 1, read.value
                continue
            tables = read.value if isinstance(read.value, list) else [read.value]
            if not all(isinstance(other, dict) for other in tables):
                raise self._wrong(inner, "`<<` takes a table in, or a list of tables; this is neither")
            merged += tables
        for other in merged:  # what stands here wins, then the first that was taken in
            table = {**other, **table}
        return table, height

    def _text(self, event: yaml.ScalarEvent) -> str:
        if "\0" in event.value:
            raise self._wrong(event, "a text holds the character U+0000, which no name or path may")
        return event.value

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        text = self._text(event)
        tag = None if event.tag in (None, "!") else _TAGS.get(event.tag, event.tag)
        if tag == "str" or (tag is None and not (event.implicit[0] and event.tag is None)):
            return text
        value = self._plain(event)
        if tag is not None and type(value) not in _FITTING.get(tag, ()):
            raise self._wrong(event, f"the tag {_short(event.tag)} does not fit {text!r:.60}; leave it out")
        return float(value) if tag == "float" else value

    def _plain(self, event: yaml.ScalarEvent) -> Any:
        """The value of a scalar without quotes."""
        text = event.value
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            digits = text.lstrip("+-")
            if digits[0] == "0" and len(digits) > 1:
                other = "" if set(digits) & {"8", "9"} else f" and 1.1 {int(digits[:20], 8)}"
                plain = digits.lstrip("0") or "0"
                what = f"{text:.20}: YAML 1.2 reads {plain:.20} here{other}; write {plain:.20}, or quote it"
                raise self._wrong(event, what)
            return self._integer(event, text, 10)
        if _OCTAL_OR_HEX.fullmatch(text):
            return self._integer(event, text[2:], 8 if text[1] == "o" else 16)
        if _FLOAT.fullmatch(text):
            value = float(text)
            if abs(value) > LARGEST:
                raise self._wrong(event, f"the number {text:.20} is too large for any setting")
            is_whole = "e" in text.lower() and value.is_integer() and abs(value) < 2**53
            return int(value) if is_whole else value
        if _NOT_FINITE.fullmatch(text):
            return float(text.replace(".", "", 1))
        return text

    def _integer(self, event: yaml.ScalarEvent, text: str, base: int) -> int:
        value = int(text, base) if len(text) < 80 else LARGEST + 1
        if abs(value) > LARGEST:
            raise self._wrong(event, f"the number {text:.20}... of {len(text)} digits is too large for any setting")
        return value


def _short(tag: str) -> str:
    return f"{tag.replace('tag:yaml.org,2002:', '!!'):.40}"
