"""One sampler in the foreground, for whoever runs servers by himself: the command that `nanodag sampler serve` becomes.

A key goes by the environment, where other users of the machine do not see it.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nanodag.errors import ConfigError
from nanodag.host.ports import LOOPBACK
from nanodag.inference.keys import read_keys
from nanodag.inference.server_variables import PARENT_VARIABLE, TOKEN_VARIABLE
from nanodag.inference.sglang_install import Device, find_python
from nanodag.inference.sglang_options import Option, arguments
from nanodag.inference.sglang_process import CONTEXT_RESERVE, CPU_OPTIONS, SHIM, sglang_environment

HERE = (LOOPBACK, "localhost", "::1")
OWN = ("model-path", "model", "host", "port", "api-key", "admin-api-key", "weight-version")


@dataclass(frozen=True, kw_only=True)
class Served:
    """What one server is. dtype: `float32` or `bfloat16`. context: tokens of prompt and response, 0 for what there is
    room for. names: further ones of this machine, as requests may name it. options: the engine's own, by name."""

    engine: str
    model: Path
    device: Device
    dtype: str
    host: str
    port: int
    key_file: str = ""
    context: int = 0
    is_deterministic: bool = False
    names: tuple[str, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)


def serve_command(served: Served) -> tuple[list[str], dict[str, str]]:
    """The command and its whole environment. Raises ConfigError for a server within reach of others without a key, and
    for options that are not for `options`; MissingTool where SGLang is not installed."""
    for name in served.options:
        if name.replace("_", "-") in OWN:
            raise ConfigError(f"--option {name} is said otherwise: by --model, --host, --port or --api-key-file.")
    if served.engine == "sglang" and (served.is_deterministic or served.names):
        raise ConfigError("--deterministic and --allow-host are of engine embedded; leave them out.")
    token = _key(served)
    is_sglang = served.engine == "sglang"
    command, environment = _sglang(served) if is_sglang else _embedded(served)
    environment.pop(PARENT_VARIABLE, None)  # it lives as long as it is left to
    return command, environment | {TOKEN_VARIABLE: token}


def _key(served: Served) -> str:
    if served.key_file:
        return read_keys(Path(served.key_file).expanduser(), named="--api-key-file")[0]
    if served.host not in HERE:
        raise ConfigError(
            f"--host {served.host} is within reach of others: name the file of a key with --api-key-file, or serve on "
            f"{LOOPBACK}."
        )
    return ""


def _embedded(served: Served) -> tuple[list[str], dict[str, str]]:
    settings: dict[str, Option] = {
        "model-path": str(served.model), "host": served.host, "port": served.port, "device": served.device,
        "dtype": served.dtype, "deterministic": served.is_deterministic, **served.options,
    }  # fmt: skip
    if served.context:
        settings["context-length"] = served.context
    command = [sys.executable, "-m", "nanodag.sampler", *arguments(settings)]
    command += [f"--allow-host={name}" for name in served.names]
    threads = str(served.options.get("threads", 1))
    return command, {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}


def _sglang(served: Served) -> tuple[list[str], dict[str, str]]:
    settings: dict[str, Option] = {
        "model-path": str(served.model),
        "host": served.host,
        "port": served.port,
        "dtype": served.dtype,
        "skip-tokenizer-init": True,
        "log-level-http": "warning",
        **(CPU_OPTIONS if served.device == "cpu" else {}),
        **{name.replace("_", "-"): value for name, value in served.options.items()},
    }
    if served.context:
        settings["context-length"] = served.context + CONTEXT_RESERVE
    command = [str(find_python("auto", served.device)), str(SHIM), *arguments(settings)]
    return command, sglang_environment(served.device, threads=1)
