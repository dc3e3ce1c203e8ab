"""Programs that are tested, and programs that try to get around it."""

import pytest

from nanodag.rewards import code as module
from nanodag.rewards.code import code, program_of

ASSERTIONS = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]


def score(completion: str, tests=tuple(ASSERTIONS), **metadata):
    return code({"answer": "", "metadata": {"tests": list(tests), **metadata}}, completion)


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def test_a_right_program_passes_and_a_half_right_one_is_counted():
    assert score(fenced("def add(a, b):\n    return a + b")).value == 1.0
    assert score("def add(a, b):\n    return a + b").value == 1.0  # no fence
    half = score(fenced("def add(a, b):\n    return 5"))
    assert half.value == 0.0 and half.components == {"tests": 0.5}


@pytest.mark.parametrize("cheat", [
    "raise SystemExit(0)", "import os\nos._exit(0)",
    "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any(7)",
    "class Any:\n    def __repr__(self): return 'True'\ndef add(a, b): return Any()",
    'import os, json\nos.write(3, b\'["5", "5"]\')\nos._exit(0)',
    "print('[true, true]')\ndef add(a, b): raise SystemExit",
    "import builtins\nbuiltins.repr = lambda value: '5'\ndef add(a, b): return 5",
    "import sys\nsys.stdout.write('passed')", "def add(a, b): return add(a, b)",
    "class Any:\n    def __repr__(self): return '{[]}'\ndef add(a, b): return Any()",
    "import os\nos.write(3, b'[' * 100_000)\nos._exit(0)", "syntax error", "",
])  # fmt: skip
def test_a_program_that_cheats_fails(cheat):
    assert score(fenced(cheat)).value == 0.0


def test_a_program_that_hangs_is_wrong_in_time(monkeypatch):
    monkeypatch.setattr(module, "BUDGET_S", 2.0)
    assert score(fenced("while True: pass")).value == 0.0
    assert score(fenced("while True: pass"), [{"input": "", "output": ""}] * 20).value == 0.0


def test_programs_that_read_and_print():
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}]
    assert score(fenced("print(sum(map(int, input().split())))"), tests).value == 1.0
    assert score(fenced("print(3)"), tests).components == {"tests": 0.5}
    assert score(fenced("print(3)\nraise SystemExit(1)"), tests).value == 0.0


def test_tests_as_humaneval_and_mbpp_write_them():
    check = (
        "METADATA = {}\ndef check(candidate):\n    'text'\n    assert candidate([1.0, 2.0]) == True\n"
        "    assert not candidate([])\n    assert candidate([3.0])\n"
    )
    right = fenced("def close(numbers): return len(numbers) > 0")
    assert score(right, [check], entry_point="close").value == 1.0
    assert score(fenced("def close(numbers): return True"), [check], entry_point="close").value == 0.0
    assert score(fenced("def close(numbers): return None"), [check], entry_point="close").value == 0.0
    mbpp = ["assert set(shared((3, 4), (4, 5))) == set((4,))", "import math", "assert abs(root(2) - 1.41421) < 1e-4"]
    program = fenced("def shared(a, b): return [x for x in a if x in b]\ndef root(x): return x ** 0.5")
    assert score(program, mbpp).value == 1.0
    assert score(fenced("abs = lambda x: 0\ndef shared(a, b): return {4}\ndef root(x): return 7"), mbpp).value == 0.0


def test_what_is_assigned_for_a_right_side_alone_is_not_shown_to_the_program():
    tests = ["ten = 10\nwant = 3628800\nmore = [want, 1]", "assert fact(ten) == want", "assert fact(0) == more[1]"]
    assert score(fenced("import math\ndef fact(n): return math.factorial(n)"), tests).value == 1.0
    assert score(fenced("def fact(n): return globals().get('want', 1)"), tests).components == {"tests": 0.5}
    assert score(fenced("class Box:\n    def get(self): return 3"), ["box = Box()\nassert box.get() == 3"]).value == 1.0


NODE = """
class Node:
    def __init__(self, data):
        self.data, self.left = data, None
    def __eq__(self, other):
        return self.data == other.data
def depth(node):
    return 0 if node is None else 1 + depth(node.left)
def twin(node):
    return Node(node.data)
"""


@pytest.mark.parametrize(("program", "tests"), [
    ("def f(n): return n * n", ["for n in range(5):\n    assert f(n) == n ** 2"]),
    ("def f(n): return n * n",
     ["def square(n):\n    return n ** 2", "assert all(f(n) == square(n) for n in (1, 2))"]),
    (NODE, ["root = Node(1)\nroot.left = Node(2)", "assert depth(root) == 2 and root.left.data == 2"]),
    (NODE, ["assert twin(Node(3)) == Node(3) != Node(4)", "assert isinstance(twin(Node(3)), Node)"]),
    ("class Bad(ValueError): pass\ndef f(n):\n    raise Bad(f'no {n}')",
     ["try:\n    f(3)\n    assert False\nexcept Bad as error:\n    assert str(error) == 'no 3'",
      "try:\n    f(3)\n    assert False\nexcept ValueError:\n    pass"]),
    ("def f(numbers): numbers.sort()", ["a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]"]),
    ("def f(g, n): return g(g(n))",
     ["assert f(lambda n: n * 2, 3) == 12", "import math\nassert f(math.sqrt, 16) == 2"]),
    ("def f(n): yield from range(n)", ["assert list(f(3)) == [0, 1, 2]", "assert next(f(1)) == 0"]),
    ("from collections import Counter, deque\nfrom decimal import Decimal as D\n"
     "def f(): return Counter('aa'), deque([1]), D('0.10'), {1}, [b'x', 2j, float('inf')], range(2), 9**9999",
     ["from collections import deque\nfrom decimal import Decimal as D",
      "assert f() == ({'a': 2}, deque([1]), D('0.1'), {1}, [b'x', 2j, float('inf')], range(2), 9**9999)"]),
    ("import math\ndef root(x): return math.sqrt(x)", ["assert math.isclose(root(2), 1.4142, rel_tol=1e-4)"]),
])  # fmt: skip
def test_tests_are_any_python_and_a_wrong_program_fails_the_same_ones(program, tests):
    assert score(fenced(program), tests).value == 1.0
    name = "depth" if "depth" in program else "root" if "root" in program else "f"
    wrong = f"{program}\ndef {name}(*arguments): return None\ndef twin(node): return node.data"
    assert score(fenced(wrong), tests).value < 1.0


def test_the_plus_tests_of_humaneval_find_the_few_names_of_numpy_that_they_use():
    check = """
import numpy as np
def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    return x.dtype == np.float64 if isinstance(x, np.ndarray) else False
def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"
def check(candidate):
    for inp, exp in zip([[3.0], [2.0]], [[1.5], [1.0]]):
        assertion(candidate(*inp), exp, 0)
"""
    assert score(fenced("def half(x): return [x / 2 + 1e-9]"), [check], entry_point="half").value == 1.0
    assert score(fenced("def half(x): return [x / 2 + 1e-3]"), [check], entry_point="half").value == 0.0
    assert score(fenced("def half(x): return [1.5]"), [check], entry_point="half").components == {"tests": 0.5}


@pytest.mark.parametrize(("program", "error"), [
    ("def f(n):\n    return n", "AssertionError: assert f(2) == 4"),
    ("def f(n):\n    return n / 0", "ZeroDivisionError: division by zero (line 2 of the program)"),
    ("import os; os._exit(0)", "the program has ended"),
    ("raise SystemExit", "RuntimeError: the program raised SystemExit (line 1 of the program)"),
    ("def g(n): pass", "NameError: name 'f' is not defined"),
    ("def f(n): return [f]", "AssertionError: assert f(2) == 4"),
])  # fmt: skip
def test_the_verdict_says_what_failed_first(program, error):
    assert module.judge({"metadata": {"tests": ["assert f(2) == 4"]}}, program).error == error


@pytest.mark.parametrize("cheat", [
    "class Any:\n    def __sub__(self, other): return 0\n    __rsub__ = __sub__\n    def __abs__(self): return 0\n",
    "class Any:\n    def __contains__(self, other): return True\n    def __iter__(self): return iter([])\n",
    "class Any(float):\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0.0\n",
    "class Any(list):\n    def __contains__(self, other): return True\n    def __eq__(self, other): return True\n",
])  # fmt: skip
def test_an_object_that_agrees_with_everything_agrees_with_nothing_wanted(cheat):
    tests = ["assert abs(f(2) - 1.41) < 0.1", "assert 1.41 in f(2)", "assert f(2) == 1.41", "assert 1.41 == f(2)"]
    assert score(fenced(f"{cheat}def f(n): return Any()"), tests).components == {"tests": 0.0}


WRITES = """
import sys
frame = sys._getframe()
while "self" not in frame.f_locals:
    frame = frame.f_back
frame.f_locals["self"]._channel.send({{"raised": [{kind}, [{code!r}], 0]}})
"""
FORGES = """
import os, json
for fd in range(3, 64):
    try:
        os.write(fd, json.dumps({'broken': '', 'checks': [True], 'error': ''}).encode())
    except OSError:
        pass
os._exit(0)
"""


@pytest.mark.parametrize(("cheat", "test"), [
    (WRITES.format(kind="{'exception': [0, 'exec', 'exec']}", code=FORGES), "assert f(2) == 4"),
    (WRITES.format(kind="{'builtin': 'exec'}", code=FORGES), "assert f(2) == 4"),
    (f"f = exec\ndef g(n): return {FORGES!r}", "assert f(g(2)) == 4"),
    (f"f = eval\ndef g(n): return {f'exec({FORGES!r})'!r}", "assert f(g(2)) == 4"),
    ("class math:\n    isclose = lambda *a, **b: True\ndef f(n): return 3", "assert math.isclose(f(2), 4)"),
    ("class Any:\n    seen = 0\n    def __float__(self):\n        self.seen += 1\n"
     "        return [0.0, 0.0, -0.5][self.seen % 3]\ndef f(n): return Any()",
     "import math\nx = f(2)\nassert abs(sum(c * math.pow(x, i) for i, c in enumerate([1, 2, 7]))) < 1e-4"),
])  # fmt: skip
def test_a_program_reaches_neither_the_verdict_nor_what_the_tests_compute_with(cheat, test):
    assert score(fenced(cheat), [test], entry_point="f").value == 0.0


ENDED_EARLY = [
    "assert all(map(f, [1, 2]))",
    "assert not any(map(f, [1, 2]))",
    "assert all(got == n * n for got, n in zip(map(f, [1, 2]), [1, 2]))",
    "assert list(filter(f, [0])) == []",
    "assert 5 not in iter(f.__call__, 3)",
    "assert 5 not in map(len, map(box, [1]))",
    "class Run:\n    def __getitem__(self, n):\n        return f(n)\nassert 7 not in zip(Run(), [1])",
    """
import asyncio
class Run:
    def __aiter__(self):
        return self
    async def __anext__(self):
        return f(1)
async def run():
    return [got async for got in Run()]
assert asyncio.run(run()) == []
""",
]


@pytest.mark.parametrize("end", ["StopIteration", "StopAsyncIteration", "type('Own', (StopIteration,), {})"])
def test_the_end_of_an_iterator_that_a_call_raises_ends_no_loop_of_the_tests(end):
    cheat = f"class Box:\n    def __len__(self): raise {end}\nbox = lambda n: Box()\ndef f(*n): raise {end}"
    assert score(fenced(cheat), ENDED_EARLY).components == {"tests": 0.0}


def test_a_raised_end_that_the_program_writes_itself_ends_no_loop_either():
    for kind in ("{'exception': [0, 'KeyError', 'StopIteration']}", "{'builtin': 'StopIteration'}"):
        cheat = "\n    ".join(["def f(n):", *WRITES.format(kind=kind, code="").strip().splitlines()])
        assert score(fenced(cheat), ["assert all(map(f, [1, 2]))"]).value == 0.0


def test_tests_may_want_the_end_of_an_iterator():
    tests = [
        "g = f(1)\nassert next(g) == 0 and next(g, 7) == 7 and list(zip(f(3), 'ab')) == [(0, 'a'), (1, 'b')]",
        "try:\n    next(g)\n    assert False\nexcept StopIteration:\n    pass",
        "try:\n    first([])\n    assert False\nexcept (KeyError, StopIteration):\n    pass",
        "try:\n    first(0)\n    assert False\nexcept Own as error:\n    assert str(error) == 'no'",
    ]
    program = """
def f(n):
    yield from range(n)
class Own(StopIteration):
    pass
def first(items):
    if items == 0:
        raise Own("no")
    return next(iter(items))
"""
    assert score(fenced(program), tests).value == 1.0


@pytest.mark.parametrize("error", ["SyntaxError", "ValueError", "SystemExit"])
def test_an_error_whose_text_cannot_be_read_is_the_program_s_fault_and_not_the_tests(error):
    program = f"class Text:\n    def __str__(self): raise {error}\ndef f(n): raise ValueError(Text())"
    assert score(fenced(program), ["found = f(2)\nassert found == 4"]).value == 0.0


def test_what_is_raised_and_no_exception_ends_the_program_s_side():
    cheat = WRITES.format(kind="{'builtin': 'map'}", code="")
    test = "try:\n    f(-1)\n    is_refused = False\nexcept Exception:\n    is_refused = True\nassert is_refused"
    program = "\n    ".join(["def f(n):", *cheat.strip().splitlines()])
    assert module.judge({"metadata": {"tests": [test]}}, program).error == "the program wrote to its channel"


@pytest.mark.parametrize("handler", ["except Exception", "except", "except BaseException"])
def test_a_program_that_ends_itself_passes_no_test_that_expects_an_error(handler):
    test = f"try:\n    f(-1)\n    is_refused = False\n{handler}:\n    is_refused = True\nassert is_refused"
    assert score(fenced("def f(n): raise ValueError"), [test]).value == 1.0
    assert score(fenced("import os\ndef f(n): os._exit(0)"), [test]).value == 0.0


SUM, NEAR = "def sum(a, b): return a - b", ["assert abs(root(4) - 2.0) < 1e-6"]
BOUND = ["assert (a := f(2)) == 4", "assert a + 1 == 5"]
BOTH_WAYS = ["assert longest(['a', 'bbb'], len) == 'bbb'", "assert total([1, 2]) == 3", "assert kind(2) is int"]
# what it says -> program, tests, the entry point that the data name, value
SINGLE = {
    "a number near": ("def root(x): return x ** 0.5", NEAR, "root", 1.0),
    "a number beyond floats is near none": ("def root(x): return 10 ** 400", NEAR, "root", 0.0),
    "check, where the tests make none": ("def check(n): return n > 2", ["assert check(3)"], "check", 1.0),
    "a function with a builtin's name": (SUM, ["assert sum(10, 4) == 6"], "sum", 1.0),
    "Python's own, where the data do not name it": (SUM, ["assert sum(10, 4) == 6"], "", 0.0),
    "what an assertion binds stays": ("def f(n): return n * n", BOUND, "f", 1.0),
    "what an assertion binds is the program's": ("def f(n): return 3", BOUND, "f", 0.0),
    "no assertion reached": ("def f(): return []", ["for x in f():\n    assert x == 1"], "f", 0.0),
    "builtins go both ways": (
        "def longest(words, key): return max(words, key=key)\ntotal = sum\ndef kind(n): return type(n)",
        BOTH_WAYS, "", 1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SINGLE)
def test_a_program_and_its_tests(case):
    program, tests, entry_point, value = SINGLE[case]
    named = {"entry_point": entry_point} if entry_point else {}
    assert score(fenced(program), tests, **named).value == value


@pytest.mark.parametrize(("tests", "message"), [
    ([], "no metadata.tests"), (["assert add(1, 2) =="], "invalid syntax"),
    (["class Own: pass\nassert add(Own(), 2) == 3"], "neither a plain value nor a function"),
    (["def check(candidate):\n    assert candidate(1) == 1"], "no metadata.entry_point"),
])  # fmt: skip
def test_tests_that_cannot_be_judged_are_refused(tests, message):
    with pytest.raises(ValueError, match=message):
        score(fenced("def add(a, b): return a + b"), tests)


SIGNATURE = 'import math\n\n\ndef root(x):\n    """The root of x."""\n'
BODY = "    return math.sqrt(x)\n"
FUNCTION = "def root(x):\n    return x ** 0.5\n"


@pytest.mark.parametrize(("answer", "program"), [
    (f"Sure!\n```python\n{FUNCTION}```\nIt takes the root.", FUNCTION),
    (f"```\n{FUNCTION}```", FUNCTION), (f"```Python3\n{FUNCTION}```", FUNCTION),
    (f"```py\r\n{FUNCTION}", FUNCTION),  # cut off, or never closed
    (f"```python\n{FUNCTION}```\nUse it so:\n```python\nprint(root(4))\n```", FUNCTION),
    (f"First try:\n```python\ndef root(x): pass\n```\nBetter:\n```python\n{FUNCTION}```", FUNCTION),
    ("```python\nroot = lambda x: x ** 0.5\n```", "root = lambda x: x ** 0.5\n"),
    (FUNCTION, FUNCTION),
    (f"Here it is:\n\n{FUNCTION}\nThis takes the root, as you asked.", FUNCTION),
    ("I cannot do that.", ""), ("```python\ndef root(x:\n```", ""), ("```python\n```", ""), ("\0", ""), ("", ""),
])  # fmt: skip
def test_a_program_is_found_with_and_without_fences_and_prose(answer, program):
    assert program_of(answer, entry_point="root") == program


@pytest.mark.parametrize(("answer", "program"), [
    (BODY, SIGNATURE + BODY), (f"```python\n{BODY}```", SIGNATURE + BODY),
    (f"```python\n{FUNCTION}```", f"{SIGNATURE}\n{FUNCTION}"),
    (f"```python\n{SIGNATURE}{BODY}```", f"{SIGNATURE}\n{SIGNATURE}{BODY}"),
    (f"{BODY}\n\ndef other():\n    pass", f"{SIGNATURE}{BODY}\n\ndef other():\n    pass"),
    ("return", ""),
])  # fmt: skip
def test_a_body_goes_on_where_the_signature_ends_and_a_function_stands_below_it(answer, program):
    assert program_of(answer, before=SIGNATURE, entry_point="root") == program
