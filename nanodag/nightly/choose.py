"""Models that a night evaluates, and their evaluations: from the records of runs and the `nightly` section of the
pipeline."""

import fnmatch
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from nanodag.config import Pipeline
from nanodag.config.derive import derive
from nanodag.config.kind import MODEL, SCORES
from nanodag.config.kinds import recorded_kind
from nanodag.config.kinds.small_stages import ImportStage
from nanodag.config.pipeline import AnyStage, read_stage
from nanodag.errors import ArtifactNotFound, ConfigError, StoreError
from nanodag.errors.words import counted, listed, nearest
from nanodag.host.machine import Machine
from nanodag.run.record import StageResult, result_of
from nanodag.run.stale_stages import advice, stale_stages
from nanodag.store import Store
from nanodag.store.run_record import RunRecord

log = logging.getLogger(__name__)

_LONGEST_NAME = 40


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that a night evaluates.

    label, stage: its line in the trend, the same every night; stage is empty for a pinned model. run: the run that it
    is from tonight. model: what the store has; None for a pinned one, which stage `input_name` brings. evals: a stage
    of the night -> the eval stage's name and config.
    """

    label: str
    stage: str
    run: str
    input_name: str
    model: StageResult | None
    evals: Mapping[str, tuple[str, AnyStage]]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """subjects, and missing: what was asked for that is not there, in words. stale: which of the models are stale in
    their runs, in words. mirror: that the runs' data come from."""

    subjects: tuple[Subject, ...]
    missing: tuple[str, ...]
    stale: tuple[str, ...]
    mirror: str


def choose(store: Store, pipeline: Pipeline) -> Choice:
    """The newest model of each chosen run and stage, and the pinned models.

    Raises ConfigError for an unknown eval stage or runs that read from different mirrors, ArtifactNotFound when nothing
    at all is there to be evaluated.
    """
    records = list(store.records_of_runs().values())
    subjects: list[Subject] = []
    missing: list[str] = []
    stale: list[str] = []
    mirrors: dict[str, str] = {}
    for label, pattern in pipeline.nightly.runs.items():
        fitting = [r for r in records if _fits(r, pattern)]
        if not fitting:
            missing.append(f"{label}: no run is called {pattern!r}")
        for stage in _stages_of(fitting, pipeline):
            having = [r for r in fitting if (e := r.stages.get(stage)) and e.has_ended_well and e.made is not None]
            record = max(having, key=lambda record: record.stages[stage].ended, default=None)
            if record is None:
                missing.append(f"{label}/{stage}: no run that fits {pattern!r} has finished that stage")
                continue
            try:
                subject = _subject(store, label, record, stage)
            except StoreError as error:
                missing.append(f"{label}/{stage}: {error}")
                continue
            if not subject.evals:
                missing.append(f"{label}/{stage}: run {record.run} has no eval stage for it")
                continue
            subjects.append(subject)
            if why := stale_stages(record).get(stage):
                stale.append(f"{label}/{stage}: stale in run {record.run}, {why}; {advice(record.run)}")
            mirrors[record.run] = record.pipeline["mirror"]
    subjects += [_pinned(label, pipeline) for label in pipeline.nightly.models]
    for text in missing:
        log.warning("Tonight without %s.", text)
    if not subjects:
        raise ArtifactNotFound(
            f"Nothing in {store.url} is there to be evaluated: {'; '.join(missing) or 'nothing is chosen'}. Choose "
            "runs with nightly.runs={label: NAME}; there are "
            + (", ".join(r.run for r in records[-5:]) or "none yet")
            + "."
        )
    for text in stale:
        log.warning("%s", text)
    mirror = _mirror_of(pipeline, mirrors)
    return Choice(subjects=tuple(subjects), missing=tuple(missing), stale=tuple(stale), mirror=mirror)


def night_pipeline(pipeline: Pipeline, choice: Choice, machine: Machine) -> Pipeline:
    """The stages of a night as a pipeline for a machine: an eval stage for each model and benchmark set, and the pinned
    models.

    A model that the store has stands in it as a file; it is handed to its evals as it is, not copied.
    """
    stages: dict[str, Any] = {}
    for subject in choice.subjects:
        if (model := subject.model) is None:
            place = pipeline.nightly.models[subject.label].model
        else:
            place = f"file:/{subject.run}/{subject.stage}/{model.key}/{model.attempt}"
        stages[subject.input_name] = ImportStage(kind="import", model=place)
        for name, (_, config) in subject.evals.items():
            stages[name] = config.on_another_machine(inputs={"model": subject.input_name})
    raw = {name: stage.model_dump(mode="json") for name, stage in stages.items()}
    made = pipeline.model_dump(mode="json") | {
        "description": f"Nightly evals of {counted(len(choice.subjects), 'model')}",
        "mirror": choice.mirror,
        "stages": raw,
    }
    return derive(Pipeline.model_validate(made), machine)[0]


def _fits(record: RunRecord, pattern: str) -> bool:
    """True for a run that a pattern means. Nights, and the points of a sweep, must be named in full."""
    return record.run == pattern or (not record.composed and fnmatch.fnmatchcase(record.run, pattern))


def _stages_of(fitting: Sequence[RunRecord], pipeline: Pipeline) -> list[str]:
    """The chosen stages; for `all` those of the newest fitting run that make a model and have an eval stage, or
    benchmarks of their own."""
    if pipeline.nightly.stages != "all":
        return list(pipeline.nightly.stages)
    if not fitting:
        return []
    stages = fitting[-1].pipeline["stages"]
    evaluated = [raw["inputs"].get("model") for raw in stages.values() if _makes(raw, SCORES)]
    return [
        name
        for name in fitting[-1].stages
        if (name in evaluated or _own_benchmarks(stages.get(name))) and _makes(stages[name], MODEL)
    ]


def _makes(raw: Mapping[str, Any], product: str) -> bool:
    return recorded_kind(raw["kind"]).makes == product


def _subject(store: Store, label: str, record: RunRecord, stage: str) -> Subject:
    record = store.own_run(record.run)  # its evals may name code
    artifact = store.get(f"{record.run}:{stage}")
    evals: dict[str, tuple[str, AnyStage]] = {}
    for name, raw in record.pipeline["stages"].items():
        try:
            if _makes(raw, SCORES) and raw["inputs"].get("model") == stage:
                evals[_night_name(label, stage, name)] = (name, read_stage(raw))
            elif name == stage and _own_benchmarks(raw):
                own = read_stage(raw).own_evaluation(name)
                assert own is not None
                evals[_night_name(label, stage, "own")] = (name, own)
        except ValidationError as error:
            raise ConfigError(
                f"Stage {name} of run {record.run}, which another nanodag wrote, cannot be read ({error}). Run "
                f"that pipeline again, or leave it out of nightly.runs."
            ) from error
    return Subject(
        label=label,
        stage=stage,
        run=record.run,
        input_name=_night_name("model", label, stage),
        model=result_of(stage, artifact, was_found=True),
        evals=evals,
    )


def _own_benchmarks(raw: Mapping[str, Any] | None) -> bool:
    """True where a recorded stage asks its policy benchmarks while it trains."""
    return raw is not None and recorded_kind(raw["kind"]).config.asks_policy and bool(raw["evaluation"]["benchmarks"])


def _pinned(label: str, pipeline: Pipeline) -> Subject:
    """A pinned model. Raises ConfigError when an eval stage that it names is none of the preset's."""
    pinned = pipeline.nightly.models[label]
    evals = {}
    for name in pinned.evals:
        config = pipeline.stages.get(name)
        if config is None or recorded_kind(config.kind).makes != SCORES:
            known = [n for n, stage in pipeline.stages.items() if recorded_kind(stage.kind).makes == SCORES]
            raise ConfigError(
                f"nightly.models.{label}.evals names {name!r}, which is no eval stage of preset {pipeline.preset}; "
                f"those are {listed(known)}.{nearest(name, known)}"
            )
        evals[_night_name(label, name)] = (name, config)
    return Subject(label=label, stage="", run="", input_name=_night_name("model", label), model=None, evals=evals)


def _mirror_of(pipeline: Pipeline, mirrors: Mapping[str, str]) -> str:
    if pipeline.mirror != "none" or not mirrors:
        return pipeline.mirror
    if len(set(mirrors.values())) > 1:
        pairs = ", ".join(f"{run} from {mirror}" for run, mirror in mirrors.items())
        raise ConfigError(f"The chosen runs read their data from different mirrors: {pairs}. Choose one: mirror=PATH.")
    return next(iter(mirrors.values()))


def _night_name(*parts: str) -> str:
    """A stage name out of labels and names: short names as they are, long ones cut, with a hash of the whole."""
    whole = "-".join(part for part in parts if part)
    name = re.sub(r"[^a-z0-9_-]", "-", whole.lower())
    if not name[0].isalpha():
        name = f"n{name}"
    if name == whole and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 7]}-{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:6]}"
