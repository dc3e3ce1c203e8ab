"""Code: the program passes the prompt's tests, run in a sandbox."""

import ast
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.reward import Reward
from nanodag.rewards.sandbox import run_python

BUDGET_S = 6.0  # for all tests of a sample, below the default of reward_timeout_s: a program that hangs is wrong
_FENCED = re.compile(r"```(?:[Pp]ython|py)?[ \t]*\n(.*?)```", re.DOTALL)

# Runs beside the solution, so it knows the calls and not the results that are wanted. Values leave as text.
_RUNNER = """
import json, os, sys
job = json.load(sys.stdin)
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
space = {"__name__": "__main__"}
found = []
try:
    for part in (job["solution"], job["setup"]):
        exec(compile(part, "<answer>", "exec"), space)
    usable = True
except BaseException:
    usable = False
for expression in job["expressions"]:
    value = None
    if usable:
        try:
            value = repr(eval(compile(expression, "<test>", "eval"), space))[:100_000]
        except BaseException:
            value = None
    found.append(value)
with os.fdopen(out, "w") as stream:
    stream.write(json.dumps(found))
os._exit(0)
"""

# Runs tests of any form without the answer: each `assert` is counted, and `candidate` says what is known of its calls.
# With a reference it is that, and the calls are noted, as the text of their arguments.
_REPLAYER = """
import ast, json, os, random, sys
job = json.load(sys.stdin)
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
random.seed(0)
space, checks, calls = {"__name__": "tests"}, [], []

def candidate(*arguments, **named):
    call = f"(*{arguments!r}, **{named!r})"
    calls.append(call)
    if job["results"] is None:
        return reference(*arguments, **named)
    return ast.literal_eval(job["results"][call])

def counted(is_so):
    checks.append(False)
    checks[-1] = bool(is_so())

class Counted(ast.NodeTransformer):
    def visit_Assert(self, node):
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.Pass()
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        return ast.Expr(ast.Call(ast.Name("__counted__", ast.Load()), [ast.Lambda(nothing, node.test)], []))

try:
    exec(compile(job["before"], "<before>", "exec"), space)
    reference = space.get(job["entry_point"])
    space |= {job["entry_point"]: candidate, "__counted__": counted}
    for test in job["tests"]:
        tree = ast.fix_missing_locations(Counted().visit(ast.parse(test)))
        exec(compile(tree, "<test>", "exec"), space)
    if "check" in space:
        space["check"](candidate)
except Exception as error:
    checks.append(False)
with os.fdopen(out, "w") as stream:
    stream.write(json.dumps([checks, calls]))
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class _Check:
    """call: evaluated beside the solution. wanted: evaluated without it; None when the call need only be true.
    tolerance: of a number; 0 for equality. negated: the call must be false."""

    call: str
    wanted: str | None
    tolerance: float = 0.0
    negated: bool = False


@entry("reward", "code", needs_sandbox=True, least_timeout_s=7.0)
def code(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when every test passes; the component `tests` is the share that passed.

    The program is the last fenced block of the completion, or all of it. The prompt's `metadata.tests` is a list, of
    `{"input": text, "output": text}` for programs that read and print (blanks at the ends of lines aside), or of Python
    text with assertions `call == value`, `abs(call - value) < 1e-6`, `call` or `not call`, after imports and
    assignments, also inside `def check(candidate)` with `metadata.entry_point` naming the function. Results are
    compared outside of the sandbox, as the values that their text spells, and right sides are never inside, nor what is
    assigned for them alone: a program that ends early, returns what equals everything or prints a verdict gains
    nothing. What a call itself says, its arguments and all of a bare `assert call`, is inside. All tests together have
    BUDGET_S seconds. Raises ValueError for a prompt without tests, or with one of another form.

    Where `metadata.before` has what stands before the answer, as in HumanEval, tests may be any Python: they are run
    with the reference, `before` and the prompt's answer behind it, to learn which calls they make, then these calls
    beside the program, and the tests again, apart from it, with what it returned.
    """
    metadata = prompt["metadata"]
    tests = metadata.get("tests")
    if not tests:
        raise ValueError("the prompt has no metadata.tests, a list of {input, output} or of assertions")
    program, deadline = _program_of(completion), time.monotonic() + BUDGET_S
    if "before" in metadata:
        share = _replayed(
            program, metadata["before"], prompt["answer"], tuple(tests), metadata["entry_point"], deadline
        )
        return Reward(float(share == 1.0), {"tests": share})
    spoken = [test for test in tests if not isinstance(test, str)]
    asserted = _Asserted.parse([test for test in tests if isinstance(test, str)], metadata.get("entry_point"))
    passed = asserted.count_passed(program, deadline) + sum(_answers(program, test, deadline) for test in spoken)
    share = passed / (len(asserted.checks) + len(spoken))
    return Reward(float(share == 1.0), {"tests": share})


def _program_of(completion: str) -> str:
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def _answers(program: str, test: Mapping[str, str], deadline: float) -> bool:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return False
    done = run_python(program, stdin=test["input"], timeout_s=left_s)
    return done.returncode == 0 and not done.timed_out and _lines(done.stdout) == _lines(test["output"])


def _replayed(
    program: str, before: str, answer: str, tests: tuple[str, ...], entry_point: str, deadline: float
) -> float:
    """The share of assertions that hold for what the program returns."""
    total, calls = _reference_run(f"{before}\n{answer}", tests, entry_point)
    expressions = [entry_point + call for call in calls]
    texts = _evaluated(f"{before}\n{program}", "", expressions, deadline - time.monotonic())
    results = {call: text for call, text in zip(calls, texts, strict=True) if _value_of(text) is not None}
    checks, _ = _checks(before, tests, entry_point, results=results)
    return min(sum(checks), total) / total


@lru_cache(maxsize=256)
def _reference_run(reference: str, tests: tuple[str, ...], entry_point: str) -> tuple[int, tuple[str, ...]]:
    """How many assertions there are, and the calls that they make. Raises ValueError when the reference fails."""
    checks, calls = _checks(reference, tests, entry_point, results=None)
    if not checks or not all(checks):
        raise ValueError(f"the prompt's own answer passes {sum(checks)} of {len(checks)} tests of {entry_point}")
    return len(checks), tuple(dict.fromkeys(calls))


def _checks(
    before: str, tests: tuple[str, ...], entry_point: str, *, results: Mapping[str, str] | None
) -> tuple[list[bool], list[str]]:
    job = {"before": before, "tests": tests, "entry_point": entry_point, "results": results}
    done = run_python(_REPLAYER, stdin=json.dumps(job), timeout_s=BUDGET_S)
    try:
        checks, calls = json.loads(done.stdout)
    except ValueError:
        return [False], []  # a test that waits for what does not come
    return checks, calls


def _evaluated(program: str, setup: str, expressions: Sequence[str], timeout_s: float) -> list[Any]:
    """The text of what each expression is beside the program; None where it raises, or nothing came out."""
    job = json.dumps({"solution": program, "setup": setup, "expressions": expressions})
    done = run_python(_RUNNER, stdin=job, timeout_s=max(timeout_s, 0.0))
    try:
        texts = json.loads(done.stdout)
    except (ValueError, RecursionError):
        texts = None
    is_whole = isinstance(texts, list) and len(texts) == len(expressions) and not done.timed_out
    return texts if is_whole else [None] * len(expressions)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@dataclass(frozen=True, slots=True)
class _Asserted:
    """Tests given as Python text. setup: imports and assignments, which come before all checks."""

    setup: tuple[ast.stmt, ...]
    checks: tuple[_Check, ...]

    @classmethod
    def parse(cls, texts: Sequence[str], entry_point: str | None) -> "_Asserted":
        statements = [statement for text in texts for statement in ast.parse(text).body]
        setup: list[ast.stmt] = []
        checks: list[_Check] = []
        for statement in statements:
            if isinstance(statement, ast.FunctionDef) and statement.name == "check":
                renamed = [_Renamed(entry_point).visit(inner) for inner in statement.body]
                checks += [_check_of(inner) for inner in renamed if not _is_text(inner)]
            elif isinstance(statement, ast.Import | ast.ImportFrom | ast.Assign):
                setup.append(statement)
            elif not _calls_check(statement):
                checks.append(_check_of(statement))
        asserted = cls(tuple(setup), tuple(checks))
        asserted.refuse_shown()
        return asserted

    def refuse_shown(self) -> None:
        """Raise ValueError where one assignment makes what a call needs and what only a right side may know."""
        inside = self._needed([check.call for check in self.checks])
        apart = self._needed([check.wanted for check in self.checks if check.wanted]) - inside
        for statement in self.setup:
            if isinstance(statement, ast.Assign) and (bound := _bound(statement)) & inside and bound & apart:
                raise ValueError(
                    f"the test {ast.unparse(statement)!r:.80} assigns what is wanted together with what a call needs; "
                    "make it two assignments"
                )

    def count_passed(self, program: str, deadline: float) -> int:
        """How many checks the program passes."""
        if not self.checks:
            return 0
        results = self._values(program, [check.call for check in self.checks], deadline - time.monotonic())
        wanted = self._values("", [check.wanted or "True" for check in self.checks], BUDGET_S)
        for check, value in zip(self.checks, wanted, strict=True):
            if value is None:
                raise ValueError(f"the test's value {check.wanted!r:.80} cannot be computed without the answer")
        return sum(
            given is not None and value is not None and _agree(check, given.value, value.value)
            for check, given, value in zip(self.checks, results, wanted, strict=True)
        )

    def _values(self, program: str, expressions: list[str], timeout_s: float) -> list["_Value | None"]:
        """What each expression evaluates to; None where it raises, or is nothing that can be written down."""
        needed = self._needed(expressions)
        setup = [node for node in self.setup if not isinstance(node, ast.Assign) or _bound(node) & needed]
        texts = _evaluated(program, "\n".join(map(ast.unparse, setup)), expressions, timeout_s)
        return [_value_of(text) for text in texts]

    def _needed(self, expressions: list[str]) -> set[str]:
        """The names that expressions use, and those that the assignments of these use."""
        needed = {name for expression in expressions for name in _names(ast.parse(expression))}
        while True:
            used = {
                name
                for node in self.setup
                if isinstance(node, ast.Assign) and _bound(node) & needed
                for name in _names(node)
            }
            if used <= needed:
                return needed
            needed |= used


def _names(tree: ast.AST) -> set[str]:
    """The names that are read."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _bound(assignment: ast.Assign) -> set[str]:
    """The names that an assignment makes or changes."""
    return {node.id for target in assignment.targets for node in ast.walk(target) if isinstance(node, ast.Name)}


class _Renamed(ast.NodeTransformer):
    """`candidate` by the name of the function that is asked for."""

    def __init__(self, entry_point: str | None) -> None:
        self._entry_point = entry_point

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id != "candidate":
            return node
        if not self._entry_point:
            raise ValueError("a test calls `candidate`, and the prompt has no metadata.entry_point")
        return ast.Name(self._entry_point, node.ctx)


def _check_of(statement: ast.stmt) -> _Check:
    """Raises ValueError for a statement that is no assertion of a known form."""
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
            return _Check(ast.unparse(left), ast.unparse(right))
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)]),
                ops=[ast.Lt() | ast.LtE()],
                comparators=[ast.Constant(value=float() | int() as tolerance)],
            )
        ):
            return _Check(ast.unparse(left), ast.unparse(right), tolerance=float(tolerance))
        case ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=ast.Call() as call)):
            return _Check(ast.unparse(call), None, negated=True)
        case ast.Assert(test=ast.Call() as call):
            return _Check(ast.unparse(call), None)
    raise ValueError(
        f"the test {ast.unparse(statement)!r:.80} is none of `assert call == value`, `assert not call`, `assert call`, "
        "`assert abs(call - value) < 1e-6`"
    )


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _calls_check(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id="check"))):
            return True
    return False


def _agree(check: _Check, found: Any, wanted: Any) -> bool:
    if check.wanted is None:
        return bool(found) is not check.negated
    if check.tolerance:
        try:
            is_number = all(isinstance(value, int | float) and math.isfinite(value) for value in (found, wanted))
            return is_number and abs(found - wanted) < check.tolerance
        except OverflowError:  # an integer that no float holds
            return False
    return found == wanted


@dataclass(frozen=True, slots=True)
class _Value:
    value: Any


def _value_of(text: Any) -> _Value | None:
    """The value that a text spells, None when it spells none. Built from literals, so `==` calls no code of the
    answer."""
    if not isinstance(text, str):
        return None
    try:
        return _Value(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
