"""Starts and stops an SGLang server as a child process: the embedded sampler's `SamplerProcess` for the other engine.

It runs in an environment of its own (`sglang_install.py`), by way of `sglang_shim.py`, which says what it changes.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from nanodag.host.ports import LOOPBACK, free_port, network_environment
from nanodag.host.processor import SHAPE_CACHES
from nanodag.inference.sampler_process import Elsewhere, ServerProcess, is_healthy
from nanodag.inference.sglang_install import Device
from nanodag.inference.sglang_options import Option, arguments

SHIM = Path(__file__).with_name("sglang_shim.py")

# Given on a CPU. sleep-on-idle: its scheduler would take a whole core while it waits.
CPU_OPTIONS: dict[str, Option] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-overlap-schedule": True,
    "sleep-on-idle": True,
}
# SGLang gives a request less than the context: it keeps a few tokens back. Requests are checked before they are sent.
CONTEXT_RESERVE = 8


class SGLangProcess(ServerProcess):
    """A running SGLang server."""

    @classmethod
    def start(
        cls,
        python: Path,
        model_path: str | Path,
        *,
        log_path: str | Path,
        device: Device,
        dtype: str,
        max_batch: int,
        context_length: int,
        weight_version: str | int,
        memory_fraction: float,
        tensor_parallel: int = 1,
        cache_tokens: int | None = None,
        first_gpu: int = 0,
        gpus: str = "",
        threads: int = 1,
        seed: int = 0,
        options: Mapping[str, Option] | None = None,
        token: str = "",
        start_timeout_s: float = 600.0,
        elsewhere: Elsewhere | None = None,
    ) -> ServerProcess:
        """Start a server and wait until it answers. Its output is appended to ``log_path``. elsewhere: on that machine.

        python: the interpreter of SGLang's environment. max_batch: samples that run at once. context_length: prompt
        and answer together. memory_fraction: of what is free when it starts, the most that weights and cache may take.
        cache_tokens: the most that the cache holds, so that it takes one amount whoever starts first; by default
        max_batch contexts. gpus: those that it sees, as CUDA_VISIBLE_DEVICES names them, "" for those of this process;
        first_gpu: among them. options: further ones of SGLang's, by name; they go before those given here. token: that
        requests must bear, "" for none.

        Raises SamplerLost, with the last lines of the log, if it ends or does not answer in time.
        """
        port, most = free_port(), max_batch * (context_length + CONTEXT_RESERVE)
        settings: dict[str, Option] = {
            "model-path": str(model_path),
            "host": LOOPBACK if elsewhere is None else elsewhere.host,
            "port": port,
            "dtype": dtype,
            "context-length": context_length + CONTEXT_RESERVE,
            "max-running-requests": max_batch,
            "max-total-tokens": min(cache_tokens or most, most),
            "mem-fraction-static": memory_fraction,
            "tp-size": tensor_parallel,
            "base-gpu-id": first_gpu,
            "random-seed": seed,
            "weight-version": str(weight_version),
            "skip-tokenizer-init": True,
            "log-level-http": "warning",
            **(CPU_OPTIONS if device == "cpu" else {}),
            **{name.replace("_", "-"): value for name, value in (options or {}).items()},
        }
        command = [str(python), str(SHIM), *arguments(settings)]
        url, environment = f"http://127.0.0.1:{port}", sglang_environment(device, threads)
        environment |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        server: ServerProcess
        if elsewhere is None:
            server = cls.spawn(command, log_path=Path(log_path), env=environment, token=token, url=url)
        else:
            server = elsewhere.spawn(command, log_path=Path(log_path), env=environment, token=token)

        def is_ready() -> bool:
            if elsewhere is not None and (address := elsewhere.address(server)):
                server.url = f"http://{address}:{port}"
            return bool(server.url) and is_healthy(f"{server.url}/health")

        try:
            server.wait_until(is_ready, start_timeout_s)
        except BaseException:
            server.kill()
            raise
        return server


def foreign_environment() -> dict[str, str]:
    """This process's, without what belongs to its own Python and its own torch."""
    foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    ours = SHAPE_CACHES.items()
    return {name: value for name, value in os.environ.items() if name not in foreign and (name, value) not in ours}


def sglang_environment(device: Device, threads: int) -> dict[str, str]:
    """The whole environment of a server's process."""
    environment = foreign_environment() | network_environment()
    # Spinning OpenMP threads starve the other processes on a small machine.
    environment.update(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
    environment.update(HF_HUB_OFFLINE="1", SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN="1")
    # /health would generate, which a paused server cannot: the router would never take a server that starts paused, and
    # would drop one that is paused for long. /health_generate still generates.
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    # A server whose scheduler has crashed would wait 65 s for dumps that nobody made, before its end can be seen.
    for dump in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        environment.setdefault(dump, "false")
    if device == "cpu":
        environment.update(SGLANG_USE_CPU_ENGINE="1", NANODAG_SGLANG_CPU="1", CUDA_VISIBLE_DEVICES="")
    return environment
