"""YAML as a pipeline file may hold it: the core schema of YAML 1.2, and `<<` to take another table in.

Built from the parser's events, so that size and depth are bounded before anything is built: an alias counts as often as
what it stands for. Unlike PyYAML's safe loader, `yes` and `1:30` are text; a key that stands twice is refused, and so
is what YAML 1.1 and 1.2 read as different numbers (`010`). Keys are text. A whole number may have an exponent: 1e6.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ConfigError(f"{str(file)!r} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    return parse_yaml(text, lambda line: f"{file}, line {line}")


def parse_yaml(text: str, where: Callable[[int], str]) -> Any:
    """The value that a text holds; None for an empty one. where: how a line, counted from 1, is called in messages.

    Raises ConfigError for what is not YAML, too large, too deep or ambiguous.
    """
    reader = _Reader(where)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            reader.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = where(mark.line + 1 if mark else 1)
        raise ConfigError(f"{at}: not YAML: {error.problem or error.context}.") from None
    except yaml.reader.ReaderError as error:
        character = error.character if isinstance(error.character, int) else 0
        raise ConfigError(f"{where(1)}: not YAML: it holds the character U+{character:04X}.") from None
    except UnicodeError:  # half of a surrogate pair
        raise ConfigError(f"{where(1)}: not YAML: it holds characters that are no Unicode text.") from None
    return reader.value


@dataclass
class _Open:
    """A table or list that is being read. lines: of its keys. merged: what `<<` takes in. size, height: in nodes, with
    what its aliases stand for."""

    value: dict[str, Any] | list[Any]
    anchor: str | None
    line: int
    lines: dict[str, int] = field(default_factory=dict)
    key: str | None = None
    is_merge: bool = False
    merged: list[dict[str, Any]] = field(default_factory=list)
    size: int = 1
    height: int = 1


class _Reader:
    """Events in, one value out."""

    def __init__(self, where: Callable[[int], str]) -> None:
        self.value: Any = None
        self._where = where
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[Any, int, int]] = {}  # value, size, height
        self._num_documents = 0

    def take(self, event: yaml.Event) -> None:
        """One event of the parser."""
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self._num_documents += 1
            if self._num_documents > 1:
                raise self._wrong(line, "a second document (`---`) begins; a pipeline file is one")
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._begin(event, line)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._end()
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event.anchor, line)
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event, line)

    def _wrong(self, line: int, what: str) -> ConfigError:
        return ConfigError(f"{self._where(line)}: {what}.")

    def _begin(self, event: yaml.CollectionStartEvent, line: int) -> None:
        is_map = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, "!") and _TAGS.get(event.tag) != ("map" if is_map else "seq"):
            raise self._wrong(line, f"the tag {_short(event.tag)} means nothing here; leave it out")
        top = self._open[-1] if self._open else None
        if top is not None and isinstance(top.value, dict) and top.key is None and not top.is_merge:
            raise self._wrong(line, "a table or list cannot be a key; braces in text need quotes")
        self._open.append(_Open({} if is_map else [], event.anchor, line))
        if len(self._open) > MAX_DEPTH:
            raise self._wrong(line, f"nested deeper than {MAX_DEPTH}")

    def _end(self) -> None:
        done = self._open.pop()
        value = done.value
        if isinstance(value, dict):
            for table in done.merged:  # what stands here wins, then the first that was taken in
                value = {**table, **value}
        self._put(value, done.size, done.height, done.line, done.anchor)

    def _alias(self, anchor: str, line: int) -> None:
        if any(node.anchor == anchor for node in self._open):
            raise self._wrong(line, f"*{anchor} stands within what it names, &{anchor}, and would contain itself")
        if anchor not in self._anchors:
            raise self._wrong(line, f"there is no &{anchor} above for *{anchor}")
        value, size, height = self._anchors[anchor]
        self._put(value, size, height, line, None)

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        if "\0" in event.value:
            raise self._wrong(line, "a text holds the character U+0000, which no name or path may")
        top = self._open[-1] if self._open else None
        if top is not None and isinstance(top.value, dict) and top.key is None and not top.is_merge:
            self._begin_pair(top, event, line)
            return
        tag = None if event.tag in (None, "!") else _TAGS.get(event.tag, event.tag)
        is_plain = event.implicit[0] and event.tag is None
        if (tag is None and not is_plain) or tag == "str":
            value = event.value
        else:
            value = self._plain(event.value, line)
            if tag is not None and not _fits(value, tag):
                raise self._wrong(line, f"the tag {_short(event.tag)} does not fit {event.value!r:.60}; leave it out")
        self._put(float(value) if tag == "float" else value, 1, 1, line, event.anchor)

    def _begin_pair(self, top: _Open, event: yaml.ScalarEvent, line: int) -> None:
        key = event.value
        if key == "<<" and event.implicit[0]:
            top.is_merge = True
        elif key == "":
            raise self._wrong(line, "a key is missing before the colon")
        elif key in top.lines:
            raise self._wrong(line, f"the key {key!r:.60} stands twice, first in line {top.lines[key]}; keep one")
        else:
            top.lines[key] = line
            top.key = key
        if event.anchor is not None:
            self._anchors[event.anchor] = (key, 1, 1)

    def _put(self, value: Any, size: int, height: int, line: int, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = (value, size, height)
        if not self._open:
            self.value = value
            return
        top = self._open[-1]
        top.size += size
        top.height = max(top.height, height + 1)
        if sum(node.size for node in self._open) > MAX_NODES:
            raise self._wrong(line, f"more than {MAX_NODES:,} values, those that aliases stand for counted")
        if len(self._open) + height > MAX_DEPTH:
            raise self._wrong(line, f"nested deeper than {MAX_DEPTH}, what aliases stand for counted")
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.is_merge:
            top.is_merge = False
            top.merged += self._tables(value, line)
        elif top.key is None:
            raise self._wrong(line, "an alias or a table cannot be a key")
        else:
            top.value[top.key] = value
            top.key = None

    def _tables(self, value: Any, line: int) -> list[dict[str, Any]]:
        tables = value if isinstance(value, list) else [value]
        if not all(isinstance(table, dict) for table in tables):
            raise self._wrong(line, "`<<` takes a table in, or a list of tables; this is neither")
        return tables

    def _plain(self, text: str, line: int) -> Any:
        """The value of a scalar without quotes."""
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            digits = text.lstrip("+-")
            if digits[0] == "0" and len(digits) > 1:
                other = "" if set(digits) & {"8", "9"} else f" and 1.1 {int(digits[:20], 8)}"
                plain = digits.lstrip("0") or "0"
                raise self._wrong(
                    line, f"{text:.20}: YAML 1.2 reads {plain:.20} here{other}; write {plain:.20}, or quote it"
                )
            return self._integer(text, 10, line)
        if _OCTAL_OR_HEX.fullmatch(text):
            return self._integer(text[2:], 8 if text[1] == "o" else 16, line)
        if _FLOAT.fullmatch(text):
            value = float(text)
            if abs(value) > LARGEST:
                raise self._wrong(line, f"the number {text:.20} is too large for any setting")
            is_whole = "e" in text.lower() and value.is_integer() and abs(value) < 2**53
            return int(value) if is_whole else value
        if _NOT_FINITE.fullmatch(text):
            return float(text.replace(".", "", 1))
        return text

    def _integer(self, text: str, base: int, line: int) -> int:
        value = int(text, base) if len(text) < 80 else LARGEST + 1
        if abs(value) > LARGEST:
            raise self._wrong(line, f"the number {text:.20}... of {len(text)} digits is too large for any setting")
        return value


def _short(tag: str) -> str:
    return f"{tag.replace('tag:yaml.org,2002:', '!!'):.40}"


def _fits(value: Any, tag: str) -> bool:
    kinds = {"int": int, "float": int | float, "bool": bool, "null": type(None)}
    return tag in kinds and isinstance(value, kinds[tag]) and (tag == "bool" or not isinstance(value, bool))
