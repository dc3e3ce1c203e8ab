"""Nights as runs of the store: which one is due, who runs it, what earlier ones found, and the schedule's switch.

The switch is in Prefect, where its UI turns it too. Serving again keeps it, until the nightly section changes.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from nanodag.config import Pipeline, resolve
from nanodag.config.derive_sampler import this_machine
from nanodag.config.nightly import NightlyConfig, last_due, zone_of
from nanodag.errors import ConfigError, ServerError, StoreBusy
from nanodag.nightly.choose import Choice, choose, night_pipeline
from nanodag.run.derived_runs import machine_for, open_composed
from nanodag.run.preflight import check_before_start
from nanodag.run.record import Run, pipeline_file, store_of
from nanodag.server.prefect_api import Api
from nanodag.store import Store
from nanodag.store.atomic import locked
from nanodag.store.run_record import NightRecord, RunRecord

PREFIX = "nightly-"


class Night:
    """A night that this process runs. Not a dataclass, so that what carries it about does not look inside.

    settings: the pipeline whose `nightly` section asked for it. stages: what is run, the pinned models first.
    """

    def __init__(self, run: Run, settings: Pipeline, choice: Choice) -> None:
        self.run = run
        self.settings = settings
        self.subjects = choice.subjects
        self.stages = stages_of(choice)


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
    check_before_start(pipeline, file=file, remembered=store.local / "checked", stages=stages_of(choice))


def check_night(night: Night) -> None:
    """Raise ConfigError with a line for each thing that a stage of it would fail for; its record says so, too."""
    store, name = night.run.store, night.run.name
    try:
        file, remembered = Path(store.read_run(name).file), store.local / "checked"
        check_before_start(night.run.pipeline, file=file, remembered=remembered, stages=night.stages)
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
    for night in nights:
        if night.run == name and night.is_alive and night.pid != os.getpid():
            raise StoreBusy(f"Night {name} is under way in process {night.pid}; wait for it, or stop it.")
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
