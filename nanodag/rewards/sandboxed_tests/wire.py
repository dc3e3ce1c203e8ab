"""Messages between the two sides, over pipes, and the values in them."""

import builtins
import json
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

# What the tests' side may ask for, by the name in `builtins` or `operator`.
UNARY = ("iter", "next", "len", "bool", "str", "repr", "int", "float", "abs", "hash")  # forwarded to the object
ITEMS = ("getitem", "setitem", "delitem", "neg")
BINARY = ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
LOGICAL = ("and_", "or_", "xor")

MAX_LINE_BYTES = 1 << 20  # of one message


class ProgramGone(BaseException):
    """The program's side has ended, or says what is no message. No `except Exception` of a test is meant for it."""


class StandIn:
    """An object of the other side."""


class Channel:
    """Messages of JSON, a line each, over two pipes."""

    is_gone = False  # the other side, as was seen once

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read, self._write = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")

    def send(self, message: Any) -> None:
        """Raises ProgramGone where nobody reads any more."""
        try:
            self._write.write(json.dumps(message).encode("ascii") + b"\n")
            self._write.flush()
        except OSError:
            raise self.gone("the program has ended") from None

    def receive(self) -> Any:
        """Raises ProgramGone at the end, and for a line that is no message."""
        line = self._read.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise self.gone("the program's answer is too long" if line else "the program has ended")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise self.gone("the program wrote to its channel") from None

    def gone(self, why: str) -> ProgramGone:
        """To be raised: what is said to the other side has no meaning any more."""
        self.is_gone = True
        return ProgramGone(why)


# Classes of values that go as text, and their modules, which are imported when a message first names them.
_BY_TEXT = {"Decimal": "decimal", "Fraction": "fractions", **dict.fromkeys(("datetime", "date", "time"), "datetime")}
_CONTAINERS: dict[str, Any] = {base.__name__: base for base in (list, tuple, set, frozenset, deque)}


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """A value as JSON. keep: what becomes of one that is not plain. An object of a subclass goes as its base, read with
    the base's own methods."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, StandIn):
        return keep(value)
    for kind, base in _CONTAINERS.items():
        if isinstance(value, base):
            return {kind: [encode(item, keep) for item in base.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, keep), encode(v, keep)] for k, v in dict.items(value)]}
    for base in (str, int, float):
        if isinstance(value, base):
            return getattr(base, f"__{base.__name__}__")(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: bytes(value).decode("latin-1")}
    if type(value) is range:
        return {"range": [value.start, value.stop, value.step]}
    name = getattr(value, "__name__", "")
    if isinstance(value, type) and isinstance(name, str) and getattr(builtins, name, None) is value:
        return {"builtin": name}
    module = _BY_TEXT.get(type(value).__name__)
    if module in sys.modules and type(value).__module__ == module:
        return {type(value).__name__: str(value)}
    return keep(value)


def builtin_class(name: Any, base: type) -> type:
    """A class of `builtins`. Raises ProgramGone for what is none, or none of this base: a program that writes to its
    channel itself may name `exec`, and have the tests call it."""
    builtin = getattr(builtins, name, None) if isinstance(name, str) else None
    if not isinstance(builtin, type) or not issubclass(builtin, base):
        raise ProgramGone("the program wrote to its channel")
    return builtin


def decode(code: Any, find: Callable[[str, Any], Any]) -> Any:
    """The value of a code. find: the one for a kind that is not plain."""
    if not isinstance(code, dict):
        return code
    ((kind, body),) = code.items()
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](decode(item, find) for item in body)
    if kind == "dict":
        return {decode(k, find): decode(v, find) for k, v in body}
    if kind == "complex":
        return complex(*body)
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind)(body.encode("latin-1"))
    if kind == "range":
        return range(*body)
    if kind == "builtin":
        return builtin_class(body, object)
    if kind in _BY_TEXT:
        made = getattr(__import__(_BY_TEXT[kind]), kind)
        return getattr(made, "fromisoformat", made)(body)
    return find(kind, body)
