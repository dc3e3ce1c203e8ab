"""HumanEval and MBPP themselves: their own solutions pass, solutions with a changed body fail."""

import ast
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import pytest

from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.rewards.code import judge

MUTANTS = 3
OPERATORS = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mirror(folder: str) -> Path:
    found = Path(os.environ.get("NANODAG_MIRROR", "/nowhere"))
    if not (found / folder).exists():
        pytest.skip(f"not run: NANODAG_MIRROR has no {folder}, whose data come from the hub alone")
    return found


def prompts_of(url: str, folder: str) -> list:
    source = SourceConfig(url=url)
    drawing = Mixture([source], kind="prompt", seed=0, once=True, shuffle=False, mirror=mirror(folder))
    return [drawn.record for drawn in drawing]


def mutants(program: str, name: str) -> list[tuple[str, str]]:
    """What was changed, and the program: one operator, number or returned value of the function each, the first MUTANTS
    and the last."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes
        tree = ast.parse(program)
    found = []
    nodes = [node for top in tree.body if getattr(top, "name", "") == name for node in ast.walk(top)]
    for number, node in enumerate(nodes):
        changed = deepcopy(tree)
        twins = [n for top in changed.body if getattr(top, "name", "") == name for n in ast.walk(top)]
        twin = twins[number]
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
            twin.ops[0] = OPERATORS[type(node.ops[0])]()
        elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OPERATORS:
            twin.op = OPERATORS[type(node.op)]()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            twin.value = node.value + 1
        elif isinstance(node, ast.Return) and node.value is not None:
            twin.value = ast.Constant(None)
        else:
            continue
        found.append((f"{ast.unparse(node)} -> {ast.unparse(twin)}", ast.unparse(changed)))
    return [*found[:MUTANTS], *found[MUTANTS:][-1:]]


def passed(samples: list) -> list[bool]:
    with ThreadPoolExecutor(2) as pool:
        return [verdict.passed for verdict in pool.map(lambda sample: judge(*sample), samples)]


def check(prompts: list) -> None:
    whole = [prompt["metadata"].get("before", "") + prompt["answer"] for prompt in prompts]
    assert [n for n, ok in enumerate(passed(list(zip(prompts, whole, strict=True)))) if not ok] == []
    made = [
        (number, *mutant)
        for number, (prompt, program) in enumerate(zip(prompts, whole, strict=True))
        for mutant in mutants(program, prompt["metadata"]["entry_point"])
    ]
    verdicts = passed([(prompts[number], mutant) for number, _, mutant in made])
    survived = [(number, what) for (number, what, _), ok in zip(made, verdicts, strict=True) if ok]
    failed = {number for (number, *_), ok in zip(made, verdicts, strict=True) if not ok}
    print(f"{len(made)} mutants, {len(survived)} pass:", *(f"{number}: {what}" for number, what in survived), sep="\n")
    assert sorted(set(range(len(prompts))) - failed) == []


@pytest.mark.slow
def test_humanevals_164_solutions_pass_and_a_changed_body_of_each_fails():
    prompts = prompts_of("hub:openai/openai_humaneval/openai_humaneval:test", "openai/openai_humaneval")
    assert len(prompts) == 164
    check(prompts)


@pytest.mark.slow
def test_mbpps_500_solutions_pass_and_a_changed_body_of_each_fails():
    prompts = prompts_of("hub:google-research-datasets/mbpp/full:test", "google-research-datasets/mbpp")
    assert len(prompts) == 500
    check(prompts)
