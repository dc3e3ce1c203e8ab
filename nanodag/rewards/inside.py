"""What runs in the sandbox when a program is tested: this file's text, once beside the program, once beside the tests.

Each side has a sandbox of its own, and two pipes connect them. The tests' side holds what is wanted. The program's side
applies what it is asked to and answers with values. So a program that ends early, returns what equals everything or
writes a verdict gains nothing. Plain values (`encode`) go by value. Anything else stays where it was made, and the
other side holds a stand-in: `Remote` for an object of the program, `Callback` for a function of the tests.

A stand-in never meets a wanted value: compared or computed with anything but another stand-in it is unequal, or a
TypeError. Lists, dicts and sets that a call changed are changed on the tests' side too.

One file, because it is passed as text: it imports the standard library only, and no module of this package.
"""

import ast
import builtins
import json
import math
import operator
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

MAX_LINE_BYTES = 1 << 20  # of one message
MAX_ERROR_CHARACTERS = 300
PROGRAM = "<program>"


class ProgramGone(Exception):
    """The program's side has ended, or says what is no message."""


class CannotSend(Exception):
    """The tests give the program what cannot be sent."""


class Channel:
    """Messages of JSON, a line each, over two pipes."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read, self._write = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")

    def send(self, message: Any) -> None:
        """Raises ProgramGone where nobody reads any more."""
        try:
            self._write.write(json.dumps(message).encode("ascii") + b"\n")
            self._write.flush()
        except OSError:
            raise ProgramGone("the program has ended") from None

    def receive(self) -> Any:
        """Raises ProgramGone at the end, and for a line that is no message."""
        line = self._read.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ProgramGone("the program's answer is too long" if line else "the program has ended")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise ProgramGone("the program wrote to its channel") from None


# Values


def _day(name: str) -> tuple[str, Callable[[Any], str], Callable[[str], Any]]:
    """An entry of _BY_TEXT for a class of `datetime`."""
    return "datetime", lambda value: value.isoformat(), lambda text: _class("datetime", name).fromisoformat(text)


def _class(module: str, name: str) -> Any:
    return getattr(__import__(module), name)


# Kind -> the text of a value and the value of a text; the modules are imported when a message first names them.
_BY_TEXT: dict[str, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    "Decimal": ("decimal", str, lambda text: _class("decimal", "Decimal")(text)),
    "Fraction": ("fractions", str, lambda text: _class("fractions", "Fraction")(text)),
    **{name: _day(name) for name in ("datetime", "date", "time")},
}
_CONTAINERS: dict[str, tuple[type, Callable[[Any], Iterable[Any]]]] = {
    "list": (list, list.__iter__),
    "tuple": (tuple, tuple.__iter__),
    "set": (set, set.__iter__),
    "frozenset": (frozenset, frozenset.__iter__),
    "deque": (deque, deque.__iter__),
}


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """A value as JSON. keep: what becomes of one that is not plain. An object of a subclass goes as its base, read with
    the base's own methods."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Remote | Callback):
        return keep(value)
    for kind, (base, items) in _CONTAINERS.items():
        if isinstance(value, base):
            return {kind: [encode(item, keep) for item in items(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, keep), encode(v, keep)] for k, v in dict.items(value)]}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: bytes(value).decode("latin-1")}
    if type(value) is range:
        return {"range": [value.start, value.stop, value.step]}
    name = getattr(value, "__name__", "")
    if isinstance(name, str) and getattr(builtins, name, None) is value:
        return {"builtin": name}
    if isinstance(value, types.ModuleType) and value.__spec__ is not None:
        return {"module": value.__name__}
    named = _BY_TEXT.get(type(value).__name__)
    if named is not None and named[0] in sys.modules and type(value).__module__ == named[0]:
        return {type(value).__name__: named[1](value)}
    return keep(value)


def decode(code: Any, find: Callable[[str, Any], Any]) -> Any:
    """The value of a code. find: the one for a kind that is not plain."""
    if not isinstance(code, dict):
        return code
    ((kind, body),) = code.items()
    if kind in _CONTAINERS:
        return _CONTAINERS[kind][0](decode(item, find) for item in body)
    if kind == "dict":
        return {decode(k, find): decode(v, find) for k, v in body}
    if kind == "complex":
        return complex(*body)
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind)(body.encode("latin-1"))
    if kind == "range":
        return range(*body)
    if kind == "builtin":
        return getattr(builtins, body)
    if kind == "module":
        return __import__(body)
    if kind in _BY_TEXT:
        return _BY_TEXT[kind][2](body)
    return find(kind, body)


# The program's side

_UNARY = ("iter", "next", "len", "bool", "str", "repr", "int", "float", "abs", "hash")  # forwarded to the object
_ITEMS = ("getitem", "setitem", "delitem", "neg")
_BINARY = ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_LOGICAL = ("and_", "or_", "xor")
_ATTRIBUTES = ("getattr", "setattr", "delattr", "isinstance")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in (*_UNARY, *_ATTRIBUTES)},
    **{name: getattr(operator, name) for name in (*_ITEMS, *_BINARY, *_LOGICAL, "eq")},
    "call": lambda function, *args, **named: function(*args, **named),
}


class Callback:
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
        self._space = types.ModuleType("program")
        sys.modules["program"] = self._space

    def serve(self) -> None:
        """Until the tests' side ends."""
        while True:
            try:
                asked = self._channel.receive()
            except ProgramGone:
                return
            self._channel.send(self._answer(asked))

    def _answer(self, asked: Any) -> dict[str, Any]:
        args = [decode(code, self._find) for code in asked["args"]]
        named = {name: decode(code, self._find) for name, code in asked["named"].items()}
        answer: dict[str, Any] = {}
        try:
            if asked["apply"] == "load":
                value = self._load(*args)
            elif asked["apply"] == "name":
                value = self._named(*args)
            else:
                value = _OPERATIONS[asked["apply"]](*args, **named)
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
            given = [encode(argument, self._keep) for argument in error.args]
        except Exception:  # noqa: BLE001 - arguments that only this program knows how to write
            given = []
        return [self._keep(type(error)), given, line]

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


# The tests' side


class Remote:
    """An object of the program, as the tests hold it."""

    def __init__(self, side: "TestsSide", number: int) -> None:
        object.__setattr__(self, "_side", side)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._side.ask("call", self, *args, **named)

    def __getattr__(self, name: str) -> Any:
        return self._side.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._side.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._side.ask("delattr", self, name)

    def __eq__(self, other: object) -> Any:
        return isinstance(other, Remote) and self._side.ask("eq", self, other)

    def __contains__(self, wanted: object) -> bool:
        return any(item is wanted or item == wanted for item in self._side.ask("iter", self))

    def __instancecheck__(self, value: object) -> Any:
        return isinstance(value, Remote) and self._side.ask("isinstance", value, self)


def _forward(operation: str) -> Callable[..., Any]:
    def forwarded(self: Remote, *args: Any) -> Any:
        return self._side.ask(operation, self, *args)

    return forwarded


def _between(operation: str) -> Callable[[Remote, object], Any]:
    """An operator of two objects of the program: a wanted value is not given to it."""

    def forwarded(self: Remote, other: object) -> Any:
        return self._side.ask(operation, self, other) if isinstance(other, Remote) else NotImplemented

    return forwarded


for _name in (*_UNARY, *_ITEMS):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in (*_BINARY, *_LOGICAL):
    setattr(Remote, f"__{_name.rstrip('_')}__", _between(_name))


class TestsSide:
    """Runs tests, and asks the program's side for what they call."""

    __test__ = False  # no class of pytest's

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._kept: list[Any] = []
        self._exceptions: dict[int, type[Exception]] = {}
        self.checks: list[bool] = []
        self.error = ""

    def ask(self, operation: str, /, *args: Any, **named: Any) -> Any:
        """What the program's side says to it; raises what it raised."""
        sent = [encode(argument, self._keep) for argument in args]
        self._channel.send(
            {"apply": operation, "args": sent, "named": {k: encode(v, self._keep) for k, v in named.items()}}
        )
        while "call_back" in (answer := self._channel.receive()):
            self._channel.send({"returned": self._call_back(answer)})
        for place, code in answer.get("changed", {}).items():
            _replace(args[int(place)], decode(code, self._find))
        if "raised" in answer:
            raise self._exception(*answer["raised"])
        return decode(answer["value"], self._find)

    def _call_back(self, asked: Any) -> list[Any] | None:
        try:
            value = self._kept[asked["call_back"]](*[decode(code, self._find) for code in asked["args"]])
            return [encode(value, self._keep)]
        except Exception:  # noqa: BLE001 - the program hears that it failed; why is the tests' affair
            return None

    def _keep(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"object": value._number}
        if isinstance(value, type) and value in self._exceptions.values():
            return {"object": next(number for number, kind in self._exceptions.items() if kind is value)}
        if isinstance(value, Iterable) and not isinstance(value, type):
            return {"list": [encode(item, self._keep) for item in value]}  # an iterator, a view of a dict
        if not callable(value) or isinstance(value, type):
            raise CannotSend(f"a test gives the program {value!r:.80}, which is neither a plain value nor a function")
        self._kept.append(value)
        return {"callback": len(self._kept) - 1}

    def _find(self, kind: str, body: Any) -> Any:
        if kind == "callback":
            return self._kept[body]
        if kind == "exception":
            number, name, base = body
            made = getattr(builtins, base) if name == base else type(name, (getattr(builtins, base),), {})
            return self._exceptions.setdefault(number, made)
        return Remote(self, body)

    def _exception(self, kind: Any, args: list[Any], line: int) -> Exception:
        found = decode(kind, self._find)
        known = [one for one in self._exceptions.values() if one.__name__ == found.__name__]
        given = [decode(code, self._find) for code in args]
        try:
            error: Exception = (known[0] if known else found)(*given)
        except TypeError:  # one that wants other arguments than it keeps
            error = Exception(f"{found.__name__}: {given}")
        if line:
            error.add_note(f" (line {line} of the program)")
        return error

    def run(self, job: dict[str, Any]) -> None:
        """Run all tests; fills `checks`, one for each assertion that was reached, and `error`, of the first failure."""
        try:
            self.ask("load", job["program"])
        except Exception as error:  # noqa: BLE001 - whatever the program raised
            self._note(error)
            self.checks.append(False)
            return
        sources = [ast.parse(test) for test in job["tests"]]
        space = self._space(job, sources)
        counted = Counted()
        for tree in sources:
            self._try(compile(ast.fix_missing_locations(counted.visit(tree)), "<test>", "exec"), space)
        if any(map(_makes_check, sources)) and not any(map(_calls_check, sources)):
            self._try(compile("check(candidate)", "<test>", "exec"), space)
        if counted.num_assertions and not self.checks:
            self.error = self.error or "no assertion was reached"
            self.checks.append(False)

    def _space(self, job: dict[str, Any], sources: list[ast.Module]) -> dict[str, Any]:
        """The names that tests see: what stands before the answer, and of the program what is in neither."""
        space: dict[str, Any] = {"__name__": "tests", "__counted__": self.counted}
        before = _whole(job["before"])
        exec(compile(before, "<before>", "exec"), space)
        made = {node.name for node in before.body if isinstance(node, ast.ClassDef)}
        nodes = [node for tree in sources for node in ast.walk(tree)]
        bound = {name for node in nodes for name in _bound(node)}
        read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        free = {name for name in read - bound - {"candidate"} if not hasattr(builtins, name) and name not in space}
        for name in sorted(free | made | {job["entry_point"]} - {""}):
            try:
                space[name] = self.ask("name", name)
            except NameError as error:
                if name == job["entry_point"]:
                    self._note(error)
                    self.checks.append(False)
        return {**space, "candidate": space.get(job["entry_point"])}

    def _try(self, code: types.CodeType, space: dict[str, Any]) -> None:
        try:
            exec(code, space)
        except (ProgramGone, CannotSend):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the program or the test raised
            self._note(error)
            self.checks.append(False)

    def counted(self, is_so: Callable[[], Any], text: str) -> None:
        """One assertion."""
        self.checks.append(False)
        try:
            self.checks[-1] = bool(is_so())
        except (ProgramGone, CannotSend):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the program raised
            self._note(error)
        if not self.checks[-1]:
            self._note(AssertionError(text))

    def _note(self, error: Exception) -> None:
        where = "".join(getattr(error, "__notes__", ()))
        self.error = self.error or f"{type(error).__name__}: {error!s:.{MAX_ERROR_CHARACTERS}}{where}"


class Counted(ast.NodeTransformer):
    """Makes each assertion one that is counted and does not end the tests; inside `try` it stays what it is."""

    num_assertions = 0

    def visit_Try(self, node: ast.Try) -> ast.Try:
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.Pass()
        self.num_assertions += 1
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        text = ast.Constant(f"assert {ast.unparse(node.test)}"[:MAX_ERROR_CHARACTERS])
        called = ast.Name("__counted__", ast.Load())
        return ast.copy_location(ast.Expr(ast.Call(called, [ast.Lambda(nothing, node.test), text], [])), node)


def _whole(before: str) -> ast.Module:
    """What stands before an answer, as a module: a signature that ends it gets a body."""
    try:
        return ast.parse(before)
    except SyntaxError:
        return ast.parse(f"{before.rstrip()}\n    pass\n")


def _bound(node: ast.AST) -> list[str]:
    """The names that a node makes."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.ExceptHandler):
        return [node.name] if node.name else []
    return [node.id] if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else []


def _makes_check(tree: ast.Module) -> bool:
    return any(isinstance(statement, ast.FunctionDef) and statement.name == "check" for statement in tree.body)


def _calls_check(tree: ast.Module) -> bool:
    calls = [s.value.func for s in tree.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
    return any(isinstance(function, ast.Name) and function.id == "check" for function in calls)


def _replace(container: Any, now: Any) -> None:
    """Give a list, dict or set the content that a call left in it."""
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(now)


def _stand_in_for_numpy() -> types.ModuleType:
    """The few names of NumPy that the plus-tests of HumanEval and MBPP use: no package is installed here."""

    def allclose(found: Any, wanted: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
        if isinstance(wanted, list | tuple):
            if len(found) != len(wanted):
                raise ValueError("operands could not be broadcast together")
            return all(allclose(f, w, rtol, atol) for f, w in zip(found, wanted, strict=True))
        return bool(found == wanted or (math.isfinite(wanted) and abs(found - wanted) <= atol + rtol * abs(wanted)))

    module = types.ModuleType("numpy")
    module.__dict__.update(
        allclose=allclose,
        isclose=allclose,
        **{name: type(name, (), {}) for name in ("ndarray", "float32", "float64", "integer", "floating")},
    )
    return module


def program_side() -> None:
    """Main of the sandbox with the program: its channel is the standard input and output."""
    sys.set_int_max_str_digits(0)
    channel = Channel(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    ProgramSide(channel).serve()
    os._exit(0)


def tests_side() -> None:
    """Main of the sandbox with the tests: the job is its standard input, the verdict its standard output."""
    sys.set_int_max_str_digits(0)
    job = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    __import__("random").seed(0)
    if any("numpy" in test for test in job["tests"]):
        sys.modules["numpy"] = _stand_in_for_numpy()
    side = TestsSide(Channel(*job["channel"]))
    verdict: dict[str, Any] = {"broken": ""}
    try:
        side.run(job)
    except ProgramGone as error:
        side.error = side.error or str(error)
        side.checks.append(False)
    except (CannotSend, SyntaxError) as error:
        verdict["broken"] = str(error)
    with os.fdopen(out, "w") as stream:
        stream.write(json.dumps({**verdict, "checks": side.checks, "error": side.error}))
    os._exit(0)
