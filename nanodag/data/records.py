"""The six canonical records that adapters make from rows, and what is read off them.

document:      {"text": str}
conversation:  {"messages": [{"role", "content"}, ...]}; roles system, user, assistant, tool. Content is a string, or
               for the assistant a list of parts {"type": "text" | "tool_call" | "tool_result", "text": str}, for a user
               of {"type": "text", "text"} and {"type": "image", "image": digest}. A message
               may have `tool_calls` in OpenAI's form, arguments as objects, and `train: False`, which takes its loss
               away. "tools": functions that are declared, in OpenAI's form; may be missing.
prompt:        {"prompt_id": str, "messages": [...], "answer": str, "reward": str, "metadata": dict}; for RL.
preference:    {"messages": [...], "chosen": [...], "rejected": [...], "margin": float}: a prompt, two answers to it,
               a list of messages each that begins with the assistant's; an empty one is dropped later. margin may be
               missing: how much better the chosen one is.
judgement:     the same, in which one of the answers may be missing: the other is good by itself, or bad.
stepwise:      {"messages": [...], "steps": [str, ...], "labels": [float, ...]}: a prompt, the steps of an answer, and
               how right each is, from 0 to 1.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from nanodag.errors import SourceError
from nanodag.errors.words import listed
from nanodag.host.images import images_in

Kind = Literal["document", "conversation", "prompt", "preference", "judgement", "stepwise"]
Wanted = Kind | Literal["chat"]  # chat: conversations, and documents of sources that have no others
KINDS: tuple[Kind, ...] = get_args(Kind)
ROLES = ("system", "user", "assistant", "tool")
PART_TYPES = ("text", "tool_call", "tool_result")


def check_record(record: Mapping[str, Any], kind: Kind) -> None:
    """Raise SourceError when a record does not have the shape that its kind promises."""
    if kind == "document":
        if not isinstance(record.get("text"), str):
            raise SourceError(f"A document needs a string `text`; found {record.get('text')!r:.80}.")
        return
    messages = record.get("messages")
    if not isinstance(messages, list | tuple) or not messages:
        raise SourceError(f"A {kind} needs a non-empty list `messages`; found {messages!r:.80}.")
    for message in messages:
        _check_message(message)
    if kind == "prompt":
        missing = [name for name in ("answer", "reward", "metadata") if name not in record]
        if missing:
            raise SourceError(f"A prompt needs {listed(missing)} beside its messages; found {listed(sorted(record))}.")
        if messages[-1]["role"] == "assistant":
            raise SourceError("A prompt ends before the assistant speaks; its last message is the assistant's.")
    if kind == "stepwise":
        steps, labels = record["steps"], record["labels"]
        are_texts = bool(steps) and all(isinstance(step, str) and step.strip() for step in steps)
        if not are_texts or len(labels) != len(steps) or not all(0 <= label <= 1 for label in labels):
            said = f"found {steps!r:.80} and {labels!r:.80}"
            raise SourceError(f"An answer needs steps, none blank, and for each a label from 0 to 1; {said}.")
    if kind in ("preference", "judgement"):
        judged = [name for name in ("chosen", "rejected") if name in record]
        if len(judged) < (2 if kind == "preference" else 1):
            raise SourceError(
                f"A {kind} needs answers `chosen` {'and' if kind == 'preference' else 'or'} `rejected`; found "
                f"{listed(judged) or 'neither'}. One answer alone is for kind preference with loss: kto"
            )
        for name in judged:
            answer = record[name]
            if not isinstance(answer, list | tuple):
                raise SourceError(f"A {kind} needs a list {name!r} of messages; found {answer!r:.80}.")
            for message in answer:
                _check_message(message)
            if answer and answer[0]["role"] != "assistant":
                raise SourceError(
                    f"An answer of a {kind} begins with the assistant; {name} begins with {answer[0]['role']}."
                )


def _check_message(message: Any) -> None:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise SourceError(f"A message is {{role, content}}; found {message!r:.80}.")
    if message["role"] not in ROLES:
        raise SourceError(f"A message has the role {message['role']!r}; roles are {', '.join(ROLES)}.")
    content = message["content"]
    if isinstance(content, str):
        return
    if message["role"] not in ("user", "assistant") or not isinstance(content, list | tuple):
        raise SourceError(f"The content of a {message['role']} message must be a string; found {content!r:.80}.")
    is_spoken = message["role"] == "assistant"
    types = PART_TYPES if is_spoken else ("text", "image")
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
    if not is_spoken and "image" not in kinds:
        raise SourceError(f"Without an image a {message['role']} message must be a string; found {content!r:.80}.")
    for part, kind in zip(content, kinds, strict=True):
        if kind not in types or not isinstance(part.get("image" if kind == "image" else "text"), str):
            raise SourceError(
                f"A part of the {message['role']} is {{type: {' | '.join(types)}, ...}}; found {part!r:.80}."
            )


def message_text(message: Mapping[str, Any]) -> str:
    """The text of one message, its parts and calls joined. Raises SourceError for one with an image."""
    refuse_images([message])
    return _spelled(message)


def refuse_images(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise SourceError for images in messages, for what reads text alone."""
    if next(images_in(messages), None) is not None:
        raise SourceError("A message has an image, and text alone is read here.")


def _spelled(message: Mapping[str, Any]) -> str:
    """The text of one message with the digests of its images."""
    content = message["content"]
    text = (
        content
        if isinstance(content, str)
        else "".join(part["text" if "text" in part else "image"] for part in content)
    )
    return text + "".join(json.dumps(call["function"]) for call in message.get("tool_calls", ()))


def record_texts(record: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a record in order: its document, or message by message, of a preference both answers too."""
    if "text" in record:
        yield record["text"]
    else:
        for name in ("messages", "chosen", "rejected"):
            yield from map(_spelled, record.get(name, ()))
        yield from record.get("steps", ())


def record_bytes(record: Mapping[str, Any]) -> int:
    """UTF-8 bytes of a record's texts: the unit of weights in a mixture."""
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in record_texts(record))


def held_out_score(record: Mapping[str, Any], by: Literal["content", "prompt"]) -> float:
    """A number in [0, 1) that depends only on the record's text; below the held-out fraction means held out.

    by="prompt" takes the messages before the first answer only; for a document both are its text. Prompt ids, answers
    and metadata never count, so one problem has one score in supervised data and in RL prompts.
    """
    digest = hashlib.blake2b(digest_size=8)
    if "text" in record:
        digest.update(record["text"].encode("utf-8", "surrogatepass"))
    else:
        for message in record["messages"]:
            if by == "prompt" and message["role"] == "assistant":
                break
            digest.update(f"{message['role']}\n{_spelled(message)}\0".encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "big") / 2**64
