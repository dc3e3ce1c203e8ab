"""The sandbox of the tests: runs them, and asks the program's side for what they call."""

import ast
import builtins
import json
import math
import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from nanodag.rewards.sandboxed_tests.wire import (
    BINARY,
    ITEMS,
    LOGICAL,
    UNARY,
    Channel,
    ProgramGone,
    StandIn,
    builtin_class,
    decode,
    encode,
)

MAX_ERROR_CHARACTERS = 300

# The end of an iterator, raised by a call of the program, is an error, as PEP 479 has it in generators: as it is, it
# would end a `map`, a `zip` or a loop of the tests early, and what is left would count as right.
ENDS: dict[type, type] = {
    kind: type(kind.__name__, (RuntimeError,), {}) for kind in (StopIteration, StopAsyncIteration)
}


class CannotJudge(BaseException):
    """The tests are no Python, or give the program what cannot be sent."""


class ProgramObject(StandIn):
    """An object of the program, as the tests hold it."""

    def __init__(self, side: "TestsSide", number: int) -> None:
        object.__setattr__(self, "_side", side)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_as_number", {})

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._side.ask("call", self, *args, **named)

    def __getattr__(self, name: str) -> Any:
        return self._side.ask("getattr", self, name)

    def __eq__(self, other: object) -> Any:
        return isinstance(other, ProgramObject) and self._side.ask("eq", self, other)

    def __contains__(self, wanted: object) -> bool:
        return any(item is wanted or item == wanted for item in self._side.ask("iter", self))

    def __instancecheck__(self, value: object) -> Any:
        return isinstance(value, ProgramObject) and self._side.ask("isinstance", value, self)


def _forward(operation: str) -> Callable[..., Any]:
    is_between = operation in (*BINARY, *LOGICAL)  # objects of the program: a wanted value is not given to it

    def forwarded(self: ProgramObject, *args: Any) -> Any:
        if is_between and not isinstance(args[0], ProgramObject):
            return NotImplemented
        if operation in self._as_number:
            return self._as_number[operation]
        value = self._side.ask(operation, self, *args)
        if operation in ("float", "int"):  # once: a new one each time could make any sum of it come out
            self._as_number[operation] = value
        return value

    return forwarded


for _name in (*UNARY, *ITEMS, *BINARY, *LOGICAL, "setattr", "delattr"):
    setattr(ProgramObject, f"__{_name.rstrip('_')}__", _forward(_name))


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
        """Ask the program's side; returns its value, or raises what it raised."""
        sent = [encode(argument, self._keep) for argument in args]
        self._channel.send(
            {"apply": operation, "args": sent, "named": {k: encode(v, self._keep) for k, v in named.items()}}
        )
        while "call_back" in (answer := self._channel.receive()):
            self._channel.send({"returned": self._call_back(answer)})
        for place, code in answer.get("changed", {}).items():
            _replace(args[int(place)], decode(code, self._find))
        if "raised" in answer:
            error = self._exception(*answer["raised"])
            is_end = operation == "next" and isinstance(error, ENDS[StopIteration])
            raise StopIteration(*error.args) if is_end else error
        return decode(answer["value"], self._find)

    def _call_back(self, asked: Any) -> list[Any] | None:
        try:
            value = self._kept[asked["call_back"]](*[decode(code, self._find) for code in asked["args"]])
            return [encode(value, self._keep)]
        except Exception:  # noqa: BLE001 - the program hears that it failed; why is the tests' affair
            return None

    def _keep(self, value: Any) -> Any:
        if isinstance(value, ProgramObject):
            return {"object": value._number}
        if isinstance(value, type) and value in self._exceptions.values():
            return {"object": next(number for number, kind in self._exceptions.items() if kind is value)}
        if isinstance(value, Iterable) and not isinstance(value, type):
            return {"list": [encode(item, self._keep) for item in value]}  # an iterator, a view of a dict
        if not callable(value) or isinstance(value, type):
            raise CannotJudge(f"a test gives the program {value!r:.80}, which is neither a plain value nor a function")
        self._kept.append(value)
        return {"callback": len(self._kept) - 1}

    def _find(self, kind: str, body: Any) -> Any:
        if kind == "callback":
            return self._kept[body]
        if kind == "exception":
            number, name, base = body
            made = builtin_class(base, Exception)
            made = ENDS.get(made, made)
            made = made if name == base else type(name, (made,), {})
            return self._exceptions.setdefault(number, made)
        return ProgramObject(self, body)

    def _exception(self, kind: Any, args: list[Any], line: int) -> Exception:
        if not isinstance(kind, dict) or [*kind] != ["exception"]:  # it would be called
            raise self._channel.gone("the program wrote to its channel")
        error_type = self._find("exception", kind["exception"])
        known = [known_type for known_type in self._exceptions.values() if known_type.__name__ == error_type.__name__]
        arguments = [decode(code, self._find) for code in args]
        try:
            error: Exception = (known[0] if known else error_type)(*arguments)
        except TypeError:  # one that wants other arguments than it keeps
            error = Exception(f"{error_type.__name__}: {arguments}")
        if line:
            error.add_note(f" (line {line} of the program)")
        return error

    def run(self, job: dict[str, Any]) -> None:
        """Run all tests; fills `checks`, one for each assertion that was reached, and `error`, of the first failure."""
        counted = Counted()
        try:
            before = _whole(job["before"])
            sources = [ast.parse(test) for test in job["tests"]]
            codes = [compile(ast.fix_missing_locations(counted.visit(t)), "<test>", "exec") for t in sources]
        except SyntaxError as error:
            raise CannotJudge(str(error)) from error
        try:
            self.ask("load", job["program"])
        except Exception as error:  # noqa: BLE001 - whatever the program raised
            self._note(error)
            self.checks.append(False)
            return
        space = self._space(job, before, sources)
        for code in codes:
            self._try(code, space)
        statements = [statement for tree in sources for statement in tree.body]
        has_check = any(isinstance(made, ast.FunctionDef) and made.name == "check" for made in statements)
        called = [s.value.func for s in statements if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
        if has_check and not any(isinstance(function, ast.Name) and function.id == "check" for function in called):
            self._try(compile("check(candidate)", "<test>", "exec"), space)
        if self._channel.is_gone:  # and a test has taken no notice
            raise ProgramGone("the program has ended")
        if counted.num_assertions and not self.checks:
            self.error = self.error or "no assertion was reached"
            self.checks.append(False)

    def _space(self, job: dict[str, Any], before: ast.Module, sources: list[ast.Module]) -> dict[str, Any]:
        """The names that tests see: what stands before the answer, and of the program what is in neither."""
        space: dict[str, Any] = {"__name__": "tests", "__counted__": self.counted, "__ends__": tuple(ENDS.values())}
        exec(compile(before, "<before>", "exec"), space)
        made = {node.name for node in before.body if isinstance(node, ast.ClassDef)}
        nodes = [node for tree in sources for node in ast.walk(tree)]
        bound = {name for node in nodes for name in _bound(node)}
        read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        free = {name for name in read - bound - {"candidate"} if not hasattr(builtins, name) and name not in space}
        modules = _modules(nodes) & free
        space.update({name: __import__(name) for name in modules})
        for name in sorted((free - modules) | made | {job["entry_point"]} - {""}):
            try:
                space[name] = self.ask("name", name)
            except NameError as error:
                if name == job["entry_point"]:
                    self._note(error)
                    self.checks.append(False)
        space["candidate"] = space.get(job["entry_point"])
        return space

    def _try(self, code: types.CodeType, space: dict[str, Any]) -> None:
        try:
            exec(code, space)
        except Exception as error:  # noqa: BLE001 - whatever the program or the test raised
            self._note(error)
            self.checks.append(False)

    def counted(self, is_so: Callable[[], Any], text: str) -> None:
        """One assertion."""
        self.checks.append(False)
        try:
            self.checks[-1] = bool(is_so())
        except Exception as error:  # noqa: BLE001 - whatever the program raised
            self._note(error)
        if not self.checks[-1]:
            self._note(AssertionError(text))

    def _note(self, error: Exception) -> None:
        where = "".join(getattr(error, "__notes__", ()))
        try:
            message = f"{error!s:.{MAX_ERROR_CHARACTERS}}"
        except Exception:  # noqa: BLE001 - it holds an object of the program, whose text that program makes
            message = "its message cannot be read"
        self.error = self.error or f"{type(error).__name__}: {message}{where}"


class Counted(ast.NodeTransformer):
    """Makes each assertion one that is counted and does not end the tests; inside `try` it stays what it is, and a
    handler of StopIteration gets that of a call too, as ENDS has it."""

    num_assertions = 0

    def visit_Try(self, node: ast.Try) -> ast.Try:
        for handler in [inner for inner in ast.walk(node) if isinstance(inner, ast.ExceptHandler)]:
            caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            if any(isinstance(name, ast.Name) and name.id in {kind.__name__ for kind in ENDS} for name in caught):
                ends = ast.Starred(ast.Name("__ends__", ast.Load()), ast.Load())
                handler.type = ast.copy_location(ast.Tuple([*caught, ends], ast.Load()), handler)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.Pass()
        if any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node.test)):
            return node  # what it binds would be bound in the lambda
        self.num_assertions += 1
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        text = ast.Constant(f"assert {ast.unparse(node.test)}"[:MAX_ERROR_CHARACTERS])
        called = ast.Name("__counted__", ast.Load())
        return ast.copy_location(ast.Expr(ast.Call(called, [ast.Lambda(nothing, node.test), text], [])), node)


def _whole(before: str) -> ast.Module:
    """The text before an answer, as a module: a signature that ends it gets a body."""
    try:
        return ast.parse(before)
    except SyntaxError:
        return ast.parse(f"{before.rstrip()}\n    pass\n")


def _bound(node: ast.AST) -> list[str]:
    """The names that a node makes."""
    match node:
        case ast.FunctionDef(name=str(name)) | ast.ClassDef(name=str(name)) | ast.ExceptHandler(name=str(name)):
            return [name]
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [(alias.asname or alias.name).partition(".")[0] for alias in aliases]
    return []


def _modules(nodes: list[ast.AST]) -> set[str]:
    """The modules of Python whose attributes tests use without an import: a program's `math` could agree with all."""
    held = [node.value for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    others = {node.id for node in nodes if isinstance(node, ast.Name) and not any(node is owner for owner in held)}
    return ({node.id for node in held} - others) & sys.stdlib_module_names


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


def main() -> None:
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
    except CannotJudge as error:
        verdict["broken"] = str(error)
    with os.fdopen(out, "w") as stream:
        stream.write(json.dumps({**verdict, "checks": side.checks, "error": side.error}))
    os._exit(0)
