"""View of each sample, on the page and in a terminal: its sequences, turn by turn, with a colour for each token.
Nothing that a model or an environment wrote may make the page large, look like a part of it, or move a cursor."""

import codecs
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
from rich.text import Text

from nanodag.errors import SourceError
from nanodag.host.images import digests_in
from nanodag.report.page import environment_of
from nanodag.report.words import legible, shortened
from nanodag.rl.rollouts.metrics import said_metrics
from nanodag.rl.rollouts.readable_rollout import Speech, calls_in, turns_of
from nanodag.rl.rollouts.rollout import ANSWER, FAILED, LAST_WORDS, REASON, Rollout, flatten_response
from nanodag.rl.rollouts.rollout import Span as TokenSpan
from nanodag.rl.rollouts.rollout_files import Read
from nanodag.tokenizer.encoding import Encoding

Colour = Literal["advantage", "difference", "logprob", "version", "none"]
COLOURS: tuple[Colour, ...] = ("advantage", "difference", "logprob", "version", "none")
RED, GREEN, BLUE = "220,38,38", "22,163,74", "37,99,235"
VERSION_COLOURS = (BLUE, "220,122,9", GREEN, "185,28,92", "109,91,208")
ERRORS = {FAILED: "no response", REASON: "no reward"}
ANSWER_LENGTH, NAME_LENGTH, REASON_LENGTH = 80, 40, 400  # letters
LAST_LINES, LINE_LENGTH = 20, 300
METADATA_LENGTH, PREVIEW_LENGTH = 4000, 100
OPEN_LENGTH = 300  # letters: a tool's result that is longer is folded
MOST_IMAGES = 8  # of a prompt
MOST_NUMBERS = 50  # of one sequence
TOKENS_A_PAGE = 40_000  # that are drawn; sequences share them
LETTERS_A_TOKEN = 4
UNKNOWN = "\ufffd"
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Token:
    """style: a background, empty for none; hint: the tooltip's text; kind: `call` within a call of a tool, `gap` for a
    note in the place of tokens that are left out, else empty."""

    text: str
    style: str
    hint: str
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """preview: how its text begins, where it is folded; else empty."""

    speaker: str
    is_sampled: bool
    num_tokens: int
    num_calls: int
    tokens: Sequence[Token]
    preview: str = ""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One sequence of a sample. prompt: where it is not the group's, else empty. facts, numbers: name and value;
    numbers are the reward's components and the environment's metrics. failures: what, such as `no reward`; reason; and
    the last lines that were said beyond it. metadata: JSON, empty for none. left_out: tokens that are not drawn."""

    read: Read
    prompt: str
    turns: Sequence[Turn]
    facts: Sequence[tuple[str, str]]
    numbers: Sequence[tuple[str, str]]
    failures: Sequence[tuple[str, str, str]]
    metadata: str
    left_out: int

    @property
    def role(self) -> str:
        return shortened(self.read.rollout.role, NAME_LENGTH)

    @property
    def reward(self) -> str:
        reward = self.read.rollout.reward
        return "no reward" if reward is None else f"{reward:.4g}"


@dataclass(frozen=True, kw_only=True)
class PromptSamples:
    """The samples of one prompt, each its sequences that were asked for, the main one first. prompt: as they all begin;
    its messages where they begin with prompts of their own. images: digests of those in it. answer: the right one,
    empty where it is not known. mean: of their rewards, None where no sample has one."""

    prompt_id: str
    prompt: str
    images: Sequence[str]
    answer: str
    mean: float | None
    samples: Sequence[Sequence[Branch]]


def groups_of(encoding: Encoding, reads: Sequence[Read], colour: Colour) -> list[PromptSamples]:
    """The samples by prompt, in the order in which `together` puts them; colours are scaled over all of them.
    encoding: the tokenizer of these rollouts."""
    largest = max((abs(v) for read in reads for v in _values(read, colour) if v is not None), default=0.0)
    versions = sorted({version for read in reads for version in read.rollout.versions})
    brush = _Brush(encoding, colour, largest, versions, most=TOKENS_A_PAGE // max(1, len(reads)))
    return [_group(group, brush) for group in grouped(reads, "group_id")]


def grouped(reads: Sequence[Read], field: str) -> list[list[Read]]:
    """Groups of those whose rollouts agree in a field, in the order of the first of each."""
    groups: dict[Any, list[Read]] = {}
    for read in reads:
        groups.setdefault(getattr(read.rollout, field), []).append(read)
    return list(groups.values())


def _group(reads: Sequence[Read], brush: "_Brush") -> PromptSamples:
    ordered = [sorted(sample, key=attrgetter("rollout.branch")) for sample in grouped(reads, "sample_index")]
    mains = [sample[0] for sample in ordered]
    first, rewards = mains[0], [main.rollout.reward for main in mains if main.rollout.reward is not None]
    shared = first.rollout.prompt_token_ids
    if any(main.rollout.prompt_token_ids != shared for main in mains):  # an agent's prompts are its own
        shared = ()
    spoken = [f"{message.get('role')}: {message.get('content')}" for message in first.messages]
    return PromptSamples(
        prompt_id=shortened(first.rollout.prompt_id, NAME_LENGTH),
        prompt=brush.text(shared) if shared else brush.cut("\n".join(spoken)),
        images=_images_in(first.rollout.prompt_token_ids),
        answer=shortened(first.answer, ANSWER_LENGTH),
        mean=sum(rewards) / len(rewards) if rewards else None,
        samples=[[brush.branch(read, shared) for read in sample] for sample in ordered],
    )


def _images_in(ids: Sequence[int]) -> list[str]:
    """Digests of a prompt's images; none where others' ids spell none."""
    with suppress(SourceError):
        return [digest for _, _, digest in digests_in(ids)][:MOST_IMAGES]
    return []


@dataclass(frozen=True)
class _Brush:
    """Draws one sequence after the other alike. most: tokens of each; the middle of a longer one is left out."""

    encoding: Encoding
    colour: Colour
    largest: float
    versions: Sequence[int]
    most: int

    def text(self, ids: Sequence[int]) -> str:
        """The text of a prompt, the middle of a long one left out."""
        return self.cut(self.encoding.decode(ids))

    def cut(self, text: str) -> str:
        return shortened(text, LETTERS_A_TOKEN * self.most)

    def branch(self, read: Read, shared: Sequence[int]) -> Branch:
        """shared: the prompt that stands above; empty where none does."""
        rollout, total = read.rollout, len(read.rollout.response_token_ids)
        left_out = max(0, total - self.most)
        gap = range(self.most * 2 // 3, self.most * 2 // 3 + left_out)
        values = _values(read, self.colour)
        turns = [self._turn(read, said, values, gap) for said in turns_of(rollout, self.encoding.decode)]
        numbers = [*rollout.reward_components.items(), *said_metrics(rollout).items()][:MOST_NUMBERS]
        rest = {name: value for name, value in rollout.metadata.items() if name not in (*ERRORS, LAST_WORDS, ANSWER)}
        return Branch(
            read=read,
            prompt="" if rollout.prompt_token_ids == shared else self.text(rollout.prompt_token_ids),
            turns=[turn for turn in turns if turn.tokens],
            facts=_facts(read, len(turns)),
            numbers=[(shortened(name, NAME_LENGTH), f"{value:.4g}") for name, value in numbers],
            failures=[_failure(what, name, rollout) for name, what in ERRORS.items() if name in rollout.metadata],
            metadata=shortened(json.dumps(rest, indent=1, ensure_ascii=False), METADATA_LENGTH) if rest else "",
            left_out=left_out,
        )

    def _turn(self, read: Read, said: Speech, values: Sequence[float | None], gap: range) -> Turn:
        is_sampled = said.span.kind == "sampled"
        is_folded = not is_sampled and len(said.text) > OPEN_LENGTH
        return Turn(
            speaker=shortened(said.speaker, NAME_LENGTH),
            is_sampled=is_sampled,
            num_tokens=len(said.span.token_ids),
            num_calls=len(calls_in(said.text)) if is_sampled else 0,
            tokens=self._tokens(read, said, values, gap),
            preview=" ".join(said.text[:PREVIEW_LENGTH].split()) + " …" if is_folded else "",
        )

    def _tokens(self, read: Read, said: Speech, values: Sequence[float | None], gap: range) -> list[Token]:
        """One for each token; for those that have parts of one letter, one together."""
        tokens: list[Token] = []
        hints: list[str] = []
        letters, known = codecs.getincrementaldecoder("utf-8")("replace"), self.encoding.size
        for place, token_id in enumerate(said.span.token_ids):
            number = said.start + place
            if number in gap:
                if number == gap.start:
                    tokens.append(Token(f" … {len(gap):,} tokens left out … ", "", "", "gap"))
                    letters.reset()
                    hints = []
                continue
            hints.append(_hint(read, said.span, place, number, token_id))
            is_last = place == len(said.span.token_ids) - 1
            # a model's vocabulary may be larger than the tokenizer's
            letter = self.encoding.decode_bytes([token_id]) if token_id < known else UNKNOWN.encode()
            text = letters.decode(letter, final=is_last)
            if token_id in self.encoding.special_ids:  # it has no bytes, so no letter goes through it
                text += letters.decode(b"", final=True) + self.encoding.decode([token_id])
                letters.reset()
            if not text:
                continue
            value = values[number] if values and said.span.kind == "sampled" else None
            style = "" if value is None else _style(value, self.colour, self.largest, self.versions)
            tokens.append(Token(text, style, " | ".join(hints)))
            hints = []
        return _with_calls(tokens) if said.span.kind == "sampled" else tokens


def _with_calls(tokens: Sequence[Token]) -> list[Token]:
    """Tokens of calls marked as such."""
    calls = calls_in("".join(token.text for token in tokens))
    marked, end = [], 0
    for token in tokens:
        begin, end = end, end + len(token.text)
        while calls and calls[0][1] <= begin:
            del calls[0]
        is_within = bool(calls) and calls[0][0] < end and not token.kind
        marked.append(replace(token, kind="call") if is_within else token)
    return marked


def _facts(read: Read, num_turns: int) -> list[tuple[str, str]]:
    rollout = read.rollout
    facts = [("right answer", shortened(read.answer, ANSWER_LENGTH))] if read.answer and not rollout.branch else []
    facts += [] if rollout.branch else [("sample", str(rollout.sample_index))]
    facts.append(("ended by", rollout.finish_reason))
    facts += [("turns", str(num_turns))] if num_turns > 1 else []
    facts.append(("tokens", f"{rollout.num_sampled:,}"))
    if ANSWER in rollout.metadata:
        facts.append(("its answer", shortened(str(rollout.metadata[ANSWER]), ANSWER_LENGTH)))
    return facts


def _failure(what: str, name: str, rollout: Rollout) -> tuple[str, str, str]:
    """name: of the metadata that say why."""
    reason, _, rest = str(rollout.metadata[name]).strip().partition("\n")
    rest = str(rollout.metadata.get(LAST_WORDS, "")) or rest
    last = [shortened(line, LINE_LENGTH) for line in rest.splitlines()[-LAST_LINES:]]
    return what, shortened(reason, REASON_LENGTH), "\n".join(last)


def _hint(read: Read, span: TokenSpan, place: int, number: int, token_id: int) -> str:
    hint = [f"id {token_id}"]
    if span.kind == "sampled":
        if span.logprobs:
            logprob = span.logprobs[place]
            hint += [f"probability {math.exp(min(0.0, logprob)):.3g}", f"logprob {logprob:.4g}"]
        hint += [f"version {span.versions[place]}", *["not trained"] * (not span.mask[place])]
    else:
        hint.append(span.kind)
    for name, values in (("advantage", read.advantages), ("trainer - sampler", read.differences)):
        value = values[number] if values else None
        hint += [] if value is None else [f"{name} {value:+.4g}"]
    return " · ".join(hint)


def _values(read: Read, colour: Colour) -> Sequence[float | None]:
    """The number that colours each token after the prompt; empty where there are none."""
    response = flatten_response(read.rollout)
    logprobs = [None if math.isnan(value) else value for value in response.logprobs]
    known = {"advantage": read.advantages, "difference": read.differences}
    return {**known, "logprob": logprobs, "version": response.versions}.get(colour, ())


def _style(value: float, colour: Colour, largest: float, versions: Sequence[int]) -> str:
    if colour == "version":
        return f"background:rgba({VERSION_COLOURS[versions.index(int(value)) % len(VERSION_COLOURS)]},.25)"
    hue = RED if value < 0 else GREEN
    strength = 0.0 if not largest else min(1.0, abs(value) / largest)
    return f"background:rgba({hue},{0.6 * strength:.3f})" if strength > 0.02 else ""


def first_samples(reads: Sequence[Read], most: int) -> list[Read]:
    """Rollouts of the first samples, with all of their sequences, the samples of a prompt together."""
    samples = [sample for group in grouped(reads, "group_id") for sample in grouped(group, "sample_index")]
    return [read for sample in samples[:most] for read in sample]


def text_of(encoding: Encoding, reads: Sequence[Read]) -> Text:
    """Each sample of these, under its prompt, for a terminal."""
    environment = environment_of(TEMPLATES, autoescape=False)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters["shortened"] = shortened
    environment.finalize = lambda value: escape(legible(str(value)))
    template = environment.get_template("rollouts.txt.jinja")
    return Text.from_markup(template.render(groups=groups_of(encoding, reads, "none")), emoji=False)
