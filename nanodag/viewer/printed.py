"""Rollouts in a terminal: sample by sample, turn by turn. What a model or an environment wrote moves no cursor."""

from collections.abc import Iterator, Sequence
from itertools import chain

from rich.text import Text

from nanodag.report.words import legible, shortened
from nanodag.rl.rollouts.rollout_files import Read
from nanodag.viewer.sample_view import Branch, Painter, grouped

SAID_LENGTH, HEARD_LENGTH, PROMPT_LENGTH = 2000, 400, 1000  # letters


def first_samples(reads: Sequence[Read], most: int) -> list[Read]:
    """Rollouts of the first samples, with all of their sequences, the samples of a prompt together."""
    samples = [sample for group in grouped(reads, "group_id") for sample in grouped(group, "sample_index")]
    return [read for sample in samples[:most] for read in sample]


def lines_of(painter: Painter, reads: Sequence[Read]) -> Iterator[Text]:
    """Each sample of these, under its prompt."""
    for group in painter.groups(reads, "none"):
        yield _line("prompt " + group.prompt_id, "bold")
        yield _line(_indented(shortened(group.prompt, PROMPT_LENGTH)), "dim")
        for branch in chain.from_iterable(group.samples):
            yield from _branch(branch)
        yield _line("")


def _branch(branch: Branch) -> Iterator[Text]:
    number = branch.read.rollout.branch
    head = [f"branch {number}"] if number else []
    head += [branch.role] if branch.role else []
    head += [f"reward {branch.reward}" if branch.read.rollout.reward is not None else branch.reward]
    head.append(branch.read.fate.replace("_", " "))
    head += [f"{name} {value}" for name, value in [*branch.facts, *branch.numbers]]
    failed = branch.read.rollout.reward is None
    yield _line(("  " if number else "") + " · ".join(head), "red" if failed else "cyan")
    for failure in branch.failures:
        yield _line(f"    {failure.what}: {failure.reason}", "red")
        yield from [_line(_indented(failure.last_lines), "red")] if failure.last_lines else []
    if branch.prompt:
        yield _line(_indented(shortened(branch.prompt, PROMPT_LENGTH)), "dim")
    for turn in branch.turns:
        length, style = (SAID_LENGTH, "") if turn.is_sampled else (HEARD_LENGTH, "dim")
        text = _indented(shortened("".join(token.text for token in turn.tokens), length))
        yield _line(f"    {turn.speaker} ", "bold") + _line(text.lstrip(" "), style)


def _indented(text: str) -> str:
    return "\n".join(f"      {line}" for line in text.split("\n"))


def _line(text: str, style: str = "") -> Text:
    return Text(legible(text), style=style)
