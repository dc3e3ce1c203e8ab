"""Removal of what a store can do without (`nanodag gc`), and the check of what it has (`nanodag verify`).

An attempt stays as long as a run's record names it, or an attempt that stays was made from it. Beside that a policy
says which runs' records stay. What goes is taken out of sight first; then the records are read again, and what a run
has come to refer to meanwhile is brought back, with what that was made from.
"""

import logging
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanodag.config.resolve import leaves
from nanodag.config.stage_base import StageBase
from nanodag.errors import ArtifactNotFound, ConfigError, CorruptArtifact, NewerFormat, StoreBusy, StoreError
from nanodag.store import Artifact, Store
from nanodag.store.artifacts import MERGED
from nanodag.store.atomic import bytes_below
from nanodag.store.run_record import ArtifactReference, RunRecord

log = logging.getLogger(__name__)

# Longer than a stage takes from finding an artifact to noting it in its run's record.
SETTLE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Best:
    """Keep the best of a stage by one of its metrics. stage: its name, or `*` for each."""

    stage: str
    metric: str
    is_lowest: bool


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something that can go. what: run, attempt, workspace, copy, merged or leftover. name: in the store. why: in
    words. started: when a run was begun, or resumed, last."""

    what: str
    name: str
    num_bytes: int
    why: str
    started: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RemovalPlan:
    """items: what can go. num_kept, kept_bytes: attempts that stay. notes: what should be known. attempts: all of
    them, with what they were made from."""

    items: tuple[Item, ...]
    num_kept: int
    kept_bytes: int
    notes: tuple[str, ...]
    attempts: Mapping[ArtifactReference, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


def best_of(text: str) -> Best:
    """`STAGE.METRIC` for the highest, `STAGE.METRIC:min` for the lowest. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(?P<stage>[^.:]+)\.(?P<metric>[^:]+)(:(?P<side>min|max))?", text)
    if match is None:
        raise ConfigError(f"--keep-best {text!r}: write STAGE.METRIC, STAGE.METRIC:max or STAGE.METRIC:min.")
    return Best(stage=match["stage"], metric=match["metric"], is_lowest=match["side"] == "min")


def plan(store: Store, *, keep_runs: int = 0, keep_days: float = 0.0, keep_best: Sequence[Best] = ()) -> RemovalPlan:
    """List what can go. Raises StoreError when a run's record cannot be read: nobody knows what it refers to.

    Records of runs that stay: the newest keep_runs, those that completed before others; those begun within keep_days; 0
    and 0 for all of them. A run that is under way stays. keep_days also holds for attempts that no run refers to.
    keep_best: kept whatever refers to it, with what it was made from.
    """
    records = store.records_of_runs(needs_all=True)
    limit = time.time() - keep_days * 86400.0 if keep_days else float("inf")
    retired = _retired(records, keep_runs, limit) if keep_runs or keep_days else []
    staying = {name: record for name, record in records.items() if name not in retired}
    notes: list[str] = []
    attempts = _attempts(store, notes)
    best = _best(attempts, records, keep_best)
    young = {r for r, a in attempts.items() if isinstance(a, Artifact) and a.created >= limit}
    kept = _with_origins(attempts, _references(staying) | best | young)
    items = [
        Item(what="run", name=name, num_bytes=0, why="older than what is kept", started=records[name].started)
        for name in retired
    ]
    for reference, artifact in attempts.items():
        if not _is_in(reference, kept) and artifact != "newer":
            why = "no run refers to it" if isinstance(artifact, Artifact) else "damaged, and no run refers to it"
            name = f"{reference.key}/{reference.attempt}"
            items.append(Item(what="attempt", name=name, num_bytes=_bytes(artifact), why=why))
    # Keys that a run is going to resume: their workspaces and checkpoints stay.
    unfinished = {reference.key for reference in _references(staying) if reference.attempt is None}
    items += [
        Item(what="workspace", name=f"work/{path.name}", num_bytes=bytes_below(path), why="no run resumes it")
        for path in sorted((store.local / "work").glob("*"))
        if path.name not in unfinished
    ]
    items += _copies(store, attempts, kept)
    items += [
        Item(what="leftover", name=f"checkpoints/{key}", num_bytes=0, why="no run resumes these checkpoints")
        for key in store.keys("checkpoints")
        if key not in unfinished
    ]
    items += [
        Item(what="leftover", name=name, num_bytes=size, why="its writer was killed")
        for name, size in store.backend.leftovers().items()
    ]
    staying_attempts = [a for reference, a in attempts.items() if _is_in(reference, kept) or a == "newer"]
    return RemovalPlan(
        items=tuple(items),
        num_kept=len(staying_attempts),
        kept_bytes=sum(_bytes(a) for a in staying_attempts),
        notes=tuple(notes),
        attempts=attempts,
    )


def free(store: Store, found: RemovalPlan, *, settle_s: float = SETTLE_S) -> tuple[int, list[str]]:
    """Let go of what a plan lists; returns the bytes freed and, in words, what stayed after all."""
    stayed: list[str] = []
    freed = 0
    for item in found.items:
        if item.what == "run":
            if not store.remove_run(item.name, started=item.started):
                stayed.append(f"{item.name}: that run has been resumed")
        elif item.what != "attempt":
            freed += _remove(store, item, stayed)
    return freed + _free_attempts(store, found, settle_s, stayed), stayed


def _free_attempts(store: Store, found: RemovalPlan, settle_s: float, stayed: list[str]) -> int:
    """Take them out of sight, and look who needs them now: those come back first, then the others are removed."""
    hidden: dict[ArtifactReference, tuple[str, int]] = {}
    freed = 0
    try:
        for item in (i for i in found.items if i.what == "attempt"):
            key, _, attempt = item.name.partition("/")
            try:
                with store.building(key, timeout_s=0.0):
                    hidden[ArtifactReference(key, attempt)] = (store.backend.hide(key, attempt), item.num_bytes)
            except StoreBusy:
                stayed.append(f"{item.name}: somebody is building that key")
            except FileNotFoundError:
                stayed.append(f"{item.name}: it is gone already")
        if hidden:
            time.sleep(settle_s)
            attempts = _attempts(store, [], found.attempts)
            references = _with_origins(attempts, _references(store.records_of_runs(needs_all=True)))
            for reference in [r for r in hidden if _is_in(r, references)]:
                _bring_back(store, reference, hidden[reference][0], stayed, "a run has come to refer to it")
                del hidden[reference]
        for reference in list(hidden):
            token, num_bytes = hidden.pop(reference)
            store.delete(reference.key, str(reference.attempt), token)
            freed += num_bytes
    finally:
        for reference, (token, _) in hidden.items():
            _bring_back(store, reference, token, stayed, "gc was ended before")
    return freed


def _bring_back(store: Store, reference: ArtifactReference, token: str, stayed: list[str], why: str) -> None:
    """Undo `hide`; one that cannot be brought back does not keep the others away."""
    key, old = reference.key, str(reference.attempt)
    name = f"{key}/{old}"
    try:
        attempt = store.backend.bring_back(key, old, token)
    except (OSError, StoreError) as error:
        log.warning("%s could not be brought back: %s", name, error)
        stayed.append(f"{name}: {why}, but it could not be brought back ({error}); a run that needs it builds it again")
        return
    moved = "" if attempt == old else f"; it is attempt {attempt} now"
    stayed.append(f"{name}: {why}{moved}")


def _remove(store: Store, item: Item, stayed: list[str]) -> int:
    """Remove a workspace, a copy or a leftover; returns its bytes. It stays while somebody builds its key, or will."""
    folder, _, name = item.name.partition("/")
    if item.what == "leftover" and folder != "checkpoints":
        store.backend.clear(item.name)
        return item.num_bytes
    key, *attempt = name.split("/") if item.what == "copy" else name.split("/")[:1]
    try:
        with store.building(key, timeout_s=0.0):
            if _is_in(ArtifactReference(key, *attempt), _references(store.records_of_runs(needs_all=True))):
                stayed.append(f"{item.name}: a run has come to refer to it")
                return 0
            if item.what == "leftover":
                store.backend.clear(item.name)
            else:
                shutil.rmtree(store.local / item.name)
    except StoreBusy:
        stayed.append(f"{item.name}: somebody is building that key")
        return 0
    return item.num_bytes


def _retired(records: Mapping[str, RunRecord], keep_runs: int, limit: float) -> list[str]:
    """Runs whose record goes, oldest first. Nights do not count among the newest: they go by age alone. A run that
    completed is worth more than a newer one that did not. limit: when those that stay were begun; infinite for none."""
    plain = [name for name, record in records.items() if record.nightly is None]
    by_worth = sorted(plain, key=lambda name: records[name].state == "completed")  # each part oldest first
    newest = set(by_worth[-keep_runs:]) if keep_runs else set()
    return [
        name
        for name, record in records.items()
        if name not in newest
        and record.state != "running"
        and max(record.created, record.started, record.ended) < limit
        and (name in plain or limit < float("inf"))
    ]


def _attempts(
    store: Store, notes: list[str], known: Mapping[ArtifactReference, Any] | None = None
) -> dict[ArtifactReference, Any]:
    """Every attempt that is visible: its Artifact, or `newer`, or `damaged`. Half-written ones are leftovers. known:
    what was read before, which is not read again."""
    attempts: dict[ArtifactReference, Any] = dict(known or {})
    for key, attempt in targets(store, ""):
        reference = ArtifactReference(key, attempt)
        if reference in attempts:
            continue
        try:
            attempts[reference] = store.attempt(key, attempt)
        except ArtifactNotFound:
            continue
        except NewerFormat as error:
            attempts[reference] = "newer"
            notes.append(f"{error} It stays.")
        except CorruptArtifact:
            attempts[reference] = "damaged"
    return attempts


def _references(records: Mapping[str, RunRecord]) -> set[ArtifactReference]:
    return {reference for record in records.values() for reference in record.references()}


def _is_in(reference: ArtifactReference, references: set[ArtifactReference]) -> bool:
    return reference in references or ArtifactReference(reference.key) in references


def _with_origins(attempts: Mapping[ArtifactReference, Any], wanted: set[ArtifactReference]) -> set[ArtifactReference]:
    """These references, and what the artifacts that they mean were made from, all the way up."""
    references, waiting = set(wanted), [r for r in attempts if _is_in(r, wanted)]
    while waiting:
        artifact = attempts.get(waiting.pop())
        if not isinstance(artifact, Artifact):
            continue
        for source in artifact.lineage.values():
            used, digest = ArtifactReference(str(source["key"]), str(source["attempt"])), source.get("digest")
            above = {used}
            if getattr(attempts.get(used), "digest", "") != digest:  # adapters then take any of the same content
                whole = ((r, other) for r, other in attempts.items() if r.key == used.key)
                above |= {r for r, other in whole if getattr(other, "digest", "") == digest}
            waiting += above - references
            references |= above
    return references


def _best(
    attempts: Mapping[ArtifactReference, Any], records: Mapping[str, RunRecord], rules: Sequence[Best]
) -> set[ArtifactReference]:
    """Winners of each rule. An attempt counts for the stage that made it, and for each that found it made."""
    stages = {reference: {a.stage} for reference, a in attempts.items() if isinstance(a, Artifact)}
    for record in records.values():
        for name, entry in record.stages.items():
            if entry.reference in stages:
                stages[entry.reference].add(name)
    winners: set[ArtifactReference] = set()
    for rule in rules:
        scores: dict[str, list[tuple[float, ArtifactReference]]] = {}
        for reference, names in stages.items():
            value = dict(leaves(attempts[reference].metrics)).get(rule.metric)
            if isinstance(value, int | float) and not isinstance(value, bool):
                for stage in names if rule.stage == "*" else names & {rule.stage}:
                    scores.setdefault(stage, []).append((-value if rule.is_lowest else value, reference))
        if not scores:
            raise ConfigError(f"--keep-best {rule.stage}.{rule.metric}: no stage of that name has such a metric.")
        winners |= {max(values)[1] for values in scores.values()}
    return winners


def _copies(store: Store, attempts: Mapping[ArtifactReference, Any], kept: set[ArtifactReference]) -> list[Item]:
    """This host's copies of attempts that do not stay, and models merged of adapters that were not asked for for longer
    than a stage may run."""
    items, limit = [], time.time() - StageBase.model_fields["timeout_s"].default
    for path in sorted((store.local / "cache").glob("*/*")):
        reference = ArtifactReference(path.parent.name, path.name)
        if path.is_dir() and (reference not in attempts or not _is_in(reference, kept)):
            name, why = f"cache/{path.parent.name}/{path.name}", "its original goes, or is gone"
            items.append(Item(what="copy", name=name, num_bytes=bytes_below(path), why=why))
        elif (merged := path / MERGED).is_dir() and path.stat().st_mtime < limit:
            name, why = merged.relative_to(store.local).as_posix(), "it is merged again when it is asked for"
            items.append(Item(what="merged", name=name, num_bytes=bytes_below(merged), why=why))
    return items


def _bytes(artifact: Any) -> int:
    return artifact.stored_bytes if isinstance(artifact, Artifact) else 0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """state: `whole`, `damaged`, `newer` (only a newer nanodag reads it) or `unfinished` (its writer is at it, or was
    killed). text: what is wrong."""

    key: str
    attempt: str
    stage: str
    state: str
    num_bytes: int
    text: str


def check(store: Store, key: str, attempt: str) -> Finding:
    """Hash every file of an attempt; a remote one is pulled for that."""
    stage, num_bytes = "", 0
    try:
        artifact = store.attempt(key, attempt)
        stage, num_bytes = artifact.stage, artifact.num_bytes
        store.verified(artifact, "files")
        store.verified(artifact, "records")
        state, text = "whole", ""
    except ArtifactNotFound:
        is_there = attempt in store.attempts(key)
        state, text = ("unfinished", "no manifest yet") if is_there else ("damaged", "it is not in the store")
    except (NewerFormat, CorruptArtifact) as error:
        state, text = "newer" if isinstance(error, NewerFormat) else "damaged", str(error)
    return Finding(key=key, attempt=attempt, stage=stage, state=state, num_bytes=num_bytes, text=text)


def targets(store: Store, name: str) -> list[tuple[str, str]]:
    """Attempts that a name means: all that a run refers to, or every attempt of the key that begins so, or with an
    empty name every attempt there is. Raises ArtifactNotFound when it means nothing."""
    if not name:
        keys = store.keys()
        return [(key, attempt) for key in keys for attempt in store.attempts(key)]
    if name in store.runs():
        entries = store.read_run(name).stages.values()
        return [(entry.key, entry.made.attempt) for entry in entries if entry.made is not None]
    prefix, _, attempt = name.partition("/")
    key = store.find_key(prefix)
    return [(key, a) for a in store.attempts(key) if a.startswith(attempt)]
