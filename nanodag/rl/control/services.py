"""Services of the controller: the trainer's ranks, samplers, the reward pool. Started together. No torch."""

import asyncio
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from nanodag.config.derive_sampler import SGLANG_STATIC
from nanodag.config.kinds.rl import RLStage
from nanodag.config.pipeline import ClusterConfig
from nanodag.engines.external import ExternalServers, Needed
from nanodag.engines.fleet import Fleet
from nanodag.engines.named_adapters import NamedAdapters
from nanodag.engines.sampler_node import SamplerNode
from nanodag.engines.start import ServerProcess, cache_tokens, start_engine, start_engines
from nanodag.errors import ConfigError
from nanodag.errors.words import counted
from nanodag.host.folders import PRIVATE
from nanodag.host.machine import visible_gpus
from nanodag.host.ports import LOOPBACK, address_towards, free_port, network_environment, own_address
from nanodag.host.processor import numerics
from nanodag.host.threads import LoopThread
from nanodag.inference.addresses import parse_address
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_install import TITLES, Device, find_python
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.number_formats import DTYPES
from nanodag.model.architecture import check_sglang, read_checkpoint
from nanodag.rewards.reward_pool import RewardPool
from nanodag.rl.control.memory_turns import Lending
from nanodag.rl.control.model_facts import SHARED_MEMORY, ModelFacts, sync_folder
from nanodag.rl.sync.broadcast_sync import DistributedSync, SharedSync
from nanodag.rl.sync.weight_sync import DiskSync
from nanodag.rl.trainer.link import ADDRESS_VARIABLE, RankLink
from nanodag.worker.children import Children
from nanodag.worker.job import Job, stop_requested
from nanodag.worker.launch import worker_environment
from nanodag.worker.nodes import Nodes, sampler_hosts

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
BY_BUCKETS = ("distributed", "ipc")  # ways of weights; all else is by a folder
BEFORE_THE_FIRST = -1  # the version of what samplers start with: the trainer's first weights may be rounded


@dataclass(frozen=True)
class Places:
    """Values of CUDA_VISIBLE_DEVICES. trainer: of every rank on this node, which takes the one of its local rank.
    samplers: of each sampler, its own alone."""

    trainer: str
    samplers: tuple[str, ...]

    def senders(self, num_ranks: int) -> list[list[int]]:
        """For each sampler the trainer's ranks on its GPUs, in its ranks' order: memory of a GPU can be shared with who
        is there alone. num_ranks: of this node. Raises ConfigError for a sampler on a GPU without a rank."""
        rank_of = {gpu: rank for rank, gpu in enumerate(self.trainer.split(",")[:num_ranks])}
        each = [gpus.split(",") for gpus in self.samplers]
        if alone := [gpu for gpus in each for gpu in gpus if gpu not in rank_of]:
            raise ConfigError(
                f"weights.sync: ipc, and a sampler is on GPU {alone[0]}, where no rank of the trainer is (they are on "
                f"{', '.join(rank_of)}). Lower sampler.replicas, or use weights.sync: disk."
            )
        return [[rank_of[gpu] for gpu in gpus] for gpus in each]


def places_of(
    gpus: Sequence[str], *, own: Sequence[int], num_ranks: int, replicas: int, tensor_parallel: int = 1
) -> Places:
    """The places of a stage's processes on one node. gpus: that the stage has there, as CUDA_VISIBLE_DEVICES names
    them. own: those of samplers alone, by number; none where samplers are on the trainer's, one after the other and
    then from the first again. num_ranks: of this node. Raises ConfigError where a side has too few."""
    if missing := [number for number in own if number >= len(gpus)]:
        raise ConfigError(
            f"sampler.gpus names GPU {missing[0]}, and the stage has {len(gpus)} ({', '.join(gpus)}). Lower it, or let "
            "the stage have more of the node's GPUs."
        )
    trainers = [gpu for number, gpu in enumerate(gpus) if number not in own]
    samplers = [gpus[number] for number in own] or list(gpus)
    if len(trainers) < num_ranks and own:
        raise ConfigError(
            f"{num_ranks} ranks have {len(trainers)} GPUs beside the samplers' {len(samplers)} "
            f"({', '.join(samplers)}). Lower resources.num_ranks or sampler.gpus."
        )
    if len(samplers) < tensor_parallel:
        raise ConfigError(
            f"sampler.tensor_parallel {tensor_parallel} splits a model over more than the {len(samplers)} GPUs that "
            f"samplers have here ({', '.join(samplers)}). Lower it, or raise sampler.gpus."
        )
    firsts = [number * tensor_parallel for number in range(replicas)]
    return Places(
        trainer=",".join(trainers),
        samplers=tuple(
            ",".join(samplers[(first + n) % len(samplers)] for n in range(tensor_parallel)) for first in firsts
        ),
    )


class Services:
    """Everything that a stage starts. Use as a context manager: whatever happens, nothing is left running."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._config: RLStage = job.config
        self._has_trainer, self._has_samplers = self._config.has_trainer, self._config.has_samplers
        self._gives_adapters = self._config.weights.lora_sync == "adapter"
        self._device = cast(Device, self._config.resources.device)
        self.num_samplers = int(self._config.sampler.replicas) if self._has_samplers else 0  # processes of this stage
        self.children = Children(is_stopping=stop_requested)
        self.model = ModelFacts.read(job.inputs["model"])
        self.context = min(int(self._config.sampler.context), self.model.max_positions)
        if self.context <= self._config.rollout.max_new_tokens:
            raise ConfigError(
                f"max_new_tokens {self._config.rollout.max_new_tokens} leaves no room for a prompt in a context of "
                f"{self.context} tokens (the smaller of sampler.context and the model's max_position_embeddings). "
                "Lower max_new_tokens."
            )
        if self._config.sampler.engine == "embedded" and self._device == "cuda":
            why = f"nanodag config --explain {job.name}.sampler.engine"
            log.warning("Samplers are the embedded ones, which are slower on a GPU than SGLang; why: %s", why)
        sampler = self._config.sampler
        if sampler.engine in TITLES:
            if self.num_samplers:
                find_python(sampler.python, self._device, sampler.engine)  # MissingTool now
            if sampler.engine == "sglang":
                check_sglang(job.inputs["model"], self.context, f"{job.name}.sampler.engine")
            self._check_class()
        self._addresses = [parse_address(text) for text in sampler.urls]  # of servers of others
        self._urls_file = None if sampler.urls_file == "none" else Path(os.path.expandvars(sampler.urls_file))
        self._cluster = ClusterConfig(**job.context["cluster"]) if sampler.nodes else ClusterConfig()
        self._hosts = sampler_hosts(self._cluster, self._config.resources, sampler.nodes) if sampler.nodes else []
        self._samplers_each = -(-self.num_samplers // max(1, len(self._hosts)))  # as many on each node that has some
        self.sync_folder = sync_folder(
            job.workspace,
            self.model.num_bytes,
            num_copies=2 + self._config.rollout.max_staleness,
            is_shared=bool(self._hosts or self._urls_file or not all(address.is_here for address in self._addresses)),
        )
        self._network = self._find_network()
        self._token = secrets.token_hex(16)  # of this stage: samplers answer nobody else
        self._servers: list[ServerProcess] = []
        self._places = self._find_places() if self._device == "cuda" else None
        self._nodes = Nodes(job) if self._config.resources.num_nodes > 1 else None
        host = "127.0.0.1" if self._nodes is None else self._nodes.address
        self.link = RankLink(int(self._config.resources.num_ranks) if self._has_trainer else 0, host=host)

    def __enter__(self) -> "Services":
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        self.end()

    def _start(self) -> None:
        """Start all at once: importing torch twice, one after the other, would be half of a short stage."""
        shutil.rmtree(self.sync_folder, ignore_errors=True)
        # In the workspace the store's folder says who may read; servers of others do.
        self.sync_folder.mkdir(mode=PRIVATE if self.sync_folder.parent == SHARED_MEMORY else 0o777, parents=True)
        if self._has_trainer:
            self._start_trainer()
        is_lent = self._config.placement == "shared" and self._has_trainer and self._has_samplers
        if is_lent:  # a trainer that starts has all of the memory; when it is ready it has none
            self.link.accept(timeout_s=START_TIMEOUT_S, check=self.children.check)
        model, version = self._job.inputs["model"], BEFORE_THE_FIRST if self._has_trainer else 0
        loop = LoopThread("services").loop
        engines = start_engines(lambda number: self._launch(number, model, version), self.num_samplers)
        starting = asyncio.run_coroutine_threadsafe(engines, loop)
        is_attached = self._has_samplers and self._config.sampler.has_others
        external = self._external_servers() if is_attached else None
        looked = None if external is None else asyncio.run_coroutine_threadsafe(external.first_look(), loop)
        self.pool = RewardPool(
            {entry.name: entry.weight for entry in self._config.reward},
            how=self._config.combine_rewards,
            options={entry.name: entry.options for entry in self._config.reward},
            num_processes=self._config.rollout.reward_processes,
            timeout_s=self._config.rollout.reward_timeout_s,
        )
        if looked is not None:
            looked.result()
        if not is_lent:
            self.link.accept(timeout_s=START_TIMEOUT_S, check=self.children.check)
        self._servers = starting.result()
        self.samplers = Fleet(
            self._servers,
            model=self._job.inputs["model"],
            version=version,
            launch=self._launch,
            connect=self._connect,
            is_stopping=stop_requested,
            health_timeout_s=self._config.sampler.health_timeout_s,
            max_restarts=self._config.sampler.max_restarts,
            pause=None if self._config.weights.sync_mode == "finish" else self._config.weights.sync_mode,
            external=external,
        )
        self.sync = self._make_sync()
        self.lending = Lending(self.samplers, self.link.exchange, is_lent=is_lent)
        others = "" if external is None else f"; {counted(len(external.named()), 'server')} of others are named"
        log.info("%d trainer ranks and %d samplers are up%s.", self.link.num_ranks, self.num_samplers, others)

    def _make_sync(self) -> DiskSync:
        config, ask = self._config, self.link.exchange
        options: dict[str, Any] = {"check_every": int(config.weights.sync_check_every)}
        options["gives_adapters"] = self._gives_adapters
        if config.weights.sync not in BY_BUCKETS:
            return DiskSync(self.samplers, ask, **options)
        options |= {
            "timeout_s": config.weights.sync_timeout_s,
            "address": "" if config.weights.sync_address == "auto" else self._network,
            "backend": config.weights.sync_backend,
            "is_beside": config.sampler.engine != "sglang",  # SGLang loads each bucket as it comes
        }
        if config.weights.sync == "distributed":
            return DistributedSync(self.samplers, ask, **options)
        ranks_here = int(config.resources.num_ranks) // config.resources.num_nodes
        senders = () if self._places is None or self._hosts else self._places.senders(ranks_here)
        return SharedSync(self.samplers, ask, senders=senders, **options)

    def _check_class(self) -> None:
        """Raise ConfigError for ways of weights that guests do not take of a class of transformers: they read tensors
        as in checkpoints, where experts lie apart, and are not asked for their fingerprints in their own layout."""
        is_class = read_checkpoint(self._job.inputs["model"]).architecture.model_code == "transformers"
        needs: dict[str, Any] = {"sync": "disk", "sync_check_every": 0}
        if self._config.sampler.engine == "sglang":
            needs["lora_sync"] = "merged"  # it is told which of our decoder's matrices have adapters
        for setting, needed in needs.items():
            found = getattr(self._config.weights, setting)
            if is_class and found != needed:
                raise ConfigError(
                    f"{self._job.name}.weights.{setting} is {found}; a model of model_code transformers with "
                    f"engine {self._config.sampler.engine} needs {needed}; set it to that."
                )

    def _find_network(self) -> str:
        """This machine's address as all members of a group of weights reach it: loopback where they are all here."""
        named = self._config.weights.sync_address
        if self._config.weights.sync != "distributed":
            return LOOPBACK
        elsewhere = [urlsplit(address.url).hostname or "" for address in self._addresses if not address.is_here]
        try:
            if named != "auto":
                return own_address(named)
        except ValueError as error:
            raise ConfigError(f"weights.sync_address: {error}.") from error
        for host in (*self._hosts, *elsewhere):
            with suppress(OSError):  # a name that is not known now
                return address_towards(host)
        return LOOPBACK

    def end(self) -> None:
        """End everything that was started."""
        self.children.release()
        if hasattr(self, "samplers"):
            self.samplers.close()
        for server in self._servers:
            server.stop()
        self.link.close()
        self.children.end()
        if self._nodes is not None:
            self._nodes.close()
        if hasattr(self, "pool"):
            self.pool.close()
        shutil.rmtree(self.sync_folder, ignore_errors=True)

    def abandon(self) -> None:
        """End what would stay for a while after this process, without waiting. All else ends by itself, as it does when
        this process is killed."""
        self.children.abandon()
        shutil.rmtree(self.sync_folder, ignore_errors=True)

    def _start_trainer(self) -> None:
        config, num_ranks = self._config, self.link.num_ranks
        gpus = self._places.trainer if self._places is not None and config.sampler.gpus else ""
        environment = worker_environment(int(config.resources.threads), device=self._device, gpus=gpus)
        environment[ADDRESS_VARIABLE] = self.link.address
        if self._nodes is not None:
            for name, process in self._nodes.start("nanodag.rl.trainer.trainer", environment).items():
                self.children.add(f"Trainer ranks on {name}", process)
            return
        environment.update(network_environment())
        # Rank 0's NCCL id bears the address of its interface. Gloo is told the address of each group.
        environment |= {name: at for name, at in network_environment(self._network).items() if name.startswith("NCCL")}
        if num_ranks > 1:  # one rank alone opens no port
            environment.update(WORLD_SIZE=str(num_ranks), MASTER_ADDR=LOOPBACK, MASTER_PORT=str(free_port()))
        for rank in range(num_ranks):
            variables = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else environment
            command = [sys.executable, "-m", "nanodag.rl.trainer.trainer", str(self._job.workspace / "job.json")]
            self.children.start(f"Trainer rank {rank}", command, variables)

    def _find_places(self) -> Places:
        config = self._config
        return places_of(
            [str(number) for number in range(len(visible_gpus()))] if self._hosts else visible_gpus(),
            own=config.sampler.gpus if isinstance(config.sampler.gpus, tuple) else (),
            num_ranks=int(config.resources.num_ranks) // config.resources.num_nodes,
            replicas=self._samplers_each,
            tensor_parallel=config.sampler.tensor_parallel,
        )

    def _external_servers(self) -> ExternalServers:
        config = self._config.sampler
        return ExternalServers(
            self._addresses,
            file=self._urls_file,
            needed=Needed(
                engine=config.engine,
                architecture=read_checkpoint(self._job.inputs["model"]).architecture,
                precision=DTYPES[config.precision],
                context=self.context,
                is_deterministic=bool(config.deterministic),
                keeps_prompts=self._config.weights.sync_mode != "in_place",
                numerics=numerics(metadata.version("torch")) if self.num_samplers else "",
            ),
            folder=None if self._config.weights.sync in BY_BUCKETS else self.sync_folder,
            connect=self._connect,
            patience_s=float(config.start_timeout_s),
        )

    def _connect(self, url: str, token: str | None = None) -> SamplerClient:
        is_named = self._gives_adapters and self._config.sampler.engine == "sglang"
        return (NamedAdapters if is_named else SamplerClient)(
            url,
            token=self._token if token is None else token,
            request_timeout_s=self._config.sampler.request_timeout_s,
            vocab_size=self.model.vocab_size,
            context_length=self.context,
            is_embedded=self._config.sampler.engine == "embedded",
            num_ranks=self._config.sampler.tensor_parallel if token is None else 1,
        )

    def _launch(self, number: int, model: Path, version: int) -> ServerProcess:
        elsewhere = None
        if self._hosts:
            host = self._hosts[number // self._samplers_each]
            elsewhere = SamplerNode(self._cluster, host, self._job.workspace, number=number)
        return start_engine(
            self._engine_settings(number).of_replica(number, model, version),
            log_path=self._job.workspace / f"sampler-{number}.log",
            elsewhere=elsewhere,
        )

    def _engine_settings(self, number: int) -> EngineSettings:
        config = self._config.sampler
        dtype = DTYPES[config.precision]
        same = {"start_timeout_s", "cache_bytes", "deterministic", "python", "tensor_parallel"}
        # It cannot empty its cache of prompts in the midst of requests, so keys and values would outlive their weights.
        is_vllm, defaults = config.engine == "vllm", dict[str, bool | int]()
        if self._config.weights.sync_mode == "in_place":
            defaults["enable_prefix_caching" if is_vllm else "disable_radix_cache"] = not is_vllm
        if self._config.placement == "shared" and self._device == "cuda":  # on a CPU SGLang has nothing to save it with
            defaults["enable_memory_saver"] = True
        if self._config.rollout.router_replay:
            defaults["enable_return_routed_experts"] = True
        return EngineSettings(
            base=self._job.inputs["model"] if self._gives_adapters else None,
            lora_rank=int(self._config.optimizer.lora_rank),
            engine="embedded" if config.engine == "auto" else config.engine,  # derived
            device=self._device,
            dtype=dtype,
            max_batch=-(-int(config.max_batch) // self.num_samplers),
            context_length=self.context,
            gpus="" if self._places is None else self._places.samplers[number % self._samplers_each],
            threads=max(1, int(self._config.resources.threads) // self._samplers_each),
            seed=int(self._config.seed),
            token=self._token,
            network="" if self._hosts else self._network,
            **config.model_dump(include=same),
            cache_tokens=cache_tokens(
                self._job.inputs["model"], cache_bytes=int(config.cache_bytes), dtype=dtype, context=self.context
            ),
            # Of what is free then, on a GPU: all of it, as the cache is bounded, but for SGLang's graphs.
            memory_fraction=SGLANG_STATIC if self._device == "cuda" else float(config.memory_fraction),
            options={**defaults, **config.options},
        )
