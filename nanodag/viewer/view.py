"""Rollouts that the page shows, their order, and the picture of one step."""

import math
from collections.abc import Mapping, Sequence

from nanodag.report.words import shortened
from nanodag.rl.rollouts.metrics import Timed
from nanodag.rl.rollouts.rollout_files import FAILED, FAILURES, Read, Wanted
from nanodag.viewer.sample_view import BLUE, GREEN, grouped

GREY = "120,130,145"
LONGEST_SAID = 40  # letters
LANES = {"generate": 0, "evaluate": 1, "samplers_wait": 0, "sync": 2, "train": 3, "trainer_waits": 3, "checkpoint": 4}
LANE_NAMES = ("samplers", "evaluation", "weights", "trainer", "checkpoint")
FILLS = {"generate": BLUE, "evaluate": "109,91,208", "sync": "220,122,9", "train": GREEN, "checkpoint": GREY}


def together(reads: Sequence[Read], most: int) -> list[list[Read]]:
    """Pages of whole groups: the samples of a prompt stand together, in the order of the first of them. A page holds
    up to `most` rollouts, or one group that is larger."""
    pages: list[list[Read]] = [[]]
    for group in grouped(reads, "group_id"):
        if pages[-1] and len(pages[-1]) + len(group) > most:
            pages.append([])
        pages[-1] += group
    return pages


def first_samples(reads: Sequence[Read], most: int) -> list[Read]:
    """Rollouts of the first samples, with all of their sequences, the samples of a prompt together."""
    samples = [sample for group in grouped(reads, "group_id") for sample in grouped(group, "sample_index")]
    return [read for sample in samples[:most] for read in sample]


def fate_choices(fates: Mapping[str, int]) -> list[tuple[str, str]]:
    """Fates that may be asked for, and their words. fates: how many met each."""
    choices = [(fate, f"{fate.replace('_', ' ')} ({count})") for fate, count in fates.items()]
    failed = sum(fates.get(fate, 0) for fate in FAILURES)
    return [(FAILED, f"any failure ({failed})"), *choices] if failed else choices


def timeline_svg(spans: Sequence[Timed], *, width: int = 1080) -> str:
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
        role=query.get("role", ""),
        prompt=query.get("prompt", "").strip(),
        sample=int(query["sample"]) if query.get("sample") else None,
    )
