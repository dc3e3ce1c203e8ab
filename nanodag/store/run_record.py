"""Records of runs (`runs/<run>.json`): one run, its stages, and every artifact that `gc` must keep for it.

A record is checked as a whole when it is read. One of another format, or with a field that does not fit, is refused by
its file's name. A record is never edited: `changed` and `with_stage` return another one.
"""

import itertools
import re
import socket
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from nanodag.config.section import found_in
from nanodag.errors import CorruptArtifact, StoreError
from nanodag.store.manifest import ATTEMPT
from nanodag.store.provenance import is_alive

RECORD_FORMAT: Final = 2
ENDED_WELL = ("built", "found")

KEY = re.compile("[0-9a-f]{40}$")
Key = Annotated[str, Field(pattern=f"^{KEY.pattern}")]
Attempt = Annotated[str, Field(pattern=f"^{ATTEMPT.pattern}")]
StageState = Literal["waiting", "running", "built", "found", "failed", "stopped", "not run"]
RunState = Literal["running", "completed", "failed", "stopped", "interrupted", "unfinished"]


class ArtifactReference(NamedTuple):
    """Reference that keeps an artifact alive: one attempt; without one every attempt under the key, and the key's
    workspace."""

    key: Key
    attempt: Attempt | None = None


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    def changed(self, **fields: Any) -> Self:
        """The same with these fields changed, checked as a whole."""
        return type(self)(**{**dict(self), **fields})


class Made(_Part):
    """Result that a stage was finished with. inputs: label -> content digest of what it was made from. config: digest
    of the config that it was made with. took_s: what finding or building it took, without the wait for a device."""

    attempt: Attempt
    digest: str
    inputs: dict[str, str] = {}
    config: str = ""
    num_bytes: int = 0
    cost: dict[str, Any] = {}
    took_s: float = -1.0

    def cost_of(self, name: str, default: float = -1.0) -> float:
        """One of the costs that are numbers, such as `seconds`."""
        return float(self.cost.get(name, default))


class StageRecord(_Part):
    """One stage of a run.

    config: digest of its config as the run has it now; empty for a page. started, ended: seconds since 1970, 0 where it
    has not. earlier_s: what earlier tries took. key: empty until it is known. workspace: the folder of the last try.
    worker: of a work pool. forced: the flow run that forced it, and the key. made: what it was finished with under
    `key`, also by an earlier run of this name.
    """

    kind: str
    inputs: dict[str, str] = {}
    config: str = ""
    state: StageState = "waiting"
    reason: str = ""
    started: float = 0.0
    ended: float = 0.0
    earlier_s: float = 0.0
    key: Key | Literal[""] = ""
    workspace: str = ""
    worker: str = ""
    forced: tuple[str, Key] | None = None
    made: Made | None = None

    @model_validator(mode="after")
    def _made_has_a_key(self) -> Self:
        if self.made is not None and not self.key:
            raise ValueError("it has an attempt and no key")
        return self

    @property
    def has_ended_well(self) -> bool:
        return self.state in ENDED_WELL

    @property
    def artifact(self) -> tuple[Key, Attempt] | None:
        """Key and attempt that it was finished with, whatever it is doing now."""
        return (self.key, self.made.attempt) if self.made is not None else None

    @property
    def reference(self) -> ArtifactReference | None:
        """Reference to what must stay for it: of a stage that is not finished all that there is under its key."""
        if self.has_ended_well and self.artifact is not None:
            return ArtifactReference(*self.artifact)
        return ArtifactReference(self.key) if self.key else None


class PointRecord(_Part):
    """A point of a sweep. number: from 1. overrides: its own. stages: the preset's stage -> the sweep's."""

    number: int
    overrides: tuple[str, ...]
    stages: dict[str, str]


class SweepRecord(_Part):
    """Part of a record that makes a run a sweep. stage: the one that is compared."""

    stage: str
    points: tuple[PointRecord, ...]


class NightScore(_Part):
    """A score of a night: label, stage, eval and benchmark name its line of the trend; run is where the model is from;
    key, attempt and digest are the eval's artifact, in which the samples lie."""

    label: str
    stage: str
    eval: str
    benchmark: str
    run: str
    metric: str
    higher_is_better: bool
    form: str
    chat: bool
    num_fewshot: int
    sampling: str = "greedy"
    value: float
    stderr: float
    low: float
    high: float
    num_items: int
    key: Key
    attempt: Attempt
    digest: str
    was_found: bool


class NightRecord(_Part):
    """Part of a record that makes a run a night. due: when its schedule was due, or when it was asked for; missing:
    what could not be evaluated, and why; stale: which models are stale in their runs."""

    by_schedule: bool
    due: float
    missing: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    scores: tuple[NightScore, ...] = ()


class RunRecord(_Part):
    """One run.

    number: orders runs whatever clocks say; the store gives it. pipeline: the resolved one, as nanodag.config.Pipeline
    dumps it. stages: inputs first. before: what the record that this one replaced kept alive; it stays until the run
    has completed. uses: artifacts that the pipeline names by a path into the store. pid, pid_started: the process that
    executes the run, or did, on the machine named `host`. machine: what its `auto` followed from, as
    nanodag.host.machine.machine_of reads it.
    """

    format: Literal[2] = RECORD_FORMAT
    number: int = 0
    run: str
    created: float
    started: float
    ended: float = 0.0
    state: RunState
    reason: str = ""
    file: str
    preset: str
    overrides: tuple[str, ...]
    pipeline: dict[str, Any]
    origins: dict[str, str]
    machine: str
    stages: dict[str, StageRecord]
    before: tuple[ArtifactReference, ...] = ()
    uses: tuple[ArtifactReference, ...] = ()
    revision: str
    flow_run: str
    pid: int
    pid_started: float
    host: str = ""
    sweep: SweepRecord | None = None
    nightly: NightRecord | None = None

    @property
    def composed(self) -> str:
        """`sweep` or `nightly` for a run that was put together in code, empty for one of a pipeline file."""
        return "sweep" if self.sweep is not None else "nightly" if self.nightly is not None else ""

    @property
    def is_alive(self) -> bool:
        """True when the process that executes the run is alive on this machine."""
        return self.state == "running" and is_alive(self.pid, self.pid_started)

    @property
    def is_gone(self) -> bool:
        """True when the process that executed the run on this machine is gone. Those of another one cannot be seen from
        here: then nobody knows."""
        return self.state == "running" and not self.is_alive and self.host in ("", socket.gethostname())

    @property
    def night(self) -> NightRecord:
        """Part that makes it a night; asked for only of runs that are one."""
        assert self.nightly is not None
        return self.nightly

    def with_stage(self, stage: str, **fields: Any) -> "RunRecord":
        return self.changed(stages={**self.stages, stage: self.stages[stage].changed(**fields)})

    def references(self) -> Iterator[ArtifactReference]:
        """Every artifact, and every key under way, that must stay as long as this record does."""
        yield from (entry.reference for entry in self.stages.values() if entry.reference is not None)
        yield from self.before
        yield from self.uses
        if self.nightly is not None:
            yield from (ArtifactReference(score.key, score.attempt) for score in self.nightly.scores)


def references_in(values: Any) -> Iterator[ArtifactReference]:
    """Every artifact that a path somewhere in these plain values leads into, such as a model in the store's folder."""
    for _, text in found_in(values, str):
        for key, attempt in itertools.pairwise(text.split("/")):
            if KEY.fullmatch(key) and ATTEMPT.fullmatch(attempt):
                yield ArtifactReference(key, attempt)


def parse_record(text: str, run: str, url: str) -> RunRecord:
    """The record that a file's text holds.

    Raises StoreError for a record of another format, CorruptArtifact, which is one, naming the first field that does
    not fit.
    """
    where = f"The record runs/{run}.json in {url}"
    try:
        raw = from_json(text.encode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise CorruptArtifact(f"{where} is damaged: it is no JSON ({error}). {_REMOVE}") from None
    version = raw.get("format", "none") if isinstance(raw, dict) else "none"
    if version != RECORD_FORMAT:
        raise StoreError(
            f"{where} has format {version}; this nanodag reads format {RECORD_FORMAT}. Use the nanodag that wrote it, "
            "or remove it if it is of no use."
        )
    try:
        record = RunRecord.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CorruptArtifact(f"{where} is damaged: {field}: {first['msg']}. {_REMOVE}") from None
    if record.run != run:
        raise CorruptArtifact(f"{where} is damaged: it is the record of run {record.run!r}. {_REMOVE}")
    return record


_REMOVE = "Remove it if it is of no use, then run again."
