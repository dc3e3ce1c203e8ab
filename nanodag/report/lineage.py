"""Lineage up to the data, and the DAG as a picture: boxes from left to right, inputs before what was made of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from nanodag.config.kind import SCORES, Kind
from nanodag.errors import ArtifactNotFound, CorruptArtifact, NewerFormat
from nanodag.report.gather import ReportedStage, sources_of
from nanodag.store import Artifact, Store

TEMPLATES = Path(__file__).parent / "templates"
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 132, 46, 44, 18
# Class and colour of a box. In a page its style sheet goes before the colours, which are for an SVG that stands alone.
BESIDE, RL, FIRST, CHAIN = ("beside", "#f3f4f6"), ("rl", "#fdeff4"), ("first", "#eef7f0"), ("chain", "#eef3fd")


def lineage_svg(
    stages: Mapping[str, ReportedStage], below: Mapping[str, str] | None = None, states: Mapping[str, str] | None = None
) -> str:
    """An SVG of stages and an arrow for every input. below: what stands below a name; kind and key unless given.
    states: of stages, as in a run's record."""
    places = {
        name: (2 + x * (BOX_WIDTH + GAP_X), 2 + y * (BOX_HEIGHT + GAP_Y)) for name, (x, y) in _places(stages).items()
    }
    template = jinja2.Template((TEMPLATES / "lineage.svg.jinja").read_text(), autoescape=True, trim_blocks=True)
    return template.render(
        width=max(x for x, _ in places.values()) + BOX_WIDTH + 2,
        height=max(y for _, y in places.values()) + BOX_HEIGHT + 2,
        box_width=BOX_WIDTH,
        box_height=BOX_HEIGHT,
        arrows=[(places[s.name], places[name]) for name, stage in stages.items() for s in sources_of(stages, stage)],
        boxes=[(stage, places[name], _look(stage.kind)) for name, stage in stages.items()],
        below=below,
        states=states or {},
    )


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


@dataclass(frozen=True, kw_only=True)
class Origin:
    """An artifact with what it was made from. artifact: None where the store has it no more; then `what` says which.
    inputs: input name -> Origin."""

    what: str
    artifact: Artifact | None
    inputs: Mapping[str, "Origin"] = field(default_factory=dict)


def origin_of(store: Store, artifact: Artifact) -> tuple[Origin, list[Artifact]]:
    """The whole lineage of an artifact. One that is used twice is the same object twice. Also what the store has of it,
    inputs before what was made of them; each once."""
    known: dict[tuple[str, str], Origin] = {}
    had: list[Artifact] = []

    def of(found: Artifact) -> Origin:
        name = (found.key, found.attempt)
        if name not in known:
            inputs = {label: above(source) for label, source in found.lineage.items()}
            known[name] = Origin(what=f"{found.stage} {found.key[:12]}/{found.attempt}", artifact=found, inputs=inputs)
            had.append(found)
        return known[name]

    def above(source: Mapping[str, Any]) -> Origin:
        try:
            return of(store.attempt(str(source["key"]), str(source["attempt"])))
        except ArtifactNotFound:
            why = "not in the store any more"
        except (CorruptArtifact, NewerFormat) as error:
            why = str(error)
        return Origin(what=f"{source['stage']} {source['key'][:12]}/{source['attempt']}: {why}", artifact=None)

    return of(artifact), had


def picture_of(artifacts: Iterable[Artifact]) -> str:
    """A lineage as an SVG. artifacts: of it, inputs before what was made of them."""
    stages: dict[str, ReportedStage] = {}
    for artifact in artifacts:
        name = artifact.stage if artifact.stage not in stages else f"{artifact.stage} {artifact.key[:4]}"
        stages[name] = ReportedStage.read(name, vars(artifact) | {"files": "", "records": ""})
    return lineage_svg(stages)
