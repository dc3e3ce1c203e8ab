"""Two runs side by side: what of config, data, code, metrics and cost is not the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanodag.config.resolve import leaves
from nanodag.errors import ArtifactNotFound, CorruptArtifact, NewerFormat
from nanodag.run.stale_stages import stale_stages
from nanodag.store import Store, canonical_json
from nanodag.store.run_record import RunRecord
from nanodag.worker.tracker import numbers_in

SECTIONS = ("stages", "config", "data", "code", "metrics", "cost")
_COST = ("seconds", "cpu_seconds", "tokens", "flops", "peak_bytes", "device")
# Where a run took place, not what it is.
_ELSEWHERE = ("store.", "server.", "nightly.")


@dataclass(frozen=True, kw_only=True)
class DiffLine:
    """One line of the comparison. before, after: None where a run has nothing of that name."""

    section: str
    name: str
    before: Any
    after: Any

    @property
    def is_same(self) -> bool:
        return self.before == self.after

    @property
    def difference(self) -> float | None:
        """after - before, where both are numbers."""
        numbers = numbers_in({"before": self.before, "after": self.after})
        return numbers["after"] - numbers["before"] if len(numbers) == 2 else None


def compare(store: Store, first: RunRecord, second: RunRecord) -> list[DiffLine]:
    """Every line of both runs, section by section. first, second: their records."""
    sides = [_side(store, record) for record in (first, second)]
    return [
        DiffLine(section=section, name=name, before=sides[0][section].get(name), after=sides[1][section].get(name))
        for section in SECTIONS
        for name in dict.fromkeys([*sides[0][section], *sides[1][section]])
    ]


def config_of(record: RunRecord) -> dict[str, Any]:
    """Every setting of a run by its dotted name, but those of where it took place."""
    return {name: value for name, value in leaves(record.pipeline) if not name.startswith(_ELSEWHERE)}


def _side(store: Store, record: RunRecord) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    sections["config"] = config_of(record)
    sections["code"]["run: revision of the run"] = record.revision
    stale = stale_stages(record)
    for stage, entry in record.stages.items():
        made = f"{entry.key[:12]}/{entry.made.attempt}" if entry.made is not None else entry.state
        sections["stages"][stage] = f"{made}, stale" if stage in stale else made
        if entry.artifact is None:
            continue
        try:
            artifact = store.attempt(*entry.artifact)
        except (ArtifactNotFound, CorruptArtifact, NewerFormat):  # `nanodag verify` says more; the rest is compared
            continue
        sections["stages"][f"{stage} content"] = artifact.digest[:16]
        for url, identity in (artifact.sources or {}).items():
            sections["data"][f"{stage}: {url}"] = canonical_json(identity)
        for name, value in leaves(artifact.environment):
            sections["code"][f"{stage}: {name}"] = value
        for name, value in leaves(artifact.metrics):
            sections["metrics"][f"{stage}.{name}"] = value
        sections["cost"] |= {f"{stage}.{name}": artifact.cost[name] for name in _COST if name in artifact.cost}
    sections["code"] = _once(sections["code"])
    return sections


def _once(code: Mapping[str, Any]) -> dict[str, Any]:
    """`stage: name` -> value as name -> the value that all stages share, or all that they have."""
    values: dict[str, list[str]] = {}
    for full, value in code.items():
        values.setdefault(full.partition(": ")[2], []).append(str(value))
    return {name: ", ".join(dict.fromkeys(stage_values)) for name, stage_values in values.items()}
