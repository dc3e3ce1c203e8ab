"""Nights as runs of the store: which one is due, who runs it, which models it evaluates and by what, what earlier ones
found, and the schedule's switch.

The switch is in Prefect, where its UI turns it too. Serving again keeps it, until the nightly section changes.
"""

import fnmatch
import hashlib
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from pydantic import ValidationError

from nanodag.config import Pipeline, resolve
from nanodag.config.derive import derive
from nanodag.config.derive_sampler import this_machine
from nanodag.config.kind import MODEL, SCORES
from nanodag.config.kinds import recorded_kind
from nanodag.config.kinds.small_stages import ImportStage
from nanodag.config.nightly import NightlyConfig, last_due, zone_of
from nanodag.config.pipeline import AnyStage, read_stage
from nanodag.errors import ArtifactNotFound, ConfigError, ServerError, StoreError
from nanodag.errors.words import counted, listed, nearest
from nanodag.host.machine import Machine
from nanodag.run.derived_runs import machine_for, open_composed
from nanodag.run.preflight import check_before_start
from nanodag.run.record import Run, StageResult, pipeline_file, refuse_busy, result_of, store_of
from nanodag.run.stale_stages import advice, stale_stages
from nanodag.server.prefect_api import Api
from nanodag.store import Store
from nanodag.store.atomic import locked
from nanodag.store.run_record import NightRecord, RunRecord

log = logging.getLogger(__name__)

_LONGEST_NAME = 40
PREFIX = "nightly-"


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


class Night:
    """A night that this process runs. Not a dataclass, so that what carries it about does not look inside.

    settings: the pipeline whose `nightly` section asked for it. Its run's stages: the pinned models first.
    """

    def __init__(self, run: Run, settings: Pipeline, choice: Choice) -> None:
        self.run = run
        self.settings = settings
        self.subjects = choice.subjects


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A night that is left alone, and why."""

    reason: str


def begin_night(
    *, name: str, file: str, preset: str, overrides: Sequence[str], by_schedule: bool, flow_run: str
) -> Night | Skipped:
    """Begin a night, or resume the one that this flow run had begun.

    name: of a night that was asked for; empty for one named by time. by_schedule: it is the night that the schedule was
    last due; however many of its flow runs come late, one runs it.

    Raises ConfigError, StoreBusy when another process is at it, or ArtifactNotFound when there is nothing to evaluate.
    """
    path = pipeline_file(file)
    resolved = resolve(path, preset, overrides)
    store = store_of(resolved.pipeline)
    with locked(store.local / "locks" / "nightly.lock", timeout_s=60.0):
        now = datetime.now(ZoneInfo(zone_of(resolved.pipeline.nightly.timezone)))
        due = last_due(resolved.pipeline.nightly.schedule, now) if by_schedule else now
        nights = nights_of(store)
        decision = decide(nights, due, flow_run) if by_schedule else _asked(nights, name, now, flow_run)
        if isinstance(decision, Skipped):
            return decision
        machine = machine_for(decision, store)
        if str(machine) != str(resolved.machine):
            resolved = resolve(path, preset, overrides, machine=machine)
        choice = choose(store, resolved.pipeline)
        about = NightRecord(by_schedule=by_schedule, due=due.timestamp(), missing=choice.missing, stale=choice.stale)
        # Only what is run is in the record's stages: the models of runs are those runs' own.
        run = open_composed(
            decision,
            night_pipeline(resolved.pipeline, choice, machine),
            store,
            file=path,
            to_do=stages_of(choice),
            flow_run=flow_run,
            machine=machine,
            about=about,
        )
    return Night(run, resolved.pipeline, choice)


def check_choice(store: Store, settings: Pipeline, file: Path) -> None:
    """Raise for what a night of these settings would fail for as the store is now: as choose and check_before_start."""
    choice = choose(store, settings)
    pipeline = night_pipeline(settings, choice, this_machine())
    check_before_start(pipeline, store, file=file, stages=stages_of(choice))


def check_night(night: Night) -> None:
    """Raise ConfigError with a line for each thing that a stage of it would fail for; its record says so, too."""
    store, name = night.run.store, night.run.name
    try:
        file = Path(store.read_run(name).file)
        check_before_start(night.run.pipeline, store, file=file, stages=night.run.to_do)
    except BaseException as error:
        reason = str(error)
        night.run.close()
        store.change_run(name, lambda record: record.changed(state="failed", reason=reason))
        raise


def decide(nights: Sequence[RunRecord], due: datetime, flow_run: str) -> str | Skipped:
    """The name of the scheduled night of this flow run, or why it leaves it alone.

    nights: records. due: when the schedule was last due. Flow runs of nights before that are late runs of this one: the
    first to come takes it. One that a killed process left is taken over; one that ended, well or not, stays.

    Raises StoreBusy for a retry of this flow run while its earlier process is still there.
    """
    if mine := _of_flow_run(nights, flow_run):
        return _not_busy(nights, mine)  # a retry
    for night in nights:
        if not night.night.by_schedule or night.night.due < due.timestamp():
            continue
        if night.is_alive:
            return Skipped(reason=f"Night {night.run} is under way: flow run {night.flow_run} runs it.")
        if night.state not in ("running", "interrupted"):
            return Skipped(reason=f"Night {night.run} is {night.state} already; earlier ones are not made up for.")
    return f"{PREFIX}{due:%Y%m%d-%H%M}"


def _asked(nights: Sequence[RunRecord], name: str, now: datetime, flow_run: str) -> str:
    """The name of a night that somebody asked for. Raises StoreBusy for one under way, ConfigError for a name that no
    night can have."""
    name = _of_flow_run(nights, flow_run) or name or f"{PREFIX}{now:%Y%m%d-%H%M%S}"
    if not name.startswith(PREFIX):
        raise ConfigError(f"Night {name!r}: its name begins with {PREFIX!r}.")
    return _not_busy(nights, name)


def _not_busy(nights: Sequence[RunRecord], name: str) -> str:
    refuse_busy("Night", next((night for night in nights if night.run == name), None))
    return name


def _of_flow_run(nights: Sequence[RunRecord], flow_run: str) -> str:
    return next((night.run for night in nights if flow_run and night.flow_run == flow_run), "")


def stages_of(choice: Choice) -> list[str]:
    """The stages that a night runs: the models that are not in the store yet, then the evals."""
    pinned = [subject.input_name for subject in choice.subjects if subject.model is None]
    return [*pinned, *(stage for subject in choice.subjects for stage in subject.evals)]


def nights_of(store: Store) -> list[RunRecord]:
    """The records of all nights, oldest first."""
    return [record for record in store.records_of_runs().values() if record.nightly is not None]


def earlier_nights(store: Store, name: str, limit: int) -> list[RunRecord]:
    """The records of the newest `limit` nights before this one that have scores, oldest first."""
    before = itertools.takewhile(lambda record: record.run != name, nights_of(store))
    return [record for record in before if record.night.scores][-limit:]


def cron_of(config: NightlyConfig) -> dict[str, Any]:
    """The schedule as Prefect takes it."""
    return {"cron": config.schedule, "timezone": zone_of(config.timezone)}


def read_switch(api: Api, deployment: str) -> dict[str, Any]:
    """The schedule of the deployment `nightly_eval`: `id`, `active`, `schedule`, `parameters`."""
    schedules = api.ask("GET", f"/deployments/{deployment}/schedules")
    if len(schedules) != 1:
        raise ServerError(
            f"The deployment of nightly_eval has {len(schedules)} schedules instead of one; remove what was added in "
            "Prefect's UI, or restart with: nanodag server stop; nanodag server start"
        )
    return schedules[0]


def turn(api: Api, deployment: str, *, active: bool, **changes: Mapping[str, Any]) -> None:
    """Turn the schedule on or off. changes: its `schedule` and `parameters`, kept when not given."""
    schedule = read_switch(api, deployment)
    api.ask("PATCH", f"/deployments/{deployment}/schedules/{schedule['id']}", {"active": active, **changes})


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
        # Nights, and the points of a sweep, must be named in full.
        fitting = [r for r in records if r.run == pattern or (not r.composed and fnmatch.fnmatchcase(r.run, pattern))]
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
    mirror = pipeline.mirror
    if mirror == "none" and mirrors:
        mirror, *others = set(mirrors.values())
        if others:
            pairs = ", ".join(f"{run} from {folder}" for run, folder in mirrors.items())
            raise ConfigError(
                f"The chosen runs read their data from different mirrors: {pairs}. Choose one: mirror=PATH."
            )
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


def _night_name(*parts: str) -> str:
    """A stage name out of labels and names: short names as they are, long ones cut, with a hash of the whole."""
    whole = "-".join(part for part in parts if part)
    name = re.sub(r"[^a-z0-9_-]", "-", whole.lower())
    if not name[0].isalpha():
        name = f"n{name}"
    if name == whole and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 7]}-{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:6]}"
