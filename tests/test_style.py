import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PROJECT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("command", [["ruff", "check", "--no-cache", "."], ["mypy", "--cache-dir", ".mypy_cache"]])
def test_ruff_and_mypy_have_nothing_to_say(command):
    """mypy: 18 CPU-seconds without its cache, one half with it."""
    program = Path(sys.prefix) / "bin" / command[0]
    found = subprocess.run([program, *command[1:]], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-cuda.txt"])
def test_constraints_name_no_place(name):
    for line in (PROJECT / name).read_text().splitlines():
        assert line.startswith("#") or (line.count("==") == 1 and "/" not in line), line
        assert "//" not in line and "@" not in line, line


def first_words(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            yield (ast.get_docstring(node) or "-").split()[0].rstrip(",.")


def test_a_docstring_begins_with_a_noun_or_a_verb():
    vague = {"What", "Of", "Those", "Who", "Whoever"}
    assert list(first_words('def f():\n    """What it is."""')) == ["-", "What"]
    files = [path for folder in ("nanodag", "flows", "tasks") for path in (PROJECT / folder).rglob("*.py")]
    assert not {str(path) for path in files if vague & {*first_words(path.read_text(encoding="utf-8"))}}


@pytest.mark.parametrize("file", sorted((PROJECT / "nanodag").rglob("__init__.py")), ids=lambda file: file.parent.name)
def test_files_that_a_package_names_are_there(file):
    """`name.py` anywhere in the docstring, and the names of a table of modules: `name   what it is`."""
    words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    named = {*re.findall(r"(?<![\w/])(\w+)\.py\b", words), *re.findall(r"^(\w+) {2,}\S", words, re.MULTILINE)}
    assert not {name for name in named if not (file.parent / f"{name}.py").exists()}


def never_run(tree: ast.Module) -> Iterator[str]:
    """What a test file defines or calls in vain: inner functions that nothing uses, coroutines that nobody awaits."""
    coroutines = {node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Name) and called.id in coroutines:
                yield f"line {node.lineno}: nobody awaits {called.id}"
        if isinstance(node, FUNCTIONS):
            for inner in inner_functions(node):
                own = set(ast.walk(inner))
                names = (found for found in ast.walk(node) if isinstance(found, ast.Name) and found not in own)
                if not inner.decorator_list and inner.name not in {name.id for name in names}:
                    yield f"line {inner.lineno}: nothing uses {inner.name}"


def inner_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of this very scope; methods of a class in it are called by whoever has an object."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield child
        elif not isinstance(child, ast.ClassDef | ast.Lambda):
            yield from inner_functions(child)


def test_no_test_defines_what_nothing_runs():
    found = [
        f"{path.relative_to(PROJECT)} {what}"
        for path in sorted((PROJECT / "tests").rglob("*.py"))
        for what in never_run(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def test_a(s):\n    async def run(client):\n        assert 0\n", ["line 2: nothing uses run"]),
        ("def test_a(s):\n    if s:\n        def check():\n            check()\n", ["line 3: nothing uses check"]),
        ("async def ask():\n    ...\n\ndef test_a():\n    ask()\n", ["line 5: nobody awaits ask"]),
        ("def test_a(s):\n    async def run(client):\n        assert 0\n    with_client(s, run)\n", []),
        ("def test_a(app):\n    @app.get('/')\n    def answer():\n        ...\n", []),
        ("def test_a():\n    class Fake:\n        def load(self):\n            ...\n    use(Fake())\n", []),
        ("async def ask():\n    ...\n\nasync def both():\n    await ask()\n", []),
    ],
)
def test_what_nothing_runs_is_found(source, found):
    assert list(never_run(ast.parse(source))) == found
