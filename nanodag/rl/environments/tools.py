"""A policy with one tool, in the words of its own chat format: a calculator, or a Python interpreter."""

import ast
import operator
import threading
from collections.abc import Awaitable, Callable, Mapping
from fractions import Fraction
from typing import Any

from nanodag.config.rl_parts import GenerateConfig
from nanodag.host.beside import table_beside
from nanodag.host.processor import usable_cores
from nanodag.host.threads import in_thread
from nanodag.registry import entry
from nanodag.rewards.sandbox import run_python
from nanodag.rl.environments.sample import Sample, TurnSampler
from nanodag.rl.environments.transcript import Conversation, arguments_of

CHARACTERS_A_TOKEN = 16  # more than nearly every token has: what is longer is cut before it is tokenised

# What a policy is told of the tool of an entry, by the entry's name: a tool with one text, in OpenAI's form.
TOOLS: Mapping[str, Mapping[str, Any]] = table_beside(__file__)


def declared_tools(generate: GenerateConfig) -> tuple[Mapping[str, Any], ...]:
    """The tools that a stage's prompts declare."""
    return (TOOLS[generate.name],) if generate.name in TOOLS else ()


async def with_tool(
    sampler: TurnSampler,
    sample: Sample,
    name: str,
    tool: Callable[[str], Awaitable[str]],
    *,
    max_calls: int,
    max_result_tokens: int,
) -> Sample:
    """Let the policy speak, answer each call that it makes, until it ends its speech.

    name: of the tool in TOOLS. tool: text of a call to text of its result; what it raises fails the sample. A result is
    cut to max_result_tokens tokens. A sample that makes more calls than max_calls, or whose results leave no room, ends
    as cut off, without those results. A call of a tool that there is not, or without its argument, is answered `error`.
    """
    conversation = Conversation(sampler, sample, [TOOLS[name]])
    (argument,) = TOOLS[name]["function"]["parameters"]["required"]
    messages, num_calls = list(sample.record["messages"]), 0

    async def result_of(call: Mapping[str, Any]) -> str:
        value = (arguments_of(call) or {}).get(argument)
        if call["function"]["name"] != name or not isinstance(value, str):
            return f"error: {name} takes {argument}, a text"
        result = (await tool(value))[: CHARACTERS_A_TOKEN * max_result_tokens]
        ids = sampler.encode(result)
        return result if len(ids) <= max_result_tokens else sampler.decode(ids[:max_result_tokens])

    while (message := await conversation.answer(messages)) is not None:
        calls = message.get("tool_calls", ())
        num_calls += len(calls)
        if not calls:
            return conversation.sample()
        if num_calls > max_calls:
            break
        messages.append(message)
        for call in calls:
            result = await result_of(call)
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})
    return conversation.sample(is_cut=True)


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
            base, exponent = _value(left), _value(right)
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if exponent.denominator != 1 or abs(exponent) * bits > MAX_BITS:
                raise ValueError("a power that is no fraction, or too large")
            return Fraction(base**exponent.numerator)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(Fraction(_BINARY[type(op)](_value(left), _value(right))))
    raise ValueError(f"{ast.dump(node)} is no arithmetic")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("too large")
    return value


# Programs that share a core would run into their time limits.
_RUNNING = threading.BoundedSemaphore(usable_cores())


@entry("generate", "python", needs_sandbox=True)
async def interpreter(
    sampler: TurnSampler, sample: Sample, *, max_calls: int = 4, seconds: float = 5.0, max_result_tokens: int = 256
) -> Sample:
    """A call is a program of its own, run in the sandbox (`nanodag.rewards.sandbox`) for at most `seconds`; its result
    is what it printed, or the last line of its error. Nothing is kept from one call to the next.

    A program that looks at the clock or draws random numbers makes a run that is not the same the second time.
    """

    async def run(program: str) -> str:
        return await in_thread(lambda: printed(program, seconds=seconds, longest=max_result_tokens))

    return await with_tool(sampler, sample, "python", run, max_calls=max_calls, max_result_tokens=max_result_tokens)


def printed(program: str, *, seconds: float, longest: int) -> str:
    """Output of a program in the sandbox, or the last line of its error behind at most `longest` characters of that.
    Blocks until a core is free and the program has ended."""
    with _RUNNING:
        done = run_python(program, timeout_s=seconds)
    if done.timed_out:
        return "error: it took too long"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"{done.stdout[:longest]}error: {lines[-1] if lines else 'it was ended'}"
    return done.stdout.rstrip("\n")
