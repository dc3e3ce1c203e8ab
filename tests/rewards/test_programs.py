"""The program in an answer."""

import pytest

from nanodag.rewards.code import program_of

SIGNATURE = 'import math\n\n\ndef root(x):\n    """The root of x."""\n'
BODY = "    return math.sqrt(x)\n"
FUNCTION = "def root(x):\n    return x ** 0.5\n"


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        (f"Sure!\n```python\n{FUNCTION}```\nIt takes the root.", FUNCTION),
        (f"```\n{FUNCTION}```", FUNCTION), (f"```Python3\n{FUNCTION}```", FUNCTION),
        (f"```py\r\n{FUNCTION}", FUNCTION),  # cut off, or never closed
        (f"```python\n{FUNCTION}```\nUse it so:\n```python\nprint(root(4))\n```", FUNCTION),
        (f"First try:\n```python\ndef root(x): pass\n```\nBetter:\n```python\n{FUNCTION}```", FUNCTION),
        ("```python\nroot = lambda x: x ** 0.5\n```", "root = lambda x: x ** 0.5\n"),
        (FUNCTION, FUNCTION),
        (f"Here it is:\n\n{FUNCTION}\nThis takes the root, as you asked.", FUNCTION),
        ("I cannot do that.", ""), ("```python\ndef root(x:\n```", ""), ("```python\n```", ""), ("\0", ""), ("", ""),
    ],
)  # fmt: skip
def test_a_program_is_found_with_and_without_fences_and_prose(answer, program):
    assert program_of(answer, entry_point="root") == program


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        (BODY, SIGNATURE + BODY),
        (f"```python\n{BODY}```", SIGNATURE + BODY),
        (f"```python\n{FUNCTION}```", f"{SIGNATURE}\n{FUNCTION}"),
        (f"```python\n{SIGNATURE}{BODY}```", f"{SIGNATURE}\n{SIGNATURE}{BODY}"),
        (f"{BODY}\n\ndef other():\n    pass", f"{SIGNATURE}{BODY}\n\ndef other():\n    pass"),
        ("return", ""),
    ],
)
def test_a_body_goes_on_where_the_signature_ends_and_a_function_stands_below_it(answer, program):
    assert program_of(answer, before=SIGNATURE, entry_point="root") == program
