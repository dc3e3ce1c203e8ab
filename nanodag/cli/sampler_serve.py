"""`nanodag sampler serve`: the description of what is served, with nothing left open."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from nanodag.cli.serve import found_model
from nanodag.config.derive_sampler import engine_of, this_machine
from nanodag.errors import ConfigError
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.keys import keys_for
from nanodag.inference.number_formats import DTYPES
from nanodag.inference.sglang_install import Device
from nanodag.inference.sglang_options import Option
from nanodag.model.architecture import check_sglang

EMBEDDED = ("max_batch", "cache_bytes", "threads", "seed", "max_body_bytes", "max_text_bytes", "stream_every_s")
OWN = ("model-path", "model", "host", "port", "token", "api-key", "admin-api-key", "weight-version")


def served_by(
    model: str,
    *,
    engine: str,
    host: str,
    port: int,
    key_file: str,
    dtype: str,
    context: int,
    deterministic: bool | None,
    names: Sequence[str],
    options: Sequence[str],
    file: str,
) -> EngineSettings:
    """The server that these options of the command mean, on this machine. Raises ConfigError for one that means none,
    and for one within reach of others without a key; ArtifactNotFound where there is no such model."""
    machine = this_machine()
    device = cast(Device, machine.device)
    if engine == "auto":
        engine, _ = engine_of(machine, device, None)
    if engine not in ("embedded", "sglang"):
        raise ConfigError(f"--engine {engine!r} is neither embedded nor sglang nor auto.")
    if dtype == "auto":
        dtype = "bfloat16" if machine.multiplies_bf16_fast(device) else "float32"
    if dtype not in DTYPES.values():
        raise ConfigError(f"--dtype {dtype!r} is neither float32 nor bfloat16 nor auto.")
    if engine == "sglang" and (deterministic or names):
        raise ConfigError("--deterministic and --allow-host are of engine embedded; leave them out.")
    further: dict[str, Any] = dict(map(_option, options))
    for name in further:
        if name.replace("_", "-") in OWN:
            raise ConfigError(f"--option {name} is said otherwise: by --model, --host, --port or --api-key-file.")
    if engine == "embedded":
        further = {name.replace("-", "_"): value for name, value in further.items()}
        if unknown := [name for name in further if name not in EMBEDDED]:
            raise ConfigError(f"--option {unknown[0]}: there is no such option here. There are: {', '.join(EMBEDDED)}.")
        further |= {"deterministic": device == "cpu" if deterministic is None else deterministic, "allow_host": names}
    else:
        further = {"options": further}
    token = next(iter(keys_for(host, Path(key_file) if key_file else None)), "")
    run, colon, stage = model.rpartition(":")
    is_run = bool(colon) and "/" not in model
    _, folder = found_model(run, stage, file) if is_run else found_model(model, "", file)
    if engine == "sglang":
        check_sglang(folder, context or None, "--engine")
    try:
        return EngineSettings.model_validate({
            "engine": engine, "model": folder, "device": device, "dtype": dtype, "host": host, "port": port,
            "token": token, "context_length": context or None, **further,
        })  # fmt: skip
    except ValidationError as error:
        wrong = "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
        raise ConfigError(f"--option {wrong}.") from error


def _option(text: str) -> tuple[str, Option]:
    name, equals, value = text.partition("=")
    if not name:
        raise ConfigError(f"--option {text!r} is not NAME=VALUE.")
    return name, {"": True, "true": True, "false": False}.get(value, value) if equals else True
