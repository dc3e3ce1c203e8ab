"""The sandbox of the program: runs it, and applies what the tests ask for."""

import builtins
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from nanodag.rewards.sandboxed_tests.wire import (
    BINARY,
    ITEMS,
    LOGICAL,
    UNARY,
    Channel,
    ProgramGone,
    StandIn,
    decode,
    encode,
)

PROGRAM = "<program>"
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in (*UNARY, "getattr", "setattr", "delattr", "isinstance")},
    **{name: getattr(operator, name) for name in (*ITEMS, *BINARY, *LOGICAL, "eq")},
    "call": lambda function, *args, **named: function(*args, **named),
}


class Callback(StandIn):
    """A function of the tests, as the program holds it."""

    def __init__(self, side: "ProgramSide", number: int) -> None:
        self._side, self._number = side, number

    def __call__(self, *args: Any) -> Any:
        return self._side.call_back(self._number, args)


class ProgramSide:
    """Runs a program, and applies what the tests' side asks for."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._objects: list[Any] = []
        self._operations = {**_OPERATIONS, "load": self._load, "name": self._named}
        self._space = types.ModuleType("program")
        sys.modules["program"] = self._space

    def serve(self) -> None:
        """Until the tests' side ends."""
        while True:
            try:
                request = self._channel.receive()
            except ProgramGone:
                return
            self._channel.send(self._answer(request))

    def _answer(self, asked: Any) -> dict[str, Any]:
        args = [decode(code, self._find) for code in asked["args"]]
        named = {name: decode(code, self._find) for name, code in asked["named"].items()}
        answer: dict[str, Any] = {}
        try:
            value = self._operations[asked["apply"]](*args, **named)
            answer["value"] = encode(value, self._keep)
        except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt too: the tests hear of them
            answer["raised"] = self._raised(error)
        changed = {}
        for place, (value, code) in enumerate(zip(args, asked["args"], strict=True)):
            if isinstance(value, list | dict | set) and (now := encode(value, self._keep)) != code:
                changed[str(place)] = now
        return {**answer, "changed": changed} if changed else answer

    def _load(self, program: str) -> Any:
        if "random" in program:
            __import__("random").seed(0)
        exec(compile(program, PROGRAM, "exec"), self._space.__dict__)  # what the walls are for

    def _named(self, name: str) -> Any:
        if name not in self._space.__dict__:
            raise NameError(f"name {name!r} is not defined")
        return self._space.__dict__[name]

    def _raised(self, error: BaseException) -> Any:
        line, place = 0, error.__traceback__
        while place is not None:
            line = place.tb_lineno if place.tb_frame.f_code.co_filename == PROGRAM else line
            place = place.tb_next
        if not isinstance(error, Exception):
            error = RuntimeError(f"the program raised {type(error).__name__}")
        try:
            arguments = [encode(argument, self._keep) for argument in error.args]
        except Exception:  # noqa: BLE001 - arguments that only this program knows how to write
            arguments = []
        return [self._keep(type(error)), arguments, line]

    def _keep(self, value: Any) -> Any:
        if isinstance(value, Callback):
            return {"callback": value._number}
        self._objects.append(value)
        number = len(self._objects) - 1
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(c.__name__ for c in value.__mro__ if getattr(builtins, c.__name__, None) is c)
            return {"exception": [number, value.__name__, base]}
        return {"object": number}

    def _find(self, kind: str, body: Any) -> Any:
        return Callback(self, body) if kind == "callback" else self._objects[body]

    def call_back(self, number: int, args: tuple[Any, ...]) -> Any:
        self._channel.send({"call_back": number, "args": [encode(argument, self._keep) for argument in args]})
        while "returned" not in (heard := self._channel.receive()):
            self._channel.send(self._answer(heard))
        if heard["returned"] is None:
            raise RuntimeError("a function of the tests has failed")
        return decode(heard["returned"][0], self._find)


def main() -> None:
    """Main of the sandbox with the program: its channel is the standard input and output."""
    sys.set_int_max_str_digits(0)
    channel = Channel(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    ProgramSide(channel).serve()
    os._exit(0)
