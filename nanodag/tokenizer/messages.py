"""Conversations as OpenAI's API has them, and what chat templates and nanodag's own format make of them."""

import json
from collections.abc import Mapping, Sequence
from json import JSONDecoder
from typing import Any

from nanodag.errors import SourceError
from nanodag.host.images import WORDS, is_digest, keep_url
from nanodag.tokenizer import bounds

_KEPT = ("tool_call_id", "reasoning_content", "name")


def all_plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each as `plain` makes it; an error says which one it is of."""
    if (bound := bounds.in_force.get()) is not None:  # before one is read, which takes longer than a token
        parts = [
            part for message in messages if isinstance(message.get("content"), list) for part in message["content"]
        ]
        bound.check_tokens(WORDS * sum(part.get("type") in ("image", "image_url") for part in parts))
    return [plain(message, place=f"messages.{number}.content") for number, message in enumerate(messages)]


def plain(message: Mapping[str, Any], *, place: str = "a message") -> dict[str, Any]:
    """A message in one form: content is a text, or with images a list of parts; what is empty is left out, `developer`
    is `system`; a call's arguments stay as they are, JSON or an object. Images are kept by digest. Raises SourceError
    for content that is neither text nor images."""
    role = "system" if message["role"] == "developer" else message["role"]
    fields: dict[str, Any] = {"role": role, "content": _content(message.get("content"), place)}
    if calls := message.get("tool_calls"):
        fields["tool_calls"] = [dict(call) for call in calls]
    fields |= {"train": False} if message.get("train") is False else {}
    return fields | {name: message[name] for name in _KEPT if message.get(name) and isinstance(message[name], str)}


def meant(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Meaning of a message: equal for two that say the same. Identities of calls, which a client may leave out or give
    anew, are not compared, nor reasoning, which most clients drop."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    called = tuple((call["name"], _spelled(_given(call["arguments"]))) for call in calls)
    return message["role"], json.dumps(_content(message.get("content"), "a message")), called


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as chat templates take them, calls' arguments as objects. Raises SourceError for what is no JSON."""
    template_messages = all_plain(messages)
    for number, message in enumerate(template_messages):
        if "tool_calls" in message:
            message["tool_calls"] = [_with_object(call, number) for call in message["tool_calls"]]
    return template_messages


def folded(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """The messages in nanodag's format, where a call, its result and what follows are parts of one turn; and whether
    the last turn is one that goes on. Where a message has `train: False`, each of an assistant's parts says whether it
    is learned, and each turn whether its end is. Raises SourceError for a result without a call."""
    turns: list[dict[str, Any]] = []
    is_masked = any(message.get("train") is False for message in messages)
    is_open = False  # whether the last turn is an assistant's that called
    for number, message in enumerate(all_plain(messages)):
        role, text, calls = message["role"], message["content"], message.get("tool_calls", ())
        if role == "tool":
            if not is_open:
                raise SourceError(f"messages.{number} is a tool's result, and no call stands before it")
            turns[-1]["content"].append({"type": "tool_result", "text": text})
        elif role == "assistant":
            own = {"train": message.get("train", True)} if is_masked else {}
            parts = [{"type": "text", "text": text, **own}] if text else []
            parts += [{"type": "tool_call", "text": _argument(call["function"]["arguments"]), **own} for call in calls]
            if is_open:
                turns[-1] |= {"content": turns[-1]["content"] + parts, **own}
            else:
                turns.append({"role": "assistant", "content": parts or text, **own})
            is_open = bool(calls)
            if not is_open and isinstance(turns[-1]["content"], list) and len(turns[-1]["content"]) == 1:
                turns[-1]["content"] = text
        else:
            turns.append({"role": role, "content": text})
            is_open = False
    return turns, is_open and messages[-1]["role"] == "tool"


def says_the_same(one: str, other: str) -> bool:
    """True when two texts are equal but for white space, the spelling of JSON objects, and bytes that are no text."""
    return one == other or _bare(one) == _bare(other)


def _content(content: Any, place: str) -> str | list[dict[str, str]]:
    """The text, or where there are images parts {type: text, text} and {type: image, image: digest}."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part, place) for part in content]
    has_images = any(part["type"] == "image" for part in parts)
    return parts if has_images else "".join(part["text"] for part in parts)


def _part(part: Mapping[str, Any], place: str) -> dict[str, str]:
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image" and isinstance(image := part.get("image"), str):
        return {"type": "image", "image": image if is_digest(image) else keep_url(image, place)}
    if (bound := bounds.in_force.get()) is not None:
        bound.check_tokens(0)  # that somebody still waits
    url = part.get("image_url")
    if kind == "image_url" and isinstance(url := url.get("url") if isinstance(url, Mapping) else url, str):
        return {"type": "image", "image": keep_url(url, place)}
    raise SourceError(f"{place} has a part of the type {str(kind)[:80]!r}; only text and images are read")


def _with_object(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
            json.dumps(arguments, ensure_ascii=False).encode()  # fails at half of a surrogate pair, which has no tokens
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"messages.{number}.tool_calls: the arguments of {function['name'][:80]!r} are not JSON: {error}"
            ) from error
    named = {"id": call.get("id", ""), "type": "function"}
    return {**named, "function": {"name": function["name"], "arguments": arguments}}


def _given(arguments: Any) -> Any:
    """Arguments as they are meant: what JSON says, else the text itself."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _argument(arguments: Any) -> str:
    """The text of a call, from its arguments: the one value that is there, else all as it stands."""
    parsed_arguments = _given(arguments)
    values = list(parsed_arguments.values()) if isinstance(parsed_arguments, Mapping) else []
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _bare(text: str) -> str:
    decoder, pieces, place = JSONDecoder(), [], 0
    while (brace := text.find("{", place)) >= 0:
        pieces.append(text[place:brace])
        try:
            value, place = decoder.raw_decode(text, brace)
            pieces.append(_spelled(value))
        except (ValueError, RecursionError):
            pieces.append("{")
            place = brace + 1
    pieces.append(text[place:])
    return "".join("".join(pieces).replace("\ufffd", "").split())
