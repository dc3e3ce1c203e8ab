"""Conversations to token ids and loss mask: our own format without jinja, any other through its chat template."""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nanodag.errors import SourceError
from nanodag.errors.words import listed, nearest
from nanodag.host.images import PLACEHOLDER, images_in, layout_of
from nanodag.tokenizer import bounds, layout
from nanodag.tokenizer.call_format import PROBED, CallFormat, call_format, declares_tools, own_format
from nanodag.tokenizer.encoding import Encoding
from nanodag.tokenizer.messages import folded, says_the_same, with_objects

Messages = Sequence[Mapping[str, Any]]
Rendered = tuple[np.ndarray, np.ndarray]
Switches = Mapping[str, bool | int | float | str]
Tools = Sequence[Mapping[str, Any]]
NO_SWITCHES: Switches = {}
WITHOUT_TOOLS = "Leave the data's column `tools` out by its source's options: {tools: false}."
SAID = "4711"  # stands in for an answer; no template writes it otherwise
# What transformers itself gives a template, beside special tokens.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}


def load_renderer(folder: Path) -> "ChatRenderer":
    """The renderer for the tokenizer of a folder: NativeRenderer when its chat template is ours."""
    encoding = Encoding(folder)
    template = encoding.settings.get("chat_template")
    saved_apart = folder / "chat_template.jinja"  # where transformers 5 puts it when it saves a tokenizer
    if template is None and saved_apart.is_file():
        template = saved_apart.read_text(encoding="utf-8")
    if template == layout.CHAT_TEMPLATE:
        return NativeRenderer(encoding)
    if template is None:
        raise SourceError(f"The tokenizer in {folder} has no chat template, so conversations cannot be rendered.")
    return TemplateRenderer(encoding)


def end_ids(folder: Path) -> tuple[int, ...]:
    """`ChatRenderer.stop_ids` of a folder; without a chat template those that end its documents."""
    try:
        return load_renderer(folder).stop_ids
    except SourceError:
        return Encoding(folder).end_ids


def check_switches(template: str, switches: Switches, where: Path) -> None:
    """Raise SourceError for a switch that a chat template does not look at: transformers would pass it by in silence.

    where: the model's folder, for the message.
    """
    taken = switches_of(template, where)
    for name in switches:
        if name not in taken:
            raise SourceError(
                f"The chat template of {where} has no switch {name!r}, which template_options names; it has "
                f"{listed(taken)}.{nearest(name, taken)}"
            )


def switches_of(template: str, where: Path) -> list[str]:
    """Names of the switches that a chat template looks at. Raises SourceError for one that cannot be read."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    # Markers of generation are a tag of transformers' own.
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        looked_at = meta.find_undeclared_variables(environment.parse(plain)) - environment.globals.keys() - _GIVEN
    except TemplateSyntaxError as error:
        raise SourceError(
            f"The chat template of {where} cannot be searched for the switches that template_options names: {error}. "
            "Leave template_options out."
        ) from error
    return sorted(name for name in looked_at if not name.endswith("_token"))


Piece = tuple[str | int, bool]  # a text or a special id, and whether it is trained
_MARKS = {  # around a turn, or a part of one
    "system": (layout.SYSTEM, layout.END),
    "user": (layout.USER, layout.END),
    "tool": (layout.TOOL_RESULT, layout.TOOL_RESULT_END),
    "tool_call": (layout.TOOL_CALL, layout.TOOL_CALL_END),
    "tool_result": (layout.TOOL_RESULT, layout.TOOL_RESULT_END),
}


class NativeRenderer:
    """Our format (layout.py). Special tokens are put in by id, so text that spells one stays text.

    switches: it has none, and raises SourceError for any. call_begin, call_end: ids around a tool call. tool_tokens:
    names of the tokens around calls and results, by id.
    """

    switches: Collection[str] = ()

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._ids = {token: encoding.token_id(token) for token in layout.SPECIAL_TOKENS}
        self.call_begin, self.call_end = self._ids[layout.TOOL_CALL], self._ids[layout.TOOL_CALL_END]
        names = (layout.TOOL_CALL, layout.TOOL_CALL_END, layout.TOOL_RESULT, layout.TOOL_RESULT_END)
        self.tool_tokens = {self._ids[name]: name for name in names}

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end what a model writes, its end of turn first. Sampler, evaluation and API stop at the same ones;
        a published model names them in generation_config.json."""
        return tuple(dict.fromkeys([self._ids[layout.END], *self._encoding.end_ids]))

    def render_batch(
        self,
        conversations: Sequence[Messages],
        switches: Sequence[Switches] | None = None,
        tools: Sequence[Tools] | None = None,
    ) -> list[Rendered]:
        """For each: ids (n,) int32, and mask (n,) bool, True where the token is one that the assistant says: that which
        ends its turn too, and no tool results; nowhere in a message with `train: False`. switches, tools: of each
        conversation. Raises SourceError for either, which this format has not."""
        if named := [name for options in switches or () for name in options]:
            raise SourceError(f"nanodag's own chat format has no switch {named[0]!r}; leave template_options out.")
        if any(tools or ()):
            raise SourceError(f"nanodag's own chat format declares no tools. {WITHOUT_TOOLS}")
        pieces = [self._pieces(messages) for messages in conversations]
        texts = [piece for conversation in pieces for piece, _ in conversation if isinstance(piece, str)]
        encoded = iter(self._encoding.encode_batch(texts))
        rendered = []
        for conversation in pieces:
            ids: list[int] = []
            mask: list[bool] = []
            for piece, trained in conversation:
                piece_ids = next(encoded) if isinstance(piece, str) else (piece,)
                ids.extend(piece_ids)
                mask.extend([trained] * len(piece_ids))
            rendered.append((np.array(ids, dtype=np.int32), np.array(mask, dtype=bool)))
        return rendered

    def prompt(self, messages: Messages, switches: Switches = NO_SWITCHES, *, tools: Tools = ()) -> list[int]:
        """Ids up to where the assistant speaks. tools: in OpenAI's form, declared by templates, not by our format."""
        ((ids, _),) = self.render_batch([messages], [switches])
        return [*ids.tolist(), self._ids[layout.ASSISTANT]]

    def opened(
        self, messages: Messages, switches: Switches = NO_SWITCHES, *, tools: Tools = (), continues_last: bool = False
    ) -> list[int]:
        """`prompt` of messages in OpenAI's form, with calls and their results (nanodag.tokenizer.messages).
        continues_last: up to where the last message ends, an assistant's, so that what follows continues it."""
        turns, is_open = folded(messages)
        if not (is_open or continues_last):
            return self.prompt(turns, switches)
        ((ids, _),) = self.render_batch([turns], [switches])
        return ids.tolist()[:-1]  # the answer goes on in the last turn, such as behind a call's result

    def following(
        self, messages: Messages, answered: int, sampled: Sequence[int], switches: Switches, *, tools: Tools
    ) -> list[int] | None:
        """Ids between sampled ones and where the assistant speaks again, in a conversation that continued.

        messages: in OpenAI's form; those before `answered` were the prompt, that one was sampled and gets its end if it
        was cut off. None where they are not rendered as they were: the template rewrites or drops what was said.
        """
        calls = messages[answered].get("tool_calls")
        is_call = bool(sampled) and sampled[-1] == self.call_end
        if is_call != bool(calls):
            return None  # whose answer this is read it otherwise
        # What follows depends on how the answer ended, not on what it said: another one stands for it.
        empty: dict[str, Any] = {"role": "assistant", "content": ""}
        if is_call:
            empty["tool_calls"] = [{"function": {"name": "", "arguments": ""}}]
        ids = self.opened([empty, *messages[answered + 1 :]], switches)
        prefix = [layout.BOS, layout.ASSISTANT, *([layout.TOOL_CALL, layout.TOOL_CALL_END] if is_call else [])]
        has_end = bool(sampled) and sampled[-1] in self.stop_ids
        return ids[len(prefix) + has_end :]

    def _pieces(self, messages: Messages) -> list[Piece]:
        pieces: list[Piece] = [(self._ids[layout.BOS], False)]
        has_calls = any("tool_calls" in message for message in messages)
        for message in folded(messages)[0] if has_calls else messages:
            role, content, trained = message["role"], message["content"], message.get("train", True)
            if role == "assistant":
                spoken = [(content, trained)] if isinstance(content, str) else self._spoken(content, trained)
                pieces += [(self._ids[layout.ASSISTANT], False), *spoken, (self._ids[layout.END], trained)]
            elif role in ("system", "user", "tool"):
                pieces += self._between_marks(role, content)
            else:
                raise SourceError(f"A message has the role {role!r}; roles are system, user, assistant and tool.")
        return pieces

    def _between_marks(self, kind: str, text: str, trained: bool = False) -> list[Piece]:
        if not isinstance(text, str):
            raise SourceError(f"nanodag's own chat format has no place for parts such as images in a {kind} message.")
        begin, end = _MARKS[kind]
        return [(piece, trained) for piece in (self._ids[begin], text, self._ids[end])]

    def _spoken(self, parts: Sequence[Mapping[str, Any]], trained: bool) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            text, is_learned = part["text"], part.get("train", trained)
            if part["type"] in ("tool_call", "tool_result"):
                pieces += self._between_marks(part["type"], text, is_learned and part["type"] == "tool_call")
            # Texts in a row are one text: a merge may span their seam.
            elif pieces and isinstance(pieces[-1][0], str) and pieces[-1][1] == is_learned:
                pieces[-1] = (pieces[-1][0] + text, is_learned)
            else:
                pieces.append((text, is_learned))
        return pieces


class TemplateRenderer:
    """Any Hugging Face tokenizer with a chat template; methods are those of NativeRenderer.

    switches: names of the template's switches, as `template_options` has them. Raises SourceError for one that it does
    not look at.

    Templates with generation markers give the mask themselves. For others (Qwen2.5's), two renderings are compared: the
    prompt for a turn, and the conversation with that turn. The text that the second adds is the assistant's, less white
    space behind its last special token. Raises SourceError when a template rewrites earlier turns, for tool parts that
    the template does not know, and for conversations that the template itself refuses.
    """

    def __init__(self, encoding: Encoding) -> None:
        from transformers import AutoTokenizer

        self._encoding, self._folder = encoding, (folder := encoding.folder)
        self._images = layout_of(folder)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.template = str(self._tokenizer.chat_template)
        self._marks = "{% generation %}" in self.template or "{%- generation" in self.template
        self._special_texts = sorted(self._tokenizer.all_special_tokens, key=len, reverse=True)
        special = {number: str(t) for number, t in self._tokenizer.added_tokens_decoder.items() if t.special}
        self._special_names = special
        self._specials = re.compile("|".join(map(re.escape, sorted(special.values(), key=len, reverse=True))) or "(?!)")

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": SAID}]
        try:
            text = self._text(turns, NO_SWITCHES, add_generation_prompt=False)
        except SourceError:  # a template for other conversations
            text = ""
        ending = self._specials.search(text.partition(SAID)[2])
        of_turn = None if ending is None else self._encoding.token_id(ending[0])
        ends = (of_turn, self._tokenizer.eos_token_id, *self._encoding.end_ids)
        return tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))

    def render_batch(
        self,
        conversations: Sequence[Messages],
        switches: Sequence[Switches] | None = None,
        tools: Sequence[Tools] | None = None,
    ) -> list[Rendered]:
        every = (message for messages in conversations for message in messages if not any(images_in([message])))
        if not all(isinstance(message["content"], str) for message in every) and not self._takes_parts:
            raise SourceError(
                f"A conversation has tool parts (tool_call, tool_result), and the chat template of {self._folder} has "
                "no place for them; it takes text alone. Leave out the option `tools` of the source's adapter, or "
                "write calls and results as text. The template of a tokenizer that nanodag trained has a place for "
                "them."
            )
        if any(tools or ()) and not self.takes_tools:
            raise SourceError(f"The chat template of {self._folder} declares no tools. {WITHOUT_TOOLS}")
        render, count = self._marked if self._marks else self._compared, len(conversations)
        of_each = zip(conversations, switches or [NO_SWITCHES] * count, tools or [()] * count, strict=True)
        return [render(messages, options, _declared(declared)) for messages, options, declared in of_each]

    def prompt(self, messages: Messages, switches: Switches = NO_SWITCHES, *, tools: Tools = ()) -> list[int]:
        text = self._text(messages, switches, add_generation_prompt=True, **_declared(tools))
        return self._with_images(self._ids_of(text), messages)[0]

    def opened(
        self, messages: Messages, switches: Switches = NO_SWITCHES, *, tools: Tools = (), continues_last: bool = False
    ) -> list[int]:
        conversation, how = with_objects(messages), {"continue_final_message": continues_last, **_declared(tools)}
        text = self._text(conversation, switches, add_generation_prompt=not continues_last, **how)
        return self._with_images(self._ids_of(text), conversation)[0]

    def _with_images(self, ids: Sequence[int], messages: Messages) -> tuple[list[int], list[int]]:
        """Ids with the runs of images in the places that the template gave them, and how often each id stands there.
        Raises SourceError for a model that takes none, and where a text spells such a place."""
        digests = list(images_in(messages))
        if self._images is None:
            if digests:
                raise SourceError(f"A message has an image, and {self._folder} has no processor of images.")
            return list(ids), [1] * len(ids)
        if not digests:  # a text that spells such a place is a text
            return list(ids), [1] * len(ids)
        place, bound = self._encoding.token_id(PLACEHOLDER), bounds.in_force.get()
        if (num_places := list(ids).count(place)) != len(digests):
            raise SourceError(
                f"The chat template of {self._folder} has {num_places} places for {len(digests)} images, or a message "
                f"spells {PLACEHOLDER}."
            )
        num_tokens, runs = 0, []
        for digest in digests:
            runs.append(self._images.ids_of(digest))
            num_tokens += len(runs[-1])
            if bound is not None:
                bound.check_tokens(num_tokens)
        in_order = iter(runs)
        pieces = [next(in_order) if token == place else [token] for token in ids]
        return [token for piece in pieces for token in piece], list(map(len, pieces))

    def _ids_of(self, text: str) -> list[int]:
        if (bound := bounds.in_force.get()) is not None:
            bound.check_texts([text], lambda part: len(self._tokenizer(part, add_special_tokens=False)["input_ids"]))
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    @cached_property
    def switches(self) -> Collection[str]:
        return switches_of(self.template, self._folder)

    def following(
        self, messages: Messages, answered: int, sampled: Sequence[int], switches: Switches, *, tools: Tools
    ) -> list[int] | None:
        conversation, declared = with_objects(messages), _declared(tools)
        before = self._text(conversation[:answered], switches, add_generation_prompt=True, **declared)
        whole = self._text(conversation, switches, add_generation_prompt=True, **declared)
        last = sampled[-1] if sampled and sampled[-1] in self._special_names else None
        words = list(sampled if last is None else sampled[:-1])
        reply = self._tokenizer.decode(words, clean_up_tokenization_spaces=False)
        # What was said ends at a special token, behind as many as it has itself.
        rest = whole[len(before) :]
        num_within = len(self._specials.findall(reply))
        end = next(islice(self._specials.finditer(rest), num_within, None), None)
        if end is None or not whole.startswith(before) or not says_the_same(reply, rest[: end.start()]):
            return None
        ids = self._tokenizer(rest[end.start() :], add_special_tokens=False)["input_ids"]
        end_id, *ids = self._with_images(ids, messages[answered + 1 :])[0]
        if last == end_id:
            return ids
        if last not in self.stop_ids:  # it was cut off
            return [end_id, *ids]
        alone = self._text(conversation[: answered + 1], switches, add_generation_prompt=False, **declared)
        return ids if alone.rstrip().endswith(end[0]) else None  # it ended with one where the template has another

    @cached_property
    def takes_tools(self) -> bool:
        """True when the template tells the model of the tools that are declared."""
        return declares_tools(self._probed)

    @cached_property
    def calls(self) -> CallFormat | None:
        """Format of the model's calls: as the tokenizer's response template says, else as its chat template does."""
        own = getattr(self._tokenizer, "response_template", None)
        if own is not None and "tool_calls" in own.get("fields", {}):
            return own_format(own, call_format(self._probed))
        return call_format(self._probed)

    def special_tokens_in(self, text: str) -> dict[int, str]:
        """The special tokens that a text spells, by id."""
        names = set(self._specials.findall(text))
        return {number: name for number, name in self._special_names.items() if name in names}

    def _probed(self, messages: Messages, is_open: bool) -> str:
        return self._text(messages, NO_SWITCHES, add_generation_prompt=is_open, tools=[PROBED])

    @cached_property
    def _takes_parts(self) -> bool:
        """True when the template renders parts as parts. Others fail, leave them out, or print Python's list."""
        content = [{"type": "text", "text": "one"}, {"type": "tool_call", "text": "two"}]
        try:
            text = self._text(
                [{"role": "user", "content": "zero"}, {"role": "assistant", "content": content}],
                NO_SWITCHES,
                add_generation_prompt=False,
            )
        except SourceError:
            return False
        return "one" in text and "two" in text and "'type'" not in text and '"type"' not in text

    def _text(self, messages: Messages, switches: Switches, *, add_generation_prompt: bool, **further: Any) -> str:
        return self._apply(messages, switches, tokenize=False, add_generation_prompt=add_generation_prompt, **further)

    def _apply(self, messages: Messages, switches: Switches, **how: Any) -> Any:
        from jinja2 import TemplateError

        if any(name not in self.switches for name in switches):
            check_switches(self.template, switches, self._folder)
        bound = bounds.in_force.get()
        try:
            with nullcontext() if bound is None else bound.of_template():
                return self._tokenizer.apply_chat_template(list(messages), **switches, **how)
        except SourceError:
            raise
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise SourceError(
                f"The chat template of {self._folder} cannot render a conversation of {roles}: {str(error)[:300]}. "
                "Take what it refuses out of the data, or begin at a model whose template has it."
            ) from error

    def _marked(self, messages: Messages, switches: Switches, declared: dict[str, Any]) -> Rendered:
        how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, **declared}
        rendered = self._apply(messages, switches, **how)
        ids, counts = self._with_images(rendered["input_ids"], messages)
        mask = np.repeat(np.array(rendered["assistant_masks"], dtype=bool), counts)
        if unlearned := [n for n, message in enumerate(_spoken_by(messages)) if message.get("train") is False]:
            starts, ends = (np.flatnonzero(np.diff(mask, prepend=0, append=0) == step) for step in (1, -1))
            if len(starts) != len(_spoken_by(messages)):
                raise SourceError(
                    f"The chat template of {self._folder} marks {len(starts)} stretches in a conversation with "
                    f"{len(_spoken_by(messages))} messages of the assistant, so `train: false` cannot be told apart."
                )
            for number in unlearned:
                mask[starts[number] : ends[number]] = False
        return np.array(ids, dtype=np.int32), mask

    def _compared(self, messages: Messages, switches: Switches, declared: dict[str, Any]) -> Rendered:
        whole = self._text(messages, switches, add_generation_prompt=False, **declared)
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("train") is False:
                continue
            before = self._text(messages[:turn], switches, add_generation_prompt=True, **declared)
            after = self._text(messages[: turn + 1], switches, add_generation_prompt=False, **declared)
            if not (whole.startswith(after) and after.startswith(before)):
                raise SourceError(
                    f"The chat template changes earlier turns when turn {turn} is added, so the assistant's tokens "
                    "cannot be told from the others. Give the template {% generation %} markers."
                )
            spans.append((len(before), self._end_of_speech(after)))
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(offsets), dtype=bool)
        for start, end in spans:
            mask |= (offsets[:, 0] >= start) & (offsets[:, 0] < end)
        ids, counts = self._with_images(encoded["input_ids"], messages)
        return np.array(ids, dtype=np.int32), np.repeat(mask, counts)

    def _end_of_speech(self, text: str) -> int:
        """End of the turn's last special token, or of the text when white space is not all that follows it."""
        stripped = text.rstrip()
        return len(stripped) if any(stripped.endswith(token) for token in self._special_texts) else len(text)


def _spoken_by(messages: Messages) -> list[Mapping[str, Any]]:
    return [message for message in messages if message["role"] == "assistant"]


def _declared(tools: Tools) -> dict[str, Any]:
    return {"tools": list(tools)} if tools else {}


ChatRenderer = NativeRenderer | TemplateRenderer
