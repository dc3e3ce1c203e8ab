"""From OpenAI's messages and tools to the ids that an engine continues."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nanodag.api.bodies import ChatBody, NamedTool, Tool
from nanodag.api.refusals import Refused
from nanodag.api.served_model import ServedModel
from nanodag.api.tool_format import Reader, argument_of, knows_calls, reader_of
from nanodag.errors import SourceError
from nanodag.tokenizer.bounds import TooManyTokens
from nanodag.tokenizer.chat import ChatRenderer, NativeRenderer, Switches, TemplateRenderer


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """ids: of all messages, up to where the answer begins. stop_ids: what ends it. reader: makes what reads it.
    warnings: fields that were taken and have no effect."""

    ids: list[int]
    stop_ids: tuple[int, ...]
    reader: Callable[[], Reader]
    warnings: tuple[str, ...] = ()


Opened = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], list[int]]
"""opened(messages, tools): the ids that an answer continues."""
Ids = Callable[[], list[int]]


def chat_prompt(model: ServedModel, body: ChatBody, opened: Opened | None = None) -> ChatPrompt:
    """The prompt of a conversation. opened: where the ids are not those of the chat template alone. Raises Refused for
    what this model's format has no place for."""
    tools, renderer = offered(body), model.renderer
    if renderer is None:
        raise Refused(f"{model.name} has no chat template: ask it by /v1/completions", param="model")
    _check_continuation(body)
    try:
        switches, warnings = _switches(renderer if opened is None else None, body)

        def ids() -> list[int]:
            messages = [message.model_dump() for message in body.messages]
            declared = [tool.model_dump(exclude_unset=True) for tool in tools]
            if opened is not None:
                return opened(messages, declared)
            return renderer.opened(messages, switches, tools=declared, continues_last=body.continue_final_message)

        if isinstance(renderer, NativeRenderer):
            made = _native(renderer, body, tools, ids)
        else:
            assert isinstance(renderer, TemplateRenderer)
            made = _by_template(model, renderer, body, tools, ids)
        return replace(made, warnings=warnings)
    except TooManyTokens:
        raise
    except SourceError as error:
        raise Refused(str(error), param="messages") from error


def _switches(renderer: ChatRenderer | None, body: ChatBody) -> tuple[Switches, tuple[str, ...]]:
    """The request's switches that the chat template looks at, and a warning for each other one. renderer: None where
    none can be set."""
    switches: Switches = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    switches = {**switches, **body.chat_template_kwargs}
    known = renderer.switches if renderer is not None and switches else ()
    unknown = [name for name in switches if name not in known]
    warnings = [f"{name[:80]!r} has no effect: this model's chat template does not look at it" for name in unknown]
    return {name: value for name, value in switches.items() if name in known}, tuple(warnings)


def _check_continuation(body: ChatBody) -> None:
    """Raises Refused for a message that cannot be continued, and a conversation that would not be answered."""
    if body.add_generation_prompt is not None and body.add_generation_prompt == body.continue_final_message:
        raise Refused(
            "continue_final_message goes with add_generation_prompt: false, which goes with nothing else",
            param="add_generation_prompt",
        )
    last = body.messages[-1]
    if body.continue_final_message and (last.role != "assistant" or last.tool_calls):
        raise Refused(
            f"continue_final_message continues an assistant's text; the last message is of the role {last.role!r}"
            + (" and has tool_calls" if last.tool_calls else ""),
            param="continue_final_message",
        )


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
    """True when the answer has to be a call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def _native(renderer: NativeRenderer, body: ChatBody, tools: Sequence[Tool], ids_of: Ids) -> ChatPrompt:
    if len(tools) > 1:
        names = ", ".join(tool.function.name for tool in tools)[:200]
        raise Refused(
            f"A call in this model's chat format does not name its tool, so one may be offered at a time; found "
            f"{names}. Give one, or name it in tool_choice.",
            param="tools",
        )
    ids = ids_of()
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
    model: ServedModel, renderer: TemplateRenderer, body: ChatBody, tools: Sequence[Tool], ids_of: Ids
) -> ChatPrompt:
    if tools and not knows_calls(renderer):
        raise Refused(
            f"The chat template of {model.name} "
            + ("writes tool calls in a form that is not known here" if renderer.takes_tools else "knows no tools")
            + ": leave tools out",
            param="tools",
        )
    ids = ids_of()
    forced, calls = "", renderer.calls
    if tools and is_forced(body):  # its beginning is put into the prompt: then any engine writes a call
        if calls is None or not calls.opening:
            raise Refused(
                "this model's format of tool calls cannot be forced: set tool_choice to auto", param="tool_choice"
            )
        forced = calls.opening + (f"{tools[0].function.name}{calls.middle}" if len(tools) == 1 else "")
        ids += model.tokens.prompt_ids(forced, special=False)
    return ChatPrompt(ids=ids, stop_ids=renderer.stop_ids, reader=partial(reader_of, renderer, tools, forced=forced))
