"""`nanodag sampler serve`: what is to be served, with nothing left open."""

from collections.abc import Sequence
from typing import cast

from nanodag.cli.serve import found_model
from nanodag.config.derive_sampler import engine_of, this_machine
from nanodag.errors import ConfigError
from nanodag.inference.number_formats import DTYPES
from nanodag.inference.serve_command import Served
from nanodag.inference.sglang_install import Device
from nanodag.inference.sglang_options import Option


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
) -> Served:
    """The server that these options of the command mean, on this machine. Raises ConfigError for one that means none,
    ArtifactNotFound where there is no such model."""
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
    run, colon, stage = model.rpartition(":")
    is_run = bool(colon) and "/" not in model
    _, folder = found_model(run, stage, file) if is_run else found_model(model, "", file)
    return Served(
        engine=engine,
        model=folder,
        device=device,
        dtype=dtype,
        host=host,
        port=port,
        key_file=key_file,
        context=context,
        is_deterministic=engine == "embedded" and device == "cpu" if deterministic is None else deterministic,
        names=tuple(names),
        options=dict(map(_option, options)),
    )


def _option(text: str) -> tuple[str, Option]:
    name, equals, value = text.partition("=")
    if not name:
        raise ConfigError(f"--option {text!r} is not NAME=VALUE.")
    return name, {"": True, "true": True, "false": False}.get(value, value) if equals else True
