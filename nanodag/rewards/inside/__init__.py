"""What runs in the sandbox when a program is tested: one side beside the program, the other beside its tests.

Each side has a sandbox of its own, and two pipes connect them. The tests' side holds what is wanted. The program's side
applies what it is asked to and answers with values. So a program that ends early, returns what equals everything or
writes a verdict gains nothing. Plain values (nanodag.rewards.inside.wire) go by value. Anything else stays where it was
made, and the other side holds a stand-in: `ProgramObject` for an object of the program, `Callback` for a function of
the tests.

A stand-in never meets a wanted value: compared or computed with anything but another stand-in it is unequal, or a
TypeError. Lists, dicts and sets that a call changed are changed on the tests' side too.

These modules are passed as text (`source`), so they import the standard library and one another only.
"""

from functools import cache
from pathlib import Path
from typing import Literal

_BEGIN = """
import sys, types
for name, text in {modules!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules[name].main()
"""


@cache
def source(side: Literal["program_side", "tests_side"]) -> str:
    """The program of one side's sandbox."""
    texts = {name: Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in ("wire", side)}
    return _BEGIN.format(modules={f"{__name__}.{name}": text for name, text in texts.items()})
