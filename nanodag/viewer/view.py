"""The page's contents: the chosen rollouts, their tokens with colours, and the picture of one step."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from nanodag.report.words import shortened
from nanodag.rl.rollouts.rollout import Span as TokenSpan
from nanodag.rl.rollouts.stopwatch import Span
from nanodag.tokenizer.encoding import Encoding
from nanodag.viewer.shelf import Read

Colour = Literal["advantage", "difference", "logprob", "version", "none"]
COLOURS: tuple[Colour, ...] = ("advantage", "difference", "logprob", "version", "none")
RED, GREEN, BLUE, GREY = "220,38,38", "22,163,74", "37,99,235", "120,130,145"
VERSION_COLOURS = (BLUE, "220,122,9", GREEN, "185,28,92", "109,91,208")
LONGEST_SAID = 40  # letters
REASONS = {"reward_error": "reward error", "generate_error": "generate error", "answer": "its answer"}  # of metadata
ANSWER_LENGTH = 80
LANES = {"generate": 0, "evaluate": 1, "samplers_wait": 0, "sync": 2, "train": 3, "trainer_waits": 3, "checkpoint": 4}
LANE_NAMES = ("samplers", "evaluation", "weights", "trainer", "checkpoint")
FILLS = {"generate": BLUE, "evaluate": "109,91,208", "sync": "220,122,9", "train": GREEN, "checkpoint": GREY}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What was asked for. lowest, highest: of the reward; fate: empty for any; prompt: part of a prompt's id."""

    lowest: float | None = None
    highest: float | None = None
    fate: str = ""
    finish: str = ""
    prompt: str = ""

    def is_met_by(self, read: Read) -> bool:
        reward = read.rollout.reward
        if self.lowest is not None and (reward is None or reward < self.lowest):
            return False
        if self.highest is not None and (reward is None or reward > self.highest):
            return False
        if self.finish and read.rollout.finish_reason != self.finish:
            return False
        return self.fate in ("", read.fate) and self.prompt in read.rollout.prompt_id


@dataclass(frozen=True, slots=True)
class Token:
    """style: a background, empty for none; hint: the tooltip's text."""

    text: str
    style: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """One rollout as it is shown. facts: name and value."""

    read: Read
    tokens: Sequence[Token]
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rollouts of one prompt. answer: the right one, empty where it is not known. mean: of their rewards, None
    where no rollout has one."""

    prompt_id: str
    prompt: str
    answer: str
    mean: float | None
    cards: Sequence[Card]


class Painter:
    """Makes cards. model: a folder with the tokenizer of these rollouts."""

    def __init__(self, model: Path) -> None:
        self._model = model

    @cached_property
    def _encoding(self) -> Encoding:
        return Encoding(self._model)

    def groups(self, reads: Sequence[Read], colour: Colour) -> list[Group]:
        """The rollouts by prompt, in the order in which `together` puts them; colours are scaled over all of them."""
        cards: dict[str, list[Card]] = {}
        for card in self.cards(reads, colour):
            cards.setdefault(card.read.rollout.group_id, []).append(card)
        return [self._group(mine) for mine in cards.values()]

    def _group(self, cards: Sequence[Card]) -> Group:
        first, rewards = cards[0].read, [c.read.rollout.reward for c in cards if c.read.rollout.reward is not None]
        return Group(
            prompt_id=first.rollout.prompt_id,
            prompt=self._encoding.decode(first.rollout.prompt_token_ids),
            answer=first.answer,
            mean=sum(rewards) / len(rewards) if rewards else None,
            cards=cards,
        )

    def cards(self, reads: Sequence[Read], colour: Colour) -> list[Card]:
        """A card for each rollout; colours are scaled over all of them."""
        largest = max((abs(v) for read in reads for v in _values(read, colour) if v is not None), default=0.0)
        versions = sorted({version for read in reads for version in read.rollout.versions})
        return [self._card(read, colour, largest, versions) for read in reads]

    def _card(self, read: Read, colour: Colour, largest: float, versions: Sequence[int]) -> Card:
        rollout = read.rollout
        facts = [("right answer", shortened(read.answer, ANSWER_LENGTH))] if read.answer else []
        facts += [
            ("sample", str(rollout.sample_index)),
            ("ended by", rollout.finish_reason),
            ("tokens", str(rollout.num_sampled)),
        ]
        facts += [(name, f"{value:.4g}") for name, value in rollout.reward_components.items()]
        facts += [(REASONS[name], str(value)) for name, value in rollout.metadata.items() if name in REASONS]
        return Card(
            read=read,
            tokens=list(self._tokens(read, colour, largest, versions)),
            facts=facts,
        )

    def _tokens(self, read: Read, colour: Colour, largest: float, versions: Sequence[int]) -> list[Token]:
        tokens: list[Token] = []
        for span in read.rollout.spans[1:]:
            for place, token_id in enumerate(span.token_ids):
                number = len(tokens)
                hint = [f"id {token_id}", *_sampled_facts(span, place)]
                for name, values in (("advantage", read.advantages), ("trainer - sampler", read.differences)):
                    value = values[number] if values else None
                    hint += [] if value is None else [f"{name} {value:+.4g}"]
                value = _value_of(read, span, place, number, colour)
                style = "" if value is None else _style(value, colour, largest, versions)
                tokens.append(Token(self._text(token_id), style, " · ".join(hint)))
        return tokens

    def _text(self, token_id: int) -> str:
        if token_id in self._encoding.special_ids:
            return self._encoding.decode([token_id])
        return self._encoding.decode_bytes([token_id]).decode("utf-8", "replace")


def _sampled_facts(span: TokenSpan, place: int) -> list[str]:
    if span.kind != "sampled":
        return [span.kind]
    facts = [f"logprob {span.logprobs[place]:.4g}"] if span.logprobs else []
    facts.append(f"version {span.versions[place]}")
    return facts if span.mask[place] else [*facts, "not trained"]


def _value_of(read: Read, span: TokenSpan, place: int, number: int, colour: Colour) -> float | None:
    if span.kind != "sampled" or colour == "none":
        return None
    if colour == "logprob":
        return span.logprobs[place] if span.logprobs else None
    if colour == "version":
        return span.versions[place]
    values = read.advantages if colour == "advantage" else read.differences
    return values[number] if values else None


def _values(read: Read, colour: Colour) -> Sequence[float | None]:
    if colour == "logprob":
        return [value for span in read.rollout.spans for value in span.logprobs]
    return {"advantage": read.advantages, "difference": read.differences}.get(colour, ())


def _style(value: float, colour: Colour, largest: float, versions: Sequence[int]) -> str:
    if colour == "version":
        return f"background:rgba({VERSION_COLOURS[versions.index(int(value)) % len(VERSION_COLOURS)]},.25)"
    hue = RED if value < 0 else GREEN
    strength = 0.0 if not largest else min(1.0, abs(value) / largest)
    return f"background:rgba({hue},{0.6 * strength:.3f})" if strength > 0.02 else ""


def together(reads: Sequence[Read], most: int) -> list[list[Read]]:
    """Pages of whole groups: the samples of a prompt stand together, in the order of the first of them. A page holds
    up to `most` rollouts, or one group that is larger."""
    groups: dict[str, list[Read]] = {}
    for read in reads:
        groups.setdefault(read.rollout.group_id, []).append(read)
    pages: list[list[Read]] = [[]]
    for group in groups.values():
        if pages[-1] and len(pages[-1]) + len(group) > most:
            pages.append([])
        pages[-1] += group
    return pages


def fates_of(reads: Sequence[Read]) -> dict[str, int]:
    """How many rollouts met which fate, most first."""
    return dict(Counter(read.fate for read in reads).most_common())


def timeline_svg(spans: Sequence[Span], *, width: int = 1080) -> str:
    """Bars over time, a lane for each side; waiting is hollow. Empty when there is nothing to draw."""
    known = [span for span in spans if span[0] in LANES]
    if not known:
        return ""
    begin, end = min(span[1] for span in known), max(span[2] for span in known)
    scale = (width - 130) / max(end - begin, 1e-6)
    lanes = sorted({LANES[name] for name, _, _ in known})
    parts = []
    for row, lane in enumerate(lanes):
        y = 8 + 30 * row
        parts.append(f'<text x="0" y="{y + 15}" fill="var(--soft)">{LANE_NAMES[lane]}</text>')
        for name, start, stop in known:
            if LANES[name] == lane:
                parts.append(_bar(name, 110 + (start - begin) * scale, y, (stop - start) * scale, stop - start))
    bottom = 8 + 30 * len(lanes)
    parts += _ticks(end - begin, scale, bottom)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 26}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13">{"".join(parts)}</svg>'
    )


def _bar(name: str, x: float, y: float, size: float, seconds: float) -> str:
    fill = FILLS.get(name)
    look = f'fill="rgba({fill},.75)"' if fill else 'fill="none" stroke="var(--axis)" stroke-dasharray="3 3"'
    label = name.replace("_", " ")
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(size, 1.0):.1f}" height="22" rx="3" {look}>'
        f"<title>{label}: {seconds:.3f} s</title></rect>"
    )


def _ticks(seconds: float, scale: float, y: float) -> list[str]:
    step = next((s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200) if seconds / s <= 10), 36000)
    lines, place = [], 0.0
    while place <= seconds:
        x = 110 + place * scale
        lines.append(f'<text x="{x:.1f}" y="{y + 14}" fill="var(--soft)" text-anchor="middle">{place:g} s</text>')
        place = round(place + step, 6)
    return lines


def wanted_of(query: Mapping[str, str]) -> Wanted:
    """The query of the page's form. Raises ValueError naming the field that is no finite number."""

    def number(name: str) -> float | None:
        text = query.get(name, "").strip()
        try:
            value = float(text) if text else None
        except ValueError:
            value = math.nan
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} is {shortened(text, LONGEST_SAID)!r}, which is no number")
        return value

    return Wanted(
        lowest=number("lowest"),
        highest=number("highest"),
        fate=query.get("fate", ""),
        finish=query.get("finish", ""),
        prompt=query.get("prompt", "").strip(),
    )
