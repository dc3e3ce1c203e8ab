"""The program in an answer: a function or a whole program, fenced or not, with prose around it or none."""

import ast
import re
import warnings

_FENCED = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.I
)
_BEGINS = re.compile(r"(?:async[ \t]+def|def|class|import|from)\b|@")
MAX_CUTS = 400  # lines that may stand behind a program without a fence


def program_of(answer: str, *, before: str = "", entry_point: str = "") -> str:
    """The program that an answer gives; empty where there is none that is Python.

    Of several fenced blocks it is the last that makes entry_point, else the last. A block that is not closed, as in an
    answer that was cut off, goes to the end. Without a fence the answer is taken whole, else from its first line of
    code to the last one with which it is Python. before: what stands in front of it, as in HumanEval. An answer that
    makes entry_point itself goes below it, any other one goes on where it ends.
    """
    blocks = _FENCED.findall(answer)
    if blocks:
        making = [block for block in blocks if _makes(block, entry_point)]
        return _joined(before, (making or blocks)[-1], entry_point)
    return _joined(before, answer, entry_point) or _joined(before, _code_in_prose(answer), entry_point)


def is_python(text: str) -> bool:
    """Whether a text is a program, and not an empty one."""
    tree = _tree(text)
    return tree is not None and bool(tree.body)


def _joined(before: str, text: str, entry_point: str) -> str:
    """One program, empty where it is not Python. An empty text is no program."""
    joined = f"{before}\n{text}" if before and _makes(text, entry_point) else before + text
    return joined if text.strip() and is_python(joined) else ""


def _makes(text: str, name: str) -> bool:
    """Whether a program makes a function, class or variable of that name."""
    tree = _tree(text) if name else None
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return True
    return False


def _code_in_prose(answer: str) -> str:
    lines = answer.splitlines(keepends=True)
    start = next((number for number, line in enumerate(lines) if _BEGINS.match(line)), None)
    if start is None:
        return ""
    for end in range(len(lines), max(start, len(lines) - MAX_CUTS), -1):
        # A program does not end in a line of prose, and most ends are found without parsing.
        if lines[end - 1].strip() and _tree(text := "".join(lines[start:end])):
            return text
    return ""


def _tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes
            compile(text, "<answer>", "exec", dont_inherit=True)  # finds a `return` outside of a function, too
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # ValueError: a null byte
        return None
