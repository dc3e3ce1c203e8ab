"""What the controller works with: the trainer's ranks, samplers, the reward pool. Started together. No torch."""

import hashlib
import logging
import secrets
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from nanodag.config.derive_sampler import SGLANG_STATIC
from nanodag.config.kinds.rl import RLStage
from nanodag.errors import ConfigError
from nanodag.host.machine import gpu_of_replica, visible_gpus
from nanodag.host.ports import LOOPBACK, free_port, network_environment
from nanodag.inference.cache_size import ELEMENT_BYTES, token_bytes
from nanodag.inference.client import SamplerClient
from nanodag.inference.router_process import RouterClient, RouterProcess
from nanodag.inference.sampler_process import SamplerProcess
from nanodag.inference.sglang_install import Device, find_python
from nanodag.inference.sglang_process import CONTEXT_RESERVE, SGLangProcess
from nanodag.model.architecture import read_checkpoint, read_json
from nanodag.model.headers import faults_of_config, head_parameters, matrix_parameters, weight_files
from nanodag.rewards.reward_pool import RewardPool
from nanodag.rl.fleet.broadcast_sync import DistributedSync
from nanodag.rl.fleet.router import Router
from nanodag.rl.fleet.samplers import Samplers
from nanodag.rl.fleet.server_watch import ChildServer
from nanodag.rl.fleet.weight_sync import DiskSync, WeightSync
from nanodag.rl.trainer.link import ADDRESS_VARIABLE, RankLink
from nanodag.worker.children import Children
from nanodag.worker.job import Job, stop_requested
from nanodag.worker.launch import worker_environment
from nanodag.worker.nodes import Nodes

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
BEFORE_THE_FIRST = -1  # the version of what samplers start with: the trainer's first weights may be rounded
SHARED_MEMORY = Path("/dev/shm")
SAMPLER_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Services:
    """Everything that a stage starts. Use as a context manager: whatever happens, nothing is left running."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._config: RLStage = job.config
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
        if self._config.sampler.engine == "sglang":
            self._sglang_python = find_python(self._config.sampler.python, self._device)
        self.sync_folder = sync_folder(
            job.workspace, self.model.num_bytes, num_copies=2 + self._config.rollout.max_staleness
        )
        self._token = secrets.token_hex(16)  # of this stage: samplers answer nobody else
        self._servers: list[ChildServer] = []
        self._router: Router | None = None
        self._nodes = Nodes(job) if self._config.resources.num_nodes > 1 else None
        host = "127.0.0.1" if self._nodes is None else self._nodes.address
        self.link = RankLink(int(self._config.resources.num_ranks), host=host)

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
        self.sync_folder.mkdir(parents=True)
        self._start_trainer()
        model = self._job.inputs["model"]
        starting = [_Background(self._launch, number, model, BEFORE_THE_FIRST) for number in range(self.num_samplers)]
        router = _Background(self._launch_router) if self._has_router else None
        self.pool = RewardPool(
            {entry.name: entry.weight for entry in self._config.reward},
            options={entry.name: entry.options for entry in self._config.reward},
            num_processes=self._config.rollout.reward_processes,
            timeout_s=self._config.rollout.reward_timeout_s,
        )
        self.link.accept(timeout_s=START_TIMEOUT_S, check=self.children.check)
        for entry in starting:
            self._servers.append(entry.result())
        self._router = None if router is None else self._make_router(router.result())
        self.samplers = Samplers(
            self._servers,
            model=self._job.inputs["model"],
            version=BEFORE_THE_FIRST,
            launch=self._launch,
            connect=self._connect,
            is_stopping=stop_requested,
            health_timeout_s=self._config.sampler.health_timeout_s,
            max_restarts=self._config.sampler.max_restarts,
            router=self._router,
            pause=None if self._config.weights.sync_mode == "finish" else self._config.weights.sync_mode,
        )
        self.sync = self._make_sync()
        log.info("%d trainer ranks and %d samplers are up.", self.link.num_ranks, self.num_samplers)

    def _make_sync(self) -> WeightSync:
        """The way that the config names."""
        config, ask = self._config, self.link.exchange
        if config.weights.sync == "disk":
            return DiskSync(self.samplers, ask, check_every=int(config.weights.sync_check_every))
        return DistributedSync(
            self.samplers,
            ask,
            check_every=int(config.weights.sync_check_every),
            timeout_s=config.weights.sync_timeout_s,
            ranks_each=config.sampler.tensor_parallel,
        )

    def end(self) -> None:
        """End everything that was started."""
        self.children.release()
        if hasattr(self, "samplers"):
            self.samplers.close()
        for server in self._servers:
            server.stop()
        if self._router is not None:
            self._router.close()
        self.link.close()
        self.children.end()
        if self._nodes is not None:
            self._nodes.end()
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
        environment = worker_environment(int(config.resources.threads), device=str(config.resources.device))
        environment[ADDRESS_VARIABLE] = self.link.address
        if self._nodes is not None:
            for name, process in self._nodes.start("nanodag.rl.trainer.trainer", environment).items():
                self.children.add(f"Trainer ranks on {name}", process)
            return
        if num_ranks > 1:  # one rank alone opens no port
            environment.update(network_environment())
            environment.update(WORLD_SIZE=str(num_ranks), MASTER_ADDR=LOOPBACK, MASTER_PORT=str(free_port()))
        for rank in range(num_ranks):
            variables = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else environment
            command = [sys.executable, "-m", "nanodag.rl.trainer.trainer", str(self._job.workspace / "job.json")]
            self.children.start(f"Trainer rank {rank}", command, variables)

    @property
    def _device(self) -> Device:
        return cast(Device, self._config.resources.device)

    @property
    def num_samplers(self) -> int:
        """Sampler processes of this stage."""
        return int(self._config.sampler.replicas)

    @property
    def _cache_tokens(self) -> int:
        """Tokens that an SGLang server's cache holds."""
        a, config = read_checkpoint(self._job.inputs["model"]).architecture, self._config.sampler
        each = token_bytes(
            num_layers=a.num_layers,
            num_kv_heads=a.num_kv_heads,
            head_width=a.head_dim,
            element_bytes=ELEMENT_BYTES[config.precision],
        )
        return max(int(config.cache_bytes) // each, self.context + CONTEXT_RESERVE)

    @property
    def _samples_each(self) -> int:
        """Samples that one of them decodes at once."""
        return -(-int(self._config.sampler.max_batch) // self.num_samplers)

    def _connect(self, url: str) -> SamplerClient:
        return SamplerClient(
            url,
            token=self._token,
            request_timeout_s=self._config.sampler.request_timeout_s,
            vocab_size=self.model.vocab_size,
            context_length=self.context,
        )

    @property
    def _has_router(self) -> bool:
        """Whether sglang-router stands before the samplers: the embedded ones are shared out to by the stage."""
        return self._config.sampler.engine == "sglang" and self._config.sampler.router and self.num_samplers > 1

    def _make_router(self, server: ChildServer) -> Router:
        return Router(
            server,
            launch=self._launch_router,
            connect=lambda url: RouterClient(
                url,
                token=self._token,
                request_timeout_s=self._config.sampler.request_timeout_s,
                vocab_size=self.model.vocab_size,
                context_length=self.context,
            ),
            timeout_s=self._config.sampler.health_timeout_s,
        )

    def _launch_router(self) -> ChildServer:
        config = self._config.sampler
        return RouterProcess.start(
            self._sglang_python,
            log_path=self._job.workspace / "router.log",
            request_timeout_s=config.request_timeout_s,
            options=config.router_options,
            token=self._token,
            start_timeout_s=float(config.start_timeout_s),
        )

    def _launch(self, number: int, model: Path, version: int) -> ChildServer:
        """Start a sampler with the weights in a folder."""
        config, resources = self._config.sampler, self._config.resources
        if config.engine == "sglang":
            return self._launch_sglang(number, model, version)
        return SamplerProcess.start(
            model,
            log_path=self._job.workspace / f"sampler-{number}.log",
            dtype=SAMPLER_DTYPES[config.precision],
            device=self._device,
            gpu=gpu_of_replica(number) if self._device == "cuda" else "",
            max_batch=self._samples_each,
            context_length=self.context,
            cache_bytes=int(config.cache_bytes),
            deterministic=bool(config.deterministic),
            threads=1 if config.deterministic else max(1, int(resources.threads) // self.num_samplers),
            seed=int(self._config.seed),
            weight_version=version,
            token=self._token,
            start_timeout_s=float(config.start_timeout_s),
        )

    def _first_gpu(self, number: int) -> int:
        """Of an SGLang server, among those that this process may use; on a CPU it is a NUMA node."""
        tensor_parallel = self._config.sampler.tensor_parallel
        return number * tensor_parallel % len(visible_gpus()) if self._device == "cuda" else 0

    def _launch_sglang(self, number: int, model: Path, version: int) -> ChildServer:
        config, resources = self._config.sampler, self._config.resources
        # It cannot empty its cache of prompts in the midst of requests, so keys and values would outlive their weights.
        defaults = {"disable_radix_cache": True} if self._config.weights.sync_mode == "in_place" else {}
        return SGLangProcess.start(
            self._sglang_python,
            model,
            log_path=self._job.workspace / f"sampler-{number}.log",
            device=self._device,
            dtype=SAMPLER_DTYPES[config.precision],
            max_batch=self._samples_each,
            context_length=self.context,
            weight_version=version,
            cache_tokens=self._cache_tokens,
            # Of what is free then, on a GPU: all of it, as the cache is bounded, but for SGLang's graphs.
            memory_fraction=SGLANG_STATIC if self._device == "cuda" else float(config.memory_fraction),
            tensor_parallel=config.tensor_parallel,
            first_gpu=self._first_gpu(number),
            threads=max(1, int(resources.threads) // self.num_samplers),
            seed=int(self._config.seed) + number,
            options={**defaults, **config.options},
            token=self._token,
            start_timeout_s=float(config.start_timeout_s),
        )


class _Background:
    """One call in a thread; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._call, self._arguments = call, arguments
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._call(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - `result` raises it where somebody listens
            self._error = error


class ModelFacts:
    """What a Hugging Face directory says of its model without loading it."""

    def __init__(
        self,
        *,
        num_matrix_parameters: int,
        num_head_parameters: int,
        num_bytes: int,
        max_positions: int,
        vocab_size: int,
    ) -> None:
        self.num_matrix_parameters = num_matrix_parameters
        self.num_head_parameters = num_head_parameters
        self.num_bytes = num_bytes
        self.max_positions = max_positions
        self.vocab_size = vocab_size

    @classmethod
    @faults_of_config()
    def read(cls, folder: Path) -> "ModelFacts":
        """From config.json and the headers of the safetensors files. Raises ConfigError where there are none."""
        config = read_json(folder / "config.json")
        return cls(
            num_matrix_parameters=matrix_parameters(folder),
            num_head_parameters=head_parameters(folder),
            num_bytes=sum(file.stat().st_size for file in weight_files(folder)),
            max_positions=int(config["max_position_embeddings"]),
            vocab_size=int(config["vocab_size"]),
        )


def sync_folder(workspace: Path, model_bytes: int, *, num_copies: int) -> Path:
    """Where weights pass from trainer to sampler: in memory where there is room for the copies in float32, else in the
    workspace. num_copies: what samplers have, and what waits for them.

    The name depends on the workspace alone, so a restart finds and removes what a killed process left.
    """
    name = "nanodag-" + hashlib.blake2b(str(workspace.resolve()).encode(), digest_size=8).hexdigest()
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * num_copies * model_bytes:
        return SHARED_MEMORY / name
    return workspace / "sync"
