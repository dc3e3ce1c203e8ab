"""What a policy said in a turn, as an environment hears it: its text, and the tools that it calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanodag.api.bodies import Tool
from nanodag.api.tool_format import Call, TemplateReader, argument_of, response_template
from nanodag.inference.protocol import Completion
from nanodag.rl.rollouts.turns.sample import TurnSampler
from nanodag.tokenizer.chat import NativeRenderer, TemplateRenderer

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Said:
    """text: without calls. calls: arguments as a JSON object, or what stands in the place of one, as `wrong` says."""

    text: str
    calls: tuple[Call, ...]

    def message(self, number: int) -> dict[str, Any]:
        """As the conversation has it. number: of the turn, for the calls' ids."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            ids = self.call_ids(number)
            message["tool_calls"] = [_as_message(*pair) for pair in zip(ids, self.calls, strict=True)]
        return message

    def call_ids(self, number: int) -> list[str]:
        """The ids of its calls."""
        return [f"call-{number}-{place}" for place in range(len(self.calls))]

    def wrong(self, tools: Tools) -> list[str]:
        """What is wrong with each call, empty where it is right; nothing where all are right."""
        names = [tool["function"]["name"] for tool in tools]
        found = [_wrong(call, names) for call in self.calls]
        return [f"error: {what or 'not called, as another call is wrong'}" for what in found] if any(found) else []

    def given(self) -> list[dict[str, Any]]:
        """The calls as an environment gets them; none of them is wrong."""
        return [{"name": call.name, "arguments": json.loads(call.arguments or "{}")} for call in self.calls]


def stop_ids(sampler: TurnSampler, tools: Tools) -> list[int]:
    """What ends a turn beside the end of speech. Raises ValueError for tools that this chat format has no place for."""
    renderer = sampler.renderer
    if not tools:
        return []
    if isinstance(renderer, NativeRenderer):
        if len(tools) > 1:
            raise ValueError(f"nanodag's own chat format has one tool, and the environment {len(tools)}")
        argument_of(Tool.model_validate(tools[0]))  # raises Refused for one that takes more than a text
        return [renderer.call_end]
    if response_template(renderer) is None or not (isinstance(renderer, TemplateRenderer) and renderer.takes_tools):
        raise ValueError("the chat template of this model knows no tools, or writes calls in a form that is not known")
    return []


def said(sampler: TurnSampler, completion: Completion, text: str, tools: Tools) -> Said:
    """What a completion says. text: of it, without special tokens. tools: those of `stop_ids`."""
    renderer = sampler.renderer
    if not tools:
        return Said(text, ())
    if isinstance(renderer, NativeRenderer):
        ids = list(completion.output_ids)
        called = renderer.tool_call(ids)
        if called is None:
            return Said(text, ())
        tool = Tool.model_validate(tools[0])
        arguments = json.dumps({argument_of(tool): called}, ensure_ascii=False)
        return Said(text.removesuffix(called), (Call(tool.function.name, arguments),))
    template = response_template(renderer)
    assert template is not None  # stop_ids has seen it
    reader = TemplateReader(template, "")
    content = reader.take(-1, text) + reader.end()
    return Said(content, tuple(reader.calls))


def _as_message(call_id: str, call: Call) -> dict[str, Any]:
    arguments = call.arguments
    try:
        json.loads(arguments or "{}")
    except ValueError:
        arguments = json.dumps(arguments)  # chat templates take JSON alone
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _wrong(call: Call, names: Sequence[str]) -> str:
    if call.name not in names:
        return f"there is no tool {call.name[:80]!r}; there is {', '.join(names)}"
    try:
        is_object = isinstance(json.loads(call.arguments or "{}"), dict)
    except ValueError:
        is_object = False
    return "" if is_object else "the arguments must be a JSON object"
