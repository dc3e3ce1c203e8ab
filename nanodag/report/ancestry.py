"""What an artifact was made from, all the way up to the data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanodag.errors import ArtifactNotFound, CorruptArtifact, NewerFormat
from nanodag.store import Artifact, Store


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
    from nanodag.report.gather import ReportedStage
    from nanodag.report.lineage import lineage_svg

    stages: dict[str, ReportedStage] = {}

    def add(found: Origin) -> None:
        for source in found.inputs.values():
            add(source)
        artifact = found.artifact
        if artifact is None or any((s.key, s.attempt) == (artifact.key, artifact.attempt) for s in stages.values()):
            return
        name = artifact.stage if artifact.stage not in stages else f"{artifact.stage} {artifact.key[:4]}"
        nowhere = Path()
        stages[name] = ReportedStage(
            name=name,
            files=nowhere,
            records=nowhere,
            **{
                name: getattr(artifact, name)
                for name in ("kind", "key", "attempt", "digest", "metrics", "cost", "config", "lineage", "environment")
            },
        )

    add(origin)
    return lineage_svg(stages)
