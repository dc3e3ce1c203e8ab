"""A rollout as people read it: turn by turn, with who speaks. No torch here. Nothing is trained on these texts."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanodag.rl.rollouts.rollout import Rollout, Span
from nanodag.tokenizer import layout

MODEL = "model"
# How chat templates mark a tool's result, and what a user says, in the tokens that they put between two answers.
_TOOL = re.compile(r"<\|?[a-z_]{0,9}(?:tool|observation|function)[a-z_]{0,9}\|?>|header_id\|>(?:tool|ipython)\b")
_USER = re.compile(r"(?:im_start|start_header_id|header_start|start_of_turn)\|?>\s{0,2}user\b|<\|user\|>|\[INST\]")
_MARKED_WITHIN = 200  # letters
# How a call begins and ends: in nanodag's own format, and in that of Hermes and Qwen.
_CALLS = ((layout.TOOL_CALL, layout.TOOL_CALL_END), ("<tool_call>", "</tool_call>"))


@dataclass(frozen=True, slots=True)
class Speech:
    """A span after the prompt. speaker: the role that the model plays, `model` where it has none; `tool`, or `user`
    where the template says so. start: the place of its first token among those after the prompt."""

    speaker: str
    span: Span
    text: str
    start: int


def turns_of(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> list[Speech]:
    """The turns after the prompt; spans without a token are left out. decode: special tokens by name."""
    turns, start = [], 0
    for span in rollout.spans[1:]:
        if span.token_ids:
            text = decode(span.token_ids)
            turns.append(Speech(_speaker(rollout, span, text), span, text, start))
        start += len(span.token_ids)
    return turns


def text_of_turns(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> str:
    """The response as one text; where it has several turns, each under the name of its speaker."""
    turns = turns_of(rollout, decode)
    if len(turns) < 2:
        return "".join(turn.text for turn in turns)
    return "\n\n".join(f"[{turn.speaker}]\n{turn.text}" for turn in turns)


def calls_in(text: str) -> list[tuple[int, int]]:
    """Begin and end of each tool call in what a model said."""
    calls = []
    for opening, closing in _CALLS:
        end = 0
        while (begin := text.find(opening, end)) >= 0 and (closed := text.find(closing, begin)) >= 0:
            end = closed + len(closing)
            calls.append((begin, end))
    return sorted(calls)


def _speaker(rollout: Rollout, span: Span, text: str) -> str:
    if span.kind == "sampled":
        return rollout.role or MODEL
    marks = text[:_MARKED_WITHIN]
    return "user" if _USER.search(marks) and not _TOOL.search(marks) else "tool"
