"""From OpenAI's messages and tools to the ids that an engine continues."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanodag.api.bodies import ChatBody, NamedTool, Tool
from nanodag.api.refusals import Refused
from nanodag.api.served_model import ServedModel
from nanodag.api.tool_format import Reader, argument_of, knows_calls, reader_of
from nanodag.errors import SourceError
from nanodag.tokenizer.bounds import TooManyTokens
from nanodag.tokenizer.call_format import CallFormat
from nanodag.tokenizer.chat import ChatRenderer, NativeRenderer, TemplateRenderer


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """ids: of all messages, up to where the answer begins. stop_ids: what ends it. reader: makes what reads it."""

    ids: list[int]
    stop_ids: tuple[int, ...]
    reader: Callable[[], Reader]


Opened = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], list[int]]
"""opened(messages, tools): the ids that an answer continues."""


def chat_prompt(model: ServedModel, body: ChatBody, opened: Opened | None = None) -> ChatPrompt:
    """The prompt of a conversation. opened: where the ids are not those of the chat template alone. Raises Refused for
    what this model's format has no place for."""
    tools = offered(body)
    if model.renderer is None:
        raise Refused(f"{model.name} has no chat template: ask it by /v1/completions", param="model")
    try:
        if opened is None:
            opened = partial(_opened, model.renderer, body)
        if isinstance(model.renderer, NativeRenderer):
            return _native(model.renderer, body, tools, opened)
        assert isinstance(model.renderer, TemplateRenderer)
        return _by_template(model, model.renderer, body, tools, opened)
    except TooManyTokens:
        raise
    except SourceError as error:
        raise Refused(str(error), param="messages") from error


def _opened(
    renderer: ChatRenderer, body: ChatBody, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    return renderer.opened(messages, body.chat_template_kwargs, tools=tools)


def messages_of(body: ChatBody) -> list[dict[str, Any]]:
    """The conversation as it is rendered. Raises Refused for a part that is no text."""
    return [
        {**message.model_dump(), "content": message.text(f"messages.{number}")}
        for number, message in enumerate(body.messages)
    ]


def offered(body: ChatBody) -> list[Tool]:
    """The tools that the answer may call. Raises Refused for a choice that names none of them."""
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        named = [tool for tool in body.tools if tool.function.name == choice.function.name]
        if not named:
            raise Refused(
                f"tool_choice names {choice.function.name[:80]!r}, which is not in tools", param="tool_choice"
            )
        return named[:1]
    if choice == "required" and not body.tools:
        raise Refused("tool_choice is required, and there are no tools", param="tool_choice")
    return [] if choice == "none" else list(body.tools)


def is_forced(body: ChatBody) -> bool:
    """Whether the answer has to be a call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def _native(renderer: NativeRenderer, body: ChatBody, tools: Sequence[Tool], opened: Opened) -> ChatPrompt:
    if len(tools) > 1:
        names = ", ".join(tool.function.name for tool in tools)[:200]
        raise Refused(
            f"A call in this model's chat format does not name its tool, so one may be offered at a time; found "
            f"{names}. Give one, or name it in tool_choice.",
            param="tools",
        )
    ids = opened(messages_of(body), _declared(tools))
    if not tools:
        return ChatPrompt(ids=ids, stop_ids=renderer.stop_ids, reader=partial(reader_of, renderer, tools))
    argument_of(tools[0])  # refuses what a call cannot be for
    forced = is_forced(body)
    return ChatPrompt(
        ids=[*ids, renderer.call_begin] if forced else ids,
        stop_ids=(*renderer.stop_ids, renderer.call_end),
        reader=partial(reader_of, renderer, tools, is_open=forced),
    )


def _by_template(
    model: ServedModel, renderer: TemplateRenderer, body: ChatBody, tools: Sequence[Tool], opened: Opened
) -> ChatPrompt:
    if tools and not knows_calls(renderer):
        raise Refused(
            f"The chat template of {model.name} "
            + ("writes tool calls in a form that is not known here" if renderer.takes_tools else "knows no tools")
            + ": leave tools out",
            param="tools",
        )
    ids = opened(messages_of(body), _declared(tools))
    forced = _beginning(renderer.calls, tools) if tools and is_forced(body) else ""
    if forced:
        ids += model.tokens.prompt_ids(forced, special=False)
    return ChatPrompt(ids=ids, stop_ids=renderer.stop_ids, reader=partial(reader_of, renderer, tools, forced=forced))


def _declared(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def _beginning(calls: CallFormat | None, tools: Sequence[Tool]) -> str:
    """How an answer begins that has to be a call: then any engine writes one. Raises Refused for a format in which that
    cannot be said beforehand."""
    if calls is None or not calls.opening:
        raise Refused(
            "this model's format of tool calls cannot be forced: set tool_choice to auto", param="tool_choice"
        )
    return calls.opening + (f"{tools[0].function.name}{calls.middle}" if len(tools) == 1 else "")
