"""One resolved pipeline: the DAG as a table, and what all its stages share."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from socket import inet_aton
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, PlainValidator, SerializeAsAny, TypeAdapter, ValidationInfo
from pydantic_core import PydanticKnownError

from nanodag.config.kind import CONVERSATIONS, REWARD_MODEL
from nanodag.config.kinds import find_kind, known
from nanodag.config.nightly import NightlyConfig
from nanodag.config.rl_parts import RewardConfig
from nanodag.config.section import Auto, Seconds, Section, checked, found_in, full_name
from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig
from nanodag.data.urls import parse_url
from nanodag.errors.words import listed, nearest
from nanodag.inference.addresses import is_loopback

_NO_STORES = {"memory": "is gone when its process ends", **dict.fromkeys(("http", "https"), "cannot be written to")}
_WEBHOOK = re.compile(r"none|env:\w+|block:[a-z0-9-]+/[a-z0-9-]+")
_STAGE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")
# Trackers with a process of their own (nanodag.worker.tracker); TensorBoard only writes files.
SERVICES = ("wandb", "trackio", "mlflow")
PLACES = ("run", "stage", "kind", "preset", "build")
_PLACE = re.compile(r"\{([^{}]*)\}")


def _of_its_kind(raw: Any, info: ValidationInfo) -> StageBase:
    """A stage's table as the config class of the kind that it names, as strictly as it is read."""
    if isinstance(raw, StageBase):
        return raw
    if not isinstance(raw, dict):
        raise PydanticKnownError("dict_type")
    if "kind" not in raw:
        raise ValueError(f"has no `kind`, which says what the stage does: {listed(known())}")
    if not isinstance(raw["kind"], str):
        raise ValueError(f"kind must be text; found {raw['kind']!r:.80}")
    model = find_kind(raw["kind"]).config
    if info.mode == "json":  # a pipeline file: types are strict, and a list may stand for a tuple
        return model.model_validate_json(json.dumps(raw), strict=True)
    return model.model_validate(raw)


# A stage of any kind; what is read from a table, and written into one, has the fields of its kind.
AnyStage = Annotated[SerializeAsAny[StageBase], PlainValidator(_of_its_kind)]


def read_stage(raw: Mapping[str, Any]) -> StageBase:
    """A stage's config as it was written by `model_dump`. Raises ValidationError when it is none of its kind."""
    return TypeAdapter(AnyStage).validate_python(raw)


class ClusterConfig(Section):
    """Other machines, for stages with resources.nodes above 1."""

    hostfile: str = "none"
    """A hostfile of DeepSpeed's format, with lines such as `worker-2 slots=8`; one of them is this machine. `none`: no
    other machines. Variables, as in `$HOME/hosts-$SLURM_JOB_ID`, are filled in where the stage runs."""
    ssh_command: str = "ssh -o BatchMode=yes -o ServerAliveInterval=15 {host}"
    """The command that runs another one on {host} without asking for a password."""

    def check_settings(self) -> None:
        if "{host}" not in self.ssh_command:
            raise ValueError(f"ssh_command {self.ssh_command!r} has no {{host}}; write it as in: ssh {{host}}")


def _names_a_place(url: str) -> None:
    scheme, separator, rest = url.partition("://")
    if separator and not rest.strip("/"):
        raise ValueError(f"{url!r} names no place after {scheme}://; give one, as in s3://bucket/folder")
    if separator:
        from fsspec.registry import available_protocols  # slow to import, and a folder needs none

        if scheme in _NO_STORES:
            raise ValueError(f"{url!r} {_NO_STORES[scheme]}; give a folder, or one as s3://bucket/folder")
        if scheme not in (known := available_protocols()):
            near = nearest(scheme, known) or " Known are folders, and s3, gs, az and the others of fsspec."
            raise ValueError(f"{url!r}: there is no kind of store {scheme}://.{near}")


class StoreConfig(Section):
    """Store of artifacts and checkpoints."""

    url: Annotated[str, Field(min_length=1), checked(_names_a_place)] = "store"
    """The store: a folder or an fsspec URL. A relative path begins at the pipeline file's folder, in an override at the
    working directory."""
    local: str = Field("auto", min_length=1)
    """Folder of workspaces, and cache of a remote store; `auto` for ~/.cache/nanodag."""
    mirror_checkpoints: bool = False
    """Whether checkpoints of running stages are copied to a remote store, so that another machine can resume."""

    def check_settings(self) -> None:
        if self.mirror_checkpoints and ("://" not in self.url or self.url.startswith("file://")):
            raise ValueError(f"mirror_checkpoints needs a remote store; in {self.url} checkpoints are there already")


class DataSize(Section):
    """Size of a data set that is not generated. Files of a mirror, and parquet, say rows and row_bytes themselves."""

    url: str = Field(pattern=r"^\w+:")
    """The data set, as a source's URL has it, such as `hub:openai/gsm8k/main:train`."""
    rows: int = Field(0, ge=0)
    """All of its rows; 0 for a set whose end nobody reaches."""
    row_bytes: float = Field(1000.0, gt=0)
    """Bytes of text of a row, on average."""
    prompt_bytes: float = Field(0.0, ge=0)
    """Bytes of a row's prompt, on average; 0 counts a third of the row."""
    longest_prompt_bytes: int = Field(0, ge=0)
    """Bytes of the longest prompt; 0 where nobody knows."""


class PlanConfig(Section):
    """Inputs of `nanodag plan` that nobody can know before a run. They change no result."""

    groups_with_spread: Annotated[float, Field(ge=0, le=1)] | Auto = "auto"
    """Share of RL's groups whose rewards differ, where the filter nonzero_spread drops the others. `auto`: that of
    samples_per_prompt answers where nothing is known of how often the model is right, 0.61 of 8 and 0.72 of 16."""
    answer_share: float = Field(0.5, gt=0, le=1)
    """Mean length of answers, as a share of the longest one."""
    data: tuple[DataSize, ...] = ()
    """Sizes of data sets. A set that is not here, nor in a mirror, leaves its columns empty."""


class ServerConfig(Section):
    """Prefect's server."""

    port: int = Field(4200, ge=1024, le=65535)
    """Port of Prefect's server."""
    start_timeout_s: Seconds = 120.0
    """Seconds without a sign of progress after which the server's start has failed."""
    host: str = Field("127.0.0.1", min_length=1)
    """Address or name that the server listens on."""
    proxy_names: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+$")], ...] = ()
    """Host names under which a proxy offers the server; it refuses all others but its own."""
    password_file: str = "none"
    """A file with `user:password` that the server then asks for; `none` for no login."""
    database: str = "sqlite"
    """`sqlite`, in the server's folder, or postgresql+asyncpg://user@host/name; the password comes from PGPASSWORD or
    ~/.pgpass."""
    folder: str = Field("auto", min_length=1)
    """Folder of the server's database and logs; `auto`: `prefect` in the store's local folder. It must lie on a disk
    of one machine where several share the store: SQLite needs the locks of a local disk."""

    agents_of_file: bool = False
    """Whether an agent's `command`, `folder`, `library` and `python` stand in the pipeline file alone. Else an override
    may set them too, as a flow run's parameter. An override cannot set this."""

    def check_settings(self) -> None:
        if ":" in self.host:
            raise ValueError(f"host {self.host!r} is of IPv6, which is not built; use 127.0.0.1, or an IPv4 address")
        with suppress(OSError):  # no address
            if inet_aton(self.host) == bytes(4):  # which reads `0` as the system does
                raise ValueError(f"host {self.host!r} is every interface; name the one that others reach")
        if not is_loopback(self.host) and self.password_file == "none":
            raise ValueError(
                f"host {self.host!r} can be reached from other machines, and who reaches Prefect's server runs "
                "commands here; set server.password_file"
            )
        if self.database != "sqlite":
            url = urlsplit(self.database)
            if url.scheme != "postgresql+asyncpg" or not url.hostname or not url.path.strip("/"):
                kind = url.scheme or "no scheme"
                raise ValueError(f"database ({kind}) is neither sqlite nor postgresql+asyncpg://user@host/name")
            if url.password or "password" in url.query:
                raise ValueError(
                    "database holds a password, which every run's record would show; leave it out and give it by "
                    "PGPASSWORD or ~/.pgpass"
                )


def _fills_what_there_is(text: str) -> None:
    if unknown := [place for place in _PLACE.findall(text) if place not in PLACES]:
        places = listed(f"{{{place}}}" for place in PLACES)
        raise ValueError(f"{text!r} has {{{unknown[0]}}}, which nothing fills in; there are {places}")


def _tells_apart(text: str) -> None:
    _fills_what_there_is(text)
    if "{stage}" not in text:
        raise ValueError(f"{text!r} is one id for all stages, which would write into one run; put {{stage}} in it")


Template = Annotated[str, Field(min_length=1, max_length=200), checked(_fills_what_there_is)]


class TrackingConfig(Section):
    """Trackers that get the metrics, beside metrics.jsonl. Each stage is one run of a tracker. In group, name and id
    `{run}`, `{stage}`, `{kind}`, `{preset}` and `{build}` are filled in."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ("tensorboard",)
    """`tensorboard` writes files beside the metrics, `wandb` is Weights & Biases, `trackio` Hugging Face's. All
    but the first are packages of their own."""
    project: str = Field("nanodag", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")
    """The tracker's project."""
    entity: str = Field("none", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """The team or user of W&B; `none`: that of the login."""
    group: Template = "{run}"
    """What the stages of one run have in common."""
    name: Template = "{run}/{stage}"
    """The name of a stage's run in W&B and MLflow. Trackio tells runs apart by their names, so there it is the id."""
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.{}-]{1,100}$"), checked(_tells_apart)] = "{run}-{stage}-{build}"
    """What a stage's run is known by, and continued under after a retry. `{build}` is new for each build; without it
    every build of the stage writes into one run."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Tags of every stage's run."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: W&B writes files under the store's local folder and sends nothing; `wandb sync` does that later."""


def filled(template: str, **places: str) -> str:
    """A template with its places filled in."""
    return _PLACE.sub(lambda match: places[match[1]], template)


def _is_no_secret(webhook: str) -> None:
    if _WEBHOOK.fullmatch(webhook):
        return
    if "://" in webhook:  # not shown
        raise ValueError(
            "an address is often a secret, and what stands here is kept in the records of runs: set it in an "
            "environment variable and write env:NAME"
        )
    raise ValueError(f"{webhook!r} is neither none, env:NAME nor block:TYPE/NAME")


class NotifyConfig(Section):
    """Messages on a run, sweep or night that failed, and on a night that got worse."""

    webhook: Annotated[str, checked(_is_no_secret)] = "none"
    """Where a message goes: `env:NAME` for an address in an environment variable, `block:TYPE/NAME` for a notification
    block of Prefect's such as `block:slack-webhook/team`, or `none`."""


class Pipeline(Section):
    """One resolved pipeline: the DAG as a table, and what is common to all stages."""

    preset: str
    """The preset's name."""
    description: str = ""
    """What the preset is for, in a line."""
    seed: int = Field(0, ge=0)
    """Seed of all stages whose seed is auto."""
    device: Literal["cpu", "cuda"] | Auto = "auto"
    """The kind of device of all stages whose own is auto: `cpu` or `cuda`. `auto`: the machine's GPUs where it has
    some."""
    mirror: str = "none"
    """A folder read from instead of hub and web: `<hub name>/<config>/<split>.parquet`, `<host>/<path>.zip`; `none`: no
    mirror. A relative path begins at the pipeline file's folder, in an override at the working directory."""
    core_bundle: Annotated[str, Field(min_length=1)] = "none"
    """CORE's items: the files of its 22 tasks, such as hellaswag.jsonl, at any depth (nanochat's eval_bundle). An
    archive's URL, `https://host/path.zip`, or a folder. `none`: CORE is left out of every stage, and a warning says so.
    A relative path begins at the pipeline file's folder, in an override at the working directory."""
    trusted_modules: tuple[str, ...] = ()
    """Modules and packages whose functions may be named, beside the modules next to the pipeline file. An override
    cannot set it."""
    unchecked: tuple[str, ...] = ()
    """Settings that are meant although the plan says that they do not fit the machine, such as
    pretrain.micro_batch_tokens."""
    store: StoreConfig = StoreConfig()
    """Where artifacts and checkpoints stay."""
    server: ServerConfig = ServerConfig()
    """Prefect's server."""
    cluster: ClusterConfig = ClusterConfig()
    """Other machines."""
    tracking: TrackingConfig = TrackingConfig()
    """Trackers that get the metrics."""
    nightly: NightlyConfig = NightlyConfig()
    """Evaluation by schedule."""
    notify: NotifyConfig = NotifyConfig()
    """Who hears of what failed or got worse."""
    plan: PlanConfig = PlanConfig()
    """Inputs of `nanodag plan`."""
    stages: dict[str, AnyStage] = Field(min_length=1)
    """The DAG: stage name -> stage."""

    def check_settings(self) -> None:
        for name, stage in self.stages.items():
            if not _STAGE_NAME.fullmatch(name) or name in type(self).model_fields:
                settings = ", ".join(type(self).model_fields)
                raise ValueError(f"stage name {name!r}: use small letters, digits, '-' and '_', and none of {settings}")
            self._check_inputs(name, stage)
            try:
                stage.check_inputs()
            except ValueError as error:
                raise ValueError(f"stages.{name}.{error}") from error
            self._check_machines(name, stage)
        order_of(self)

    def _check_inputs(self, name: str, stage: AnyStage) -> None:
        kind = find_kind(stage.kind)
        if missing := [label for label in kind.needs if label not in stage.inputs]:
            labels = listed(stage.inputs)
            raise ValueError(f"stages.{name} of kind {stage.kind} needs the input {missing[0]}; found {labels}")
        for label, source in stage.inputs.items():
            if source not in self.stages:
                near = nearest(source, self.stages) or f" The stages are {listed(self.stages)}."
                raise ValueError(f"stages.{name}.inputs.{label}: there is no stage {source!r}.{near}")
            if kind.takes_what_exists:
                continue
            if (product := kind.product_of(label)) is None:
                near = nearest(label, kind.inputs) or f" Inputs of kind {stage.kind} are {listed(kind.inputs)}."
                raise ValueError(f"stages.{name}.inputs: there is no input {label!r}.{near}")
            if find_kind(self.stages[source].kind).makes != product:
                makers = [n for n, s in self.stages.items() if find_kind(s.kind).makes == product]
                raise ValueError(
                    f"stages.{name}.inputs.{label}: stage {source}, of kind {self.stages[source].kind}, is not a "
                    f"{product}; name one of {listed(n for n in makers if n != name)}"
                )

        rewards = list(found_in(stage, RewardConfig))
        for where, reward in rewards:
            if (label := reward.from_input) and (label not in stage.inputs or kind.product_of(label) != REWARD_MODEL):
                raise ValueError(
                    f"stages.{name}.{where}: {reward.name} needs an input {label!r} that a stage of kind reward_model "
                    "makes; say inputs: {reward_model: STAGE} and model:input:reward_model"
                )

        judges = {reward.from_input for _, reward in rewards}
        if idle := [label for label in stage.inputs if kind.product_of(label) == REWARD_MODEL and label not in judges]:
            raise ValueError(f"stages.{name}.inputs.{idle[0]} judges nothing; say reward: model:input:{idle[0]}")

        for where, read in found_in(stage, SourceConfig):
            if not read.url.startswith("input:"):
                continue
            label = parse_url(read.url).path
            if label not in stage.inputs or kind.product_of(label) != CONVERSATIONS:
                raise ValueError(
                    f"stages.{name}.{where}: {read.url} needs an input {label!r} that a stage of kind select makes; "
                    "say inputs: {conversations: STAGE} and input:conversations, in a stage that trains on such"
                )
            pairs = getattr(self.stages[stage.inputs[label]], "pairs", None)
            if (
                read.adapter == "auto"
                and pairs is not None
                and (pairs != "none") != (stage.record_kind in ("preference", "judgement"))
            ):
                raise ValueError(
                    f"stages.{name}.{where}: stage {stage.inputs[label]} has pairs: {pairs}; kinds preference and "
                    "reward_model train on pairs, others on the best answers"
                )

    def _check_machines(self, name: str, stage: AnyStage) -> None:
        if (pool := stage.resources.work_pool) != "none" and self.server.database == "sqlite":
            raise ValueError(
                f"stages.{name}.resources.work_pool {pool!r} needs server.database on Postgres: in Prefect 3.8.8 the "
                "workers of a pool make the API time out on SQLite"
            )
        if pool != "none" and "://" in self.store.url:
            raise ValueError(
                f"stages.{name}.resources.work_pool {pool!r} needs a store in a folder that all machines share: of "
                f"{self.store.url} each has a copy of the run's record, and they would overwrite one another's"
            )
        trains = find_kind(stage.kind).trains
        nodes = stage.resources.num_nodes
        for offload in ("offload_optimizer", "offload_param"):
            if getattr(stage.resources, offload) == "cpu" and not trains:
                raise ValueError(f"stages.{name}.resources.{offload}: a stage of kind {stage.kind} trains nothing")
        if nodes > 1 and not trains:
            raise ValueError(f"stages.{name}.resources.nodes {nodes}: a stage of kind {stage.kind} runs on one machine")
        for setting, count in stage.machines.items() if self.cluster.hostfile == "none" else ():
            raise ValueError(f"stages.{name}.{setting} {count} needs cluster.hostfile to say which machines")


def order_of(pipeline: Pipeline) -> list[str]:
    """Stage names so that inputs come first; otherwise in the file's order. Raises ValueError at a cycle."""
    numbers = {name: number for number, name in enumerate(pipeline.stages)}
    sorter = TopologicalSorter({name: stage.inputs.values() for name, stage in pipeline.stages.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        names = listed(sorted(set(error.args[1])))
        raise ValueError(f"stages {names} wait for each other; a DAG has no cycle") from None
    ready: list[str] = []
    order = []
    while sorter.is_active():
        ready = sorted((*ready, *sorter.get_ready()), key=numbers.__getitem__)
        order.append(ready.pop(0))
        sorter.done(order[-1])
    return order


def full_path(stages: Mapping[str, StageBase], name: str) -> str:
    """`rl.algorithm.clip_high` for `rl.clip_high`; what is no stage's as it is."""
    stage, _, setting = name.partition(".")
    return f"{stage}.{full_name(type(stages[stage]), setting)}" if setting and stage in stages else name
