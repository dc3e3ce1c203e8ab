"""A policy with a calculator."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from nanodag.registry import entry
from nanodag.rl.environments.sample import Sample, TurnSampler
from nanodag.rl.environments.tools import with_tool

LONGEST_EXPRESSION = 200
MAX_BITS = 512
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@entry("generate", "calculator")
async def calculator(sampler: TurnSampler, sample: Sample, *, max_calls: int = 8) -> Sample:
    """Calls such as `48/2` are answered `24`, and what is no sum `error`: as in nanodag's GSM8K conversations with
    tools (`nanodag.data.adapter_entries`), on which a policy learns to call it."""

    async def run(expression: str) -> str:
        return calculated(expression)

    return await with_tool(sampler, sample, "calculator", run, max_calls=max_calls, max_result_tokens=64)


def calculated(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ** and brackets, exactly where it has at most 6 decimals;
    `error` for anything else, or a number of more than 512 bits."""
    try:
        if len(expression) > LONGEST_EXPRESSION:
            return "error"
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return "error"
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(Fraction(_BINARY[type(op)](_value(left), _value(right))))
    raise ValueError(f"{ast.dump(node)} is no arithmetic")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * bits > MAX_BITS:
        raise ValueError("a power that is no fraction, or too large")
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("too large")
    return value
