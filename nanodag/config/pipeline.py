"""One resolved pipeline: the DAG as a table, and what all its stages share."""

import re
from ipaddress import ip_address
from socket import inet_aton
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from nanodag.config.kinds.evaluation import EvalStage
from nanodag.config.kinds.import_model import ImportStage
from nanodag.config.kinds.midtrain import MidtrainStage
from nanodag.config.kinds.pretrain import PretrainStage
from nanodag.config.kinds.report import ReportStage
from nanodag.config.kinds.rl import RLStage
from nanodag.config.kinds.sft import SFTStage
from nanodag.config.kinds.tokenizer import TokenizerStage
from nanodag.config.nightly import NightlyConfig
from nanodag.config.section import Section
from nanodag.errors.words import listed, nearest

AnyStage = Annotated[
    ImportStage | TokenizerStage | PretrainStage | MidtrainStage | SFTStage | RLStage | EvalStage | ReportStage,
    Field(discriminator="kind"),
]


_STAGE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")


REQUIRED_INPUTS: dict[str, tuple[str, ...]] = {
    "import": (),
    "tokenizer": (),
    "pretrain": (),  # `tokenizer` or `model`, see its check_inputs
    "midtrain": ("model",),
    "sft": ("model",),
    "rl": ("model",),
    "eval": ("model",),
    "report": (),
}


_MODELS = ("import", "pretrain", "midtrain", "sft", "rl")  # kinds whose result is a model


INPUT_KINDS: dict[str, tuple[str, ...]] = {
    "tokenizer": ("tokenizer",),
    "model": _MODELS,
    "critic": _MODELS,
    "teacher": _MODELS,
}


TRAINING_KINDS = ("pretrain", "midtrain", "sft", "rl")


class ClusterConfig(Section):
    """Other machines, for stages with resources.nodes above 1. hostfile: DeepSpeed's, with lines as `worker-2 slots=8`;
    one of them is this machine. ssh_command: runs a command on {host}, without asking for a password."""

    hostfile: str = "none"
    ssh_command: str = "ssh -o BatchMode=yes -o ServerAliveInterval=15 {host}"

    @model_validator(mode="after")
    def _names_the_host(self) -> "ClusterConfig":
        if "{host}" not in self.ssh_command:
            raise ValueError(f"ssh_command {self.ssh_command!r} has no {{host}}; write it as in: ssh {{host}}")
        return self


class StoreConfig(Section):
    """url: a local path or an fsspec URL. local: workspaces and cache when the store is remote, `auto` for
    ~/.cache/nanodag. Relative paths begin at the pipeline file's folder, in overrides at the working directory.
    mirror_checkpoints: copy those of stages under way to a remote store, so that another machine can go on."""

    url: str = Field("store", min_length=1)
    local: str = Field("auto", min_length=1)
    mirror_checkpoints: bool = False

    @field_validator("url")
    @classmethod
    def _names_a_place(cls, url: str) -> str:
        scheme, separator, rest = url.partition("://")
        if separator and not rest.strip("/"):
            raise ValueError(f"{url!r} names no place after {scheme}://; give one, as in s3://bucket/folder")
        return url

    @model_validator(mode="after")
    def _has_somewhere_to_mirror(self) -> "StoreConfig":
        if self.mirror_checkpoints and ("://" not in self.url or self.url.startswith("file://")):
            raise ValueError(f"mirror_checkpoints needs a remote store; in {self.url} checkpoints are there already")
        return self


class ServerConfig(Section):
    """Prefect's server. host: the address or name that it listens on. password_file: a file with `user:password`, which
    it then asks for. database: `sqlite`, below the store's local folder, or postgresql+asyncpg://user@host/name; its
    password is PGPASSWORD's, or that of ~/.pgpass. proxy_names: host names under which a proxy offers it; all others
    but its own are refused. start_timeout_s: how long a process of it may start without a sign of progress."""

    port: int = Field(4200, ge=1024, le=65535)
    start_timeout_s: float = Field(120.0, gt=0)
    host: str = Field("127.0.0.1", min_length=1)
    proxy_names: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+$")], ...] = ()
    password_file: str = "none"
    database: str = "sqlite"

    @model_validator(mode="after")
    def _is_safe(self) -> "ServerConfig":
        if ":" in self.host:
            raise ValueError(f"host {self.host!r} is of IPv6, which is not built; use 127.0.0.1, or an IPv4 address")
        if _is_unspecified(self.host):
            raise ValueError(f"host {self.host!r} is every interface; name the one that others reach")
        if not _is_loopback(self.host) and self.password_file == "none":
            raise ValueError(
                f"host {self.host!r} can be reached from other machines, and whoever reaches Prefect's server runs "
                "commands here; set server.password_file"
            )
        if self.database != "sqlite":
            found = urlsplit(self.database)
            if found.scheme != "postgresql+asyncpg" or not found.hostname or not found.path.strip("/"):
                kind = found.scheme or "no scheme"
                raise ValueError(f"database ({kind}) is neither sqlite nor postgresql+asyncpg://user@host/name")
            if found.password or "password" in found.query:
                raise ValueError(
                    "database holds a password, which every run's record would show; leave it out and give it by "
                    "PGPASSWORD or ~/.pgpass"
                )
        return self


def _is_unspecified(host: str) -> bool:
    try:
        return inet_aton(host) == bytes(4)  # which reads `0` as the system does
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Pipeline(Section):
    """One resolved pipeline: the DAG as a table, and what is common to all stages.

    mirror: a folder laid out as `<hub name>/<config>/<split>.parquet` that hub sources are read from, `none` for the
    hub. Relative paths as in StoreConfig. trusted_modules: modules and packages whose functions may be named beside
    those next to the pipeline file; set in that file alone. unchecked: names of numbers that are meant though they look
    like slips, as rl.temperature (nanodag.config.ranges).
    """

    preset: str
    description: str = ""
    seed: int = Field(0, ge=0)
    mirror: str = "none"
    trusted_modules: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    store: StoreConfig = StoreConfig()
    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    nightly: NightlyConfig = NightlyConfig()
    stages: dict[str, AnyStage] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_a_dag(self) -> "Pipeline":
        for name, stage in self.stages.items():
            if not _STAGE_NAME.fullmatch(name) or name in type(self).model_fields:
                settings = ", ".join(type(self).model_fields)
                raise ValueError(f"stage name {name!r}: use small letters, digits, '-' and '_', and none of {settings}")
            self._check_inputs(name, stage)
            if isinstance(stage, PretrainStage):
                try:
                    stage.check_inputs()
                except ValueError as error:
                    raise ValueError(f"stages.{name}.{error}") from error
            self._check_machines(name, stage)
        order_of(self)
        return self

    def _check_inputs(self, name: str, stage: AnyStage) -> None:
        if missing := [label for label in REQUIRED_INPUTS[stage.kind] if label not in stage.inputs]:
            found = listed(stage.inputs)
            raise ValueError(f"stages.{name} of kind {stage.kind} needs the input {missing[0]}; found {found}")
        for label, source in stage.inputs.items():
            if source not in self.stages:
                near = nearest(source, self.stages) or f" The stages are {listed(self.stages)}."
                raise ValueError(f"stages.{name}.inputs.{label}: there is no stage {source!r}.{near}")
            if stage.kind == "report":  # over whatever there is
                continue
            if label not in INPUT_KINDS:
                near = nearest(label, INPUT_KINDS) or f" Inputs are {listed(INPUT_KINDS)}."
                raise ValueError(f"stages.{name}.inputs: there is no input {label!r}.{near}")
            if (kind := self.stages[source].kind) not in INPUT_KINDS[label]:
                fitting = [n for n, s in self.stages.items() if s.kind in INPUT_KINDS[label] and n != name]
                what = "a tokenizer" if label == "tokenizer" else "a model"
                raise ValueError(
                    f"stages.{name}.inputs.{label}: stage {source}, of kind {kind}, is not {what}; name one of "
                    f"{listed(fitting)}"
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
        for offload in ("offload_optimizer", "offload_param"):
            if getattr(stage.resources, offload) != "none" and stage.kind not in TRAINING_KINDS:
                raise ValueError(f"stages.{name}.resources.{offload}: a stage of kind {stage.kind} trains nothing")
        nodes = stage.resources.nodes
        if nodes > 1 and stage.kind not in TRAINING_KINDS:
            raise ValueError(f"stages.{name}.resources.nodes {nodes}: a stage of kind {stage.kind} runs on one machine")
        if nodes > 1 and stage.kind == "rl" and stage.sync == "distributed":
            raise ValueError(
                f"stages.{name}.sync: distributed broadcasts on this machine, and resources.nodes is {nodes}; use disk"
            )
        if nodes > 1 and self.cluster.hostfile == "none":
            raise ValueError(f"stages.{name}.resources.nodes {nodes} needs cluster.hostfile to say which machines")


def order_of(pipeline: Pipeline) -> list[str]:
    """Stage names so that inputs come first; otherwise in the file's order. Raises ValueError at a cycle."""
    order: list[str] = []
    while len(order) < len(pipeline.stages):
        ready = [
            n
            for n, s in pipeline.stages.items()
            if n not in order and all(source in order for source in s.inputs.values())
        ]
        if not ready:
            rest = sorted(set(pipeline.stages) - set(order))
            raise ValueError(f"stages {listed(rest)} wait for each other; a DAG has no cycle")
        order.append(ready[0])
    return order
