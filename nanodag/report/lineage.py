"""Lineage up to the data, and the DAG as a picture: boxes from left to right, inputs before what was made of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from nanodag.config.kind import SCORES, Kind
from nanodag.errors import ArtifactNotFound, CorruptArtifact, NewerFormat
from nanodag.report.gather import ReportedStage, sources_of
from nanodag.store import Artifact, Store

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 132, 46, 44, 18
# Class and colour of a box. In a page its style sheet goes before the colours, which are for an SVG that stands alone.
BESIDE, RL, FIRST, CHAIN = ("beside", "#f3f4f6"), ("rl", "#fdeff4"), ("first", "#eef7f0"), ("chain", "#eef3fd")


def lineage_svg(stages: Mapping[str, ReportedStage]) -> str:
    """An SVG of stages with their kind and key, and an arrow for every input."""
    places = _places(stages)
    width = (max(x for x, _ in places.values()) + 1) * (BOX_WIDTH + GAP_X) - GAP_X + 4
    height = (max(y for _, y in places.values()) + 1) * (BOX_HEIGHT + GAP_Y) - GAP_Y + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="lineage" viewBox="0 0 {width} {height}" '
        f'style="min-width:{min(width, 760)}px;max-width:{width}px" role="img" aria-label="lineage of the stages">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z" fill="#9aa3af"/></marker></defs>',
    ]
    for name, stage in stages.items():
        parts += [_arrow(places[source.name], places[name]) for source in sources_of(stages, stage)]
    parts += [_box(stage, *places[name]) for name, stage in stages.items()]
    return "".join([*parts, "</svg>"])


def _places(stages: Mapping[str, ReportedStage]) -> dict[str, tuple[int, int]]:
    """Column and row of every stage: the column is its longest way from the start, the row the first that is free.

    Evaluations hang below the chain of models.
    """
    columns: dict[str, int] = {}
    for name, stage in stages.items():  # inputs come first in the context
        columns[name] = max((columns[source.name] for source in sources_of(stages, stage)), default=-1) + 1
    places: dict[str, tuple[int, int]] = {}
    taken: dict[int, int] = {}
    for name in sorted(stages, key=lambda name: stages[name].kind.makes == SCORES):
        row = max(taken.get(columns[name], 0), int(stages[name].kind.makes == SCORES))
        places[name] = (columns[name], row)
        taken[columns[name]] = row + 1
    return places


def _look(kind: Kind) -> tuple[str, str]:
    if kind.is_about_others:
        return BESIDE
    if kind.config.makes_rollouts:
        return RL
    return CHAIN if kind.trains or kind.inputs else FIRST


def _corner(x: int, y: int) -> tuple[int, int]:
    return 2 + x * (BOX_WIDTH + GAP_X), 2 + y * (BOX_HEIGHT + GAP_Y)


def _box(stage: ReportedStage, x: int, y: int) -> str:
    left, top = _corner(x, y)
    name, fill = _look(stage.kind)
    middle = left + BOX_WIDTH // 2
    detail = stage.kind.name if stage.kind.name != stage.name else ""
    return (
        f'<rect class="{name}" x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7" fill="{fill}" '
        'stroke="#c3cad4"/>'
        f'<text class="name" x="{middle}" y="{top + 19}" text-anchor="middle" font-size="13" font-weight="600" '
        f'fill="#1f2937">'
        f"{escape(stage.name)}</text>"
        f'<text class="key" x="{middle}" y="{top + 36}" text-anchor="middle" font-size="10.5" fill="#6b7280">'
        f"{escape(f'{detail} {stage.key[:8]}'.strip())}</text>"
    )


def _arrow(source: tuple[int, int], target: tuple[int, int]) -> str:
    left, top = _corner(*source)
    end_x, end_top = _corner(*target)
    start_x, start_y, end_y = left + BOX_WIDTH, top + BOX_HEIGHT / 2, end_top + BOX_HEIGHT / 2
    bend = (end_x - start_x) / 2
    return (
        f'<path class="arrow" d="M{start_x} {start_y}C{start_x + bend} {start_y} {end_x - bend} {end_y} {end_x - 2} '
        f'{end_y}" fill="none" stroke="#9aa3af" stroke-width="1.3" marker-end="url(#arrow)"/>'
    )


@dataclass(frozen=True, kw_only=True)
class Origin:
    """An artifact with what it was made from. artifact: None where the store has it no more; then `what` says which.
    inputs: input name -> Origin."""

    what: str
    artifact: Artifact | None
    inputs: Mapping[str, "Origin"] = field(default_factory=dict)


def origin_of(store: Store, artifact: Artifact) -> Origin:
    """The whole lineage of an artifact. One that is used twice is the same object twice."""
    known: dict[tuple[str, str], Origin] = {}

    def of(found: Artifact) -> Origin:
        name = (found.key, found.attempt)
        if name not in known:
            inputs = {label: above(source) for label, source in found.lineage.items()}
            known[name] = Origin(what=f"{found.stage} {found.key[:12]}/{found.attempt}", artifact=found, inputs=inputs)
        return known[name]

    def above(source: Mapping[str, Any]) -> Origin:
        try:
            return of(store.attempt(str(source["key"]), str(source["attempt"])))
        except ArtifactNotFound:
            why = "not in the store any more"
        except (CorruptArtifact, NewerFormat) as error:
            why = str(error)
        return Origin(what=f"{source['stage']} {source['key'][:12]}/{source['attempt']}: {why}", artifact=None)

    return of(artifact)


def picture_of(origin: Origin) -> str:
    """The lineage as an SVG: what the store has of it."""
    stages: dict[str, ReportedStage] = {}

    def add(found: Origin) -> None:
        for source in found.inputs.values():
            add(source)
        artifact = found.artifact
        if artifact is None or any((s.key, s.attempt) == (artifact.key, artifact.attempt) for s in stages.values()):
            return
        name = artifact.stage if artifact.stage not in stages else f"{artifact.stage} {artifact.key[:4]}"
        stages[name] = ReportedStage.read(name, vars(artifact) | {"files": "", "records": ""})

    add(origin)
    return lineage_svg(stages)
