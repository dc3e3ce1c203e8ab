"""`nanodag serve` and `chat`: find the models, then hand over to the process that has their tokenizers. For `nanodag
sampler serve` the description of what is served, with nothing left open."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from pydantic import ValidationError
from rich.console import Console

from nanodag.cli.show import find_run, finished_stages, print_stale
from nanodag.config.derive_sampler import engine_of, this_machine
from nanodag.config.kind import MODEL
from nanodag.errors import ArtifactNotFound, ConfigError
from nanodag.errors.words import listed, nearest
from nanodag.host.machine import detect
from nanodag.host.processor import usable_cores
from nanodag.inference.addresses import keys_for
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.number_formats import DTYPES
from nanodag.inference.sglang_install import Device
from nanodag.inference.sglang_options import Option
from nanodag.model.architecture import check_sglang
from nanodag.run.record import served_store
from nanodag.worker.launch import worker_environment

SERVING = "nanodag.chat.web"  # nanodag.api, and the page
EMBEDDED = ("max_batch", "cache_bytes", "threads", "seed", "max_body_bytes", "max_text_bytes", "stream_every_s")
OWN = ("model-path", "model", "host", "port", "token", "api-key", "admin-api-key", "weight-version")


def serve(
    name: str, stage: str, *, also: Sequence[str], is_following: bool, file: str, options: Sequence[str]
) -> NoReturn:
    """Serve a run's stage, a folder or a model of the hub. also: stages of the same run, RUN:STAGE, folders or models
    of the hub. is_following: the newest weights of a run under way. options: of the serving process."""
    followed: list[str] = []
    if is_following:
        store = served_store(file)
        followed = [f"--follow={find_run(store, name).run}", f"--follow-stage={stage}"]
        followed += [f"--store={store.url}", f"--store-local={store.local}"]
    models = dict([] if is_following else [found_model(name, stage, file)])
    for other in also:
        model_name, folder = found_model(*_named(other, name), file)
        models[other if model_name in models else model_name] = folder
    # It ends the engines, so a signal must reach it.
    _hand_over(
        SERVING, *(f"--model={model_name}={folder}" for model_name, folder in models.items()), *followed, *options
    )


def chat_with(name: str, stage: str, *, file: str, options: Sequence[str] = ()) -> NoReturn:
    """Hand over to the chat program with the model of a run's stage, the last one there is unless named; with a folder,
    or a model of the hub. options: of the program."""
    _, folder = found_model(name, stage, file)
    # In this process's place, not as its child: Ctrl-C ends an answer, and must not end a parent that waits.
    _hand_over("nanodag.chat", str(folder), *options)


def _hand_over(program: str, *arguments: str) -> NoReturn:
    """Run a program of ours in this process's place, not as its child: signals then reach it."""
    environment = worker_environment(usable_cores(), device=detect().device)
    os.execve(sys.executable, [sys.executable, "-m", program, *arguments], environment)


def _named(text: str, run: str) -> tuple[str, str]:
    """The run and stage that RUN:STAGE, or STAGE of this run, names; a folder or a model of the hub by itself."""
    if _is_elsewhere(text):
        return text, ""
    other, colon, stage = text.rpartition(":")
    return (other if colon else run), stage


def _is_elsewhere(name: str) -> bool:
    """True for a model that is no run's: a folder, or one of the hub."""
    return "/" in name or (Path(name) / "config.json").is_file()


def found_model(name: str, stage: str, file: str) -> tuple[str, Path]:
    if _is_elsewhere(name):
        if stage:
            raise ConfigError(f"{name} is a model by itself and has no stage {stage!r}.")
        from nanodag.model.model_source import fetched

        is_folder, hub_name = Path(name).exists(), name.removeprefix("hub:")
        model = fetched(f"file:{name}" if is_folder else f"hub:{hub_name}")
        return Path(name).resolve().name if is_folder else hub_name, model
    store = served_store(file)
    record = find_run(store, name)
    models = finished_stages(record, MODEL)
    if stage and stage not in models:
        raise ArtifactNotFound(
            f"Run {record.run} has no finished model {stage!r}; it has {listed(models)}.{nearest(stage, models)}"
        )
    if not models:
        raise ArtifactNotFound(f"Run {record.run} has no finished model yet.")
    chosen = stage or models[-1]
    print_stale(Console(stderr=True, highlight=False), record, chosen)
    return chosen, store.materialize(store.get(f"{record.run}:{chosen}"))


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
