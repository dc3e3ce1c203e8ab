"""Steps of an answer, each of which a reward model judges: told apart in a text, and as tokens."""

from collections.abc import Sequence
from itertools import accumulate, chain

from nanodag.errors import SourceError

SEPARATOR = "nanodag_step_separator"
"""Key of config.json by which a reward model says what stands between the steps that it judges."""


def steps_in(text: str, separator: str) -> list[str]:
    """Steps of a text, with the separator behind each but the last; blank ones are left out, unless all are."""
    return joined([step for step in text.split(separator) if step.strip()] or [""], separator)


def joined(steps: Sequence[str], separator: str) -> list[str]:
    """Steps as the texts that are tokenised, each by itself so that it ends with a token. Raises SourceError for one
    that holds the separator, by which it would be told apart as two."""
    if inside := [step for step in steps if separator in step.removesuffix(separator)]:
        raise SourceError(f"A step holds the stage's step_separator {separator!r}: {inside[0]!r:.80}. Set another one.")
    bare = [step.removesuffix(separator) for step in steps]
    return [*(step + separator for step in bare[:-1]), bare[-1]]


def step_ids(prompt: Sequence[int], steps: Sequence[Sequence[int]], end: Sequence[int]) -> tuple[list[int], list[int]]:
    """Ids of a prompt and an answer's steps, and the place of each step's last token: of the last one that is `end`,
    what ends the turn."""
    pieces = [*steps[:-1], [*steps[-1], *end]]
    places = [len(prompt) + size - 1 for size in accumulate(map(len, pieces))]
    return [*prompt, *chain.from_iterable(pieces)], places
