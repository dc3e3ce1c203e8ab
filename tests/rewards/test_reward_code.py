"""Programs that are tested, and programs that try to get around it."""

import pytest

from nanodag.rewards import code as module
from nanodag.rewards.code import code

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


@pytest.mark.parametrize(
    "cheat",
    [
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any(7)",
        "class Any:\n    def __repr__(self): return 'True'\ndef add(a, b): return Any()",
        'import os, json\nos.write(3, b\'["5", "5"]\')\nos._exit(0)',
        "print('[true, true]')\ndef add(a, b): raise SystemExit",
        "import builtins\nbuiltins.repr = lambda value: '5'\ndef add(a, b): return 5",
        "import sys\nsys.stdout.write('passed')",
        "def add(a, b): return add(a, b)",
        "class Any:\n    def __repr__(self): return '{[]}'\ndef add(a, b): return Any()",
        "import os\nos.write(3, b'[' * 100_000)\nos._exit(0)",
        "syntax error",
        "",
    ],
)
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


def test_a_number_beyond_floats_is_no_number_that_is_near():
    near = ["assert abs(root(4) - 2.0) < 1e-6"]
    assert score(fenced("def root(x): return 10 ** 400"), near).value == 0.0
    assert score(fenced("def root(x): return x ** 0.5"), near).value == 1.0


def test_what_is_assigned_for_a_right_side_alone_is_not_shown_to_the_program():
    tests = ["ten = 10\nwant = 3628800\nmore = [want, 1]", "assert fact(ten) == want", "assert fact(0) == more[1]"]
    assert score(fenced("import math\ndef fact(n): return math.factorial(n)"), tests).value == 1.0
    assert score(fenced("def fact(n): return globals().get('want', 1)"), tests).components == {"tests": 0.5}
    assert score(fenced("class Box:\n    def get(self): return 3"), ["box = Box()\nassert box.get() == 3"]).value == 1.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "no metadata.tests"),
        (["assert add(1, 2) < 7"], "is none of"),
        (["one, want = 1, 3", "assert add(one, 2) == want"], "make it two assignments"),
        (["assert add(1, 2) == add(2, 1)"], "cannot be computed without the answer"),
        (["def check(candidate):\n    assert candidate(1) == 1"], "no metadata.entry_point"),
    ],
)
def test_tests_that_cannot_be_judged_are_refused(tests, message):
    with pytest.raises(ValueError, match=message):
        score(fenced("def add(a, b): return a + b"), tests)
