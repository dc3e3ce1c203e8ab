"""The loop of a policy that calls a tool, in the words of its own chat format."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nanodag.config.rl_entries import GenerateConfig
from nanodag.rl.environments.message_policy import Conversation, arguments_of
from nanodag.rl.environments.sample import Sample, TurnSampler

CHARACTERS_A_TOKEN = 16  # more than nearly every token has: what is longer is cut before it is tokenised


def _tool(name: str, words: str, argument: str, meaning: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string", "description": meaning}}}
    return {
        "type": "function",
        "function": {"name": name, "description": words, "parameters": {**schema, "required": [argument]}},
    }


# What a policy is told of the tool of an entry, by the entry's name.
TOOLS: Mapping[str, Mapping[str, Any]] = {
    "calculator": _tool("calculator", "Computes an expression exactly.", "expression", "such as (48 / 2) ** 2"),
    "python": _tool("python", "Runs a Python program and returns what it prints.", "code", "the program"),
}


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
        given = arguments_of(call).get(argument)
        if call["function"]["name"] != name or not isinstance(given, str):
            return f"error: {name} takes {argument}, a text"
        result = (await tool(given))[: CHARACTERS_A_TOKEN * max_result_tokens]
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
