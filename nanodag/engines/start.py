"""Start of an engine's process by its description (`inference/engine_settings.py`): embedded, SGLang or vLLM.

The latter two run in environments of their own (`inference/engine_install.py`), by way of `sglang_shim.py`, which says
what it changes, and of `vllm_server.py`. A server ends with the process that started it
(`inference/server_variables.py`), and is in its process group: a signal to the group reaches both.
"""

import asyncio
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx

from nanodag.children.child import Child, start_child
from nanodag.engines.named_adapters import name_of_adapters
from nanodag.errors import SamplerLost
from nanodag.host.beside import table_beside
from nanodag.host.ports import LOOPBACK, address_towards, free_port, network_environment
from nanodag.host.processor import SHAPE_CACHES
from nanodag.host.progress_timeout import Patience
from nanodag.host.threads import in_thread
from nanodag.inference.cache_size import token_bytes
from nanodag.inference.engine_install import find_python
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.number_formats import DTYPE_BYTES
from nanodag.inference.server_variables import PARENT_VARIABLE, TOKEN_VARIABLE, server_environment
from nanodag.inference.sglang_options import Option, arguments
from nanodag.model.architecture import read_checkpoint
from nanodag.model.headers import ADAPTER_CONFIG

if TYPE_CHECKING:
    from nanodag.engines.sampler_node import SamplerNode

POLL_S = 0.02
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # that our decoder adapts
EVERYWHERE, SOMEWHERE = "0.0.0.0", "192.0.2.1"  # an address that no machine has (RFC 5737): the way to it leads out
SHIM, VLLM = (Path(__file__).with_name(f"{name}.py") for name in ("sglang_shim", "vllm_server"))
GIVEN = table_beside(__file__)
CONTEXT_RESERVE = 8
"""Tokens of its context that SGLang keeps from a request. Requests are checked before they are sent."""


class ServerProcess(Child):
    """A server that runs as a child, in this process's group. url: empty until it is known."""

    url = ""

    @classmethod
    def spawn(cls, command: Sequence[str], *, log_path: Path, env: Mapping[str, str], token: str = "") -> Self:
        """Start a command; its output is appended to ``log_path``. It may not be ready yet."""
        environment = {**env, **server_environment(token)}
        child = start_child(command, environment=environment, log_path=log_path, in_group=True)
        return cls(child.process, log_path=log_path, in_group=True)

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Return when it is ready. Raises SamplerLost, with the last lines of its log, if it ends, or does not get on
        for ``timeout_s``."""
        patience = Patience([self.pid], [self.log_path], timeout_s)
        while not is_ready():
            if not self.is_alive:
                raise SamplerLost(
                    f"the sampler {self.how_ended()} before it was ready; the end of its log "
                    f"({self.log_path}):\n{self.tail()}"
                )
            if patience.is_over():
                raise SamplerLost(
                    f"the sampler was not ready: {patience} (sampler.start_timeout_s is {timeout_s:g}); the end of its "
                    f"log ({self.log_path}):\n{self.tail()}"
                )
            time.sleep(POLL_S)


def start_engine(
    settings: EngineSettings, *, log_path: str | Path, elsewhere: "SamplerNode | None" = None
) -> ServerProcess:
    """Start one process and wait until it answers. Its output is appended to ``log_path``. elsewhere: on that machine,
    which must then be reached from here. Raises SamplerLost, with the last lines of the log, where it does not start;
    MissingTool where the engine is not installed."""
    log_path = Path(log_path)
    tells_port = settings.engine != "sglang"
    update: dict[str, object] = {} if elsewhere is None else {"host": elsewhere.host}
    if tells_port:
        update["ready_file"] = ready_file = log_path.with_name(f"{log_path.name}.{secrets.token_hex(4)}.ready")
    elif not settings.port:
        update["port"] = free_port()
    settings = settings.model_copy(update=update)
    command, environment = command_of(settings)
    spawn = ServerProcess.spawn if elsewhere is None else elsewhere.spawn
    server = spawn(command, log_path=log_path, env=environment, token=settings.token)

    def answers() -> bool:
        if tells_port and not ready_file.exists():
            return False
        port = json.loads(ready_file.read_text())["port"] if tells_port else settings.port
        server.url = f"http://{LOOPBACK if elsewhere is None else elsewhere.address}:{port}"
        # Its file has told already; the link to another machine may be cut.
        return (tells_port and elsewhere is None) or is_healthy(f"{server.url}/health")

    try:
        server.wait_until(answers, settings.start_timeout_s)
    except BaseException:
        server.stop()
        raise
    finally:
        if tells_port:
            ready_file.unlink(missing_ok=True)
    return server


async def start_engines(start: Callable[[int], ServerProcess], count: int) -> list[ServerProcess]:
    """Start several at once, each by its number; all of them are ended again where one does not start."""
    starting = (in_thread(partial(start, number)) for number in range(count))
    started = await asyncio.gather(*starting, return_exceptions=True)
    servers = [server for server in started if not isinstance(server, BaseException)]
    for error in started:
        if isinstance(error, BaseException):
            for server in servers:
                server.stop()
            raise error
    return servers


def cache_tokens(model: Path, *, cache_bytes: int, dtype: str, context: int) -> int:
    """Tokens that a cache of so many bytes holds, at least one context."""
    a, size = read_checkpoint(model).architecture, DTYPE_BYTES[dtype]
    each = token_bytes(num_layers=a.num_layers, num_kv_heads=a.num_kv_heads, head_width=a.head_dim, element_bytes=size)
    return max(cache_bytes // each, context + CONTEXT_RESERVE)


def command_of(settings: EngineSettings) -> tuple[list[str], dict[str, str]]:
    """Command of a process, and its whole environment but for its token. Raises MissingTool where the engine is not
    installed."""
    described, environment = settings.model_dump_json(exclude_defaults=True), dict(os.environ)
    command = [sys.executable, "-m", "nanodag.sampler", described]
    if settings.engine != "embedded":
        environment = _guest_environment(settings)
        python = str(find_python(settings.python, settings.device, settings.engine))
        command = [python, str(VLLM), described] if settings.engine == "vllm" else [python, *_sglang(settings)]
    # Spinning OpenMP threads starve the other processes on a small machine.
    environment.update(OMP_NUM_THREADS=str(settings.threads), OMP_WAIT_POLICY="PASSIVE")
    environment |= {"CUDA_VISIBLE_DEVICES": settings.gpus} if settings.gpus else {}
    return command, environment


def foreground_command(settings: EngineSettings) -> tuple[list[str], dict[str, str]]:
    """The same for a server that lives as long as it is left to, with its token."""
    command, environment = command_of(settings)
    environment.pop(PARENT_VARIABLE, None)
    return command, environment | {TOKEN_VARIABLE: settings.token}


def _sglang(settings: EngineSettings) -> list[str]:
    context = None if settings.context_length is None else settings.context_length + CONTEXT_RESERVE
    most = context * settings.max_batch if context and settings.max_batch else None
    cache_tokens = min(filter(None, (settings.cache_tokens, most)), default=None)
    adapters: dict[str, Option] = {}
    if settings.base is not None:  # of its places one is the base's
        adapters = {"enable-lora": True, "max-lora-rank": settings.lora_rank, "max-loras-per-batch": 2}
        if (settings.model / ADAPTER_CONFIG).is_file():
            adapters["lora-paths"] = f"{name_of_adapters(settings.weight_version)}={settings.model}"
    options: dict[str, Option | None] = {
        "model-path": str(settings.base or settings.model),
        "host": settings.host,
        "port": settings.port,
        "dtype": settings.dtype,
        "context-length": context,
        "max-running-requests": settings.max_batch,
        "max-total-tokens": cache_tokens,
        "mem-fraction-static": settings.memory_fraction,
        "tp-size": settings.tensor_parallel,
        "random-seed": settings.seed,
        "weight-version": settings.weight_version,
        "skip-tokenizer-init": True,
        "log-level-http": "warning",
        **adapters,
        **(GIVEN["sglang"]["cpu_options"] if settings.device == "cpu" else {}),
        **{name.replace("_", "-"): value for name, value in settings.options.items()},
    }
    modules = ["--lora-target-modules", *LORA_MODULES] if adapters else []
    return [str(SHIM), *arguments({n: v for n, v in options.items() if v is not None}), *modules]


def _guest_environment(settings: EngineSettings) -> dict[str, str]:
    """This process's, without what belongs to its own Python and its own torch, with the engine's."""
    foreign, ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"), SHAPE_CACHES.items()
    environment = {
        name: value for name, value in os.environ.items() if name not in foreign and (name, value) not in ours
    }
    if address := settings.network or _network_of(settings.host):
        environment.update(network_environment(address))
    environment |= GIVEN[settings.engine]["variables"]
    if settings.engine == "vllm":
        return environment
    # The trainer may have set it for itself; SGLang's memory saver refuses to start with it.
    for name in {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & environment.keys():
        fields = environment[name].split(",")
        environment[name] = ",".join(field for field in fields if not field.strip().startswith("expandable_segments"))
    environment |= GIVEN["sglang"]["cpu_variables"] if settings.device == "cpu" else {}
    return {**GIVEN["sglang"]["defaults"], **environment}


def _network_of(host: str) -> str:
    """This machine's address on the network of a server that listens on `host`; "" where another machine finds out."""
    if host != EVERYWHERE:
        return LOOPBACK if host == LOOPBACK else ""
    with suppress(OSError):  # no way leads out
        return address_towards(SOMEWHERE)
    return ""


def is_healthy(url: str) -> bool:
    """True when a server answers there that it serves."""
    try:  # a client costs far more than a connection, which is refused for a minute
        socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 0), timeout=1.0).close()
        answer = httpx.get(url, timeout=5.0, trust_env=False, verify=False)
    except (OSError, httpx.TransportError):
        return False
    return answer.status_code == httpx.codes.OK
