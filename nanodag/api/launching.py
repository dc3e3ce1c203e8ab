"""From a folder to a served model: which engine processes it gets, on which devices."""

import argparse
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanodag.api.served_model import ServedModel, TokenText
from nanodag.engines.fleet import Fleet
from nanodag.engines.start import ServerProcess, start_engine
from nanodag.errors import BadRequest, ConfigError, SourceError
from nanodag.host.images import layout_of
from nanodag.host.machine import detect, visible_gpus
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_install import Device
from nanodag.inference.engine_settings import EngineSettings
from nanodag.model.architecture import (
    check_same_shape,
    check_sglang,
    read_checkpoint,
    read_json,
    vocabulary_and_positions,
)
from nanodag.model.headers import ADAPTER_CONFIG, faults_of_config
from nanodag.tokenizer.chat import ChatRenderer, load_renderer

STREAM_EVERY_S = 0.05
UNWELL_S = 60.0  # an engine that does not answer for so long is ended
SGLANG_START_S = 600.0
LARGEST_SGLANG_CONTEXT = 8192  # unless another one is asked for
SGLANG_MEMORY = {"cpu": 0.5, "cuda": 0.85}  # of what is free, over all replicas that share a device


def served_model(
    args: argparse.Namespace,
    name: str,
    folder: Path,
    version: str,
    logs: Path,
    *,
    first: int,
    num_models: int,
    adapters: Mapping[str, Path] = {},
) -> ServedModel:
    """A model whose engines are not started yet.

    args: as of `command.py`. version: of its weights. first: engines that the models before it have, so that each gets
    a GPU of its own as far as there are so many. adapters: folders that its engines hold, by the names that
    `with_adapters` is given. Raises SourceError, BadRequest or MissingTool for what cannot be served.
    """
    tokens = TokenText(folder)
    device = detect().device if args.device == "auto" else args.device
    with faults_of_config():
        vocab_size, positions = vocabulary_and_positions(folder)
    context = min(args.context_length or LARGEST_SGLANG_CONTEXT, positions)
    token = secrets.token_hex(16)  # engines answer this process alone
    # What the engine would refuse after a start of seconds is refused here.
    architecture = read_checkpoint(folder).architecture if args.engine == "embedded" else None
    if args.engine == "sglang":
        check_sglang(folder, context, "--engine")

    def connect(url: str) -> SamplerClient:
        is_embedded = args.engine == "embedded"
        return SamplerClient(url, token=token, request_timeout_s=args.request_timeout_s, is_embedded=is_embedded)

    settings = _settings(args, device, context, token, num_models)
    if adapters:
        if args.engine != "vllm":
            raise ConfigError(f"--adapter: {args.engine} has the weights of one model; take --engine vllm.")
        with faults_of_config():
            rank = max(int(read_json(adapter / ADAPTER_CONFIG)["r"]) for adapter in adapters.values())
        settings = settings.model_copy(update={"adapters": adapters, "lora_rank": rank})

    def launch(number: int, weights: Path, version: str) -> ServerProcess:
        log_path = logs / f"{name.replace('/', '-')}-{number}.log"
        return start_engine(settings.of_replica(first + number, weights, version), log_path=log_path)

    def check(weights: Path) -> None:
        if architecture is not None:
            check_same_shape(read_checkpoint(weights), architecture)
        elif (new_size := read_json(weights / "config.json").get("vocab_size")) != vocab_size:
            raise BadRequest(f"the checkpoint in {weights} has a vocabulary of {new_size} instead of {vocab_size}")

    return ServedModel(
        name=name,
        tokens=tokens,
        renderer=_renderer(folder),
        backend=Fleet(
            model=folder,
            version=version,
            launch=launch,
            connect=connect,
            name=name,
            max_restarts=None,
            health_timeout_s=UNWELL_S / 2,  # it is asked twice
            is_watched_idle=True,
            check=check,
        ),
        context_length=context,
        vocab_size=vocab_size,
        is_sglang=args.engine == "sglang",
        reads_images=args.engine == "embedded" and layout_of(folder) is not None,
        root=folder,
    )


def with_adapters(model: ServedModel, lora_path: str, folder: Path) -> ServedModel:
    """The same with adapters that its engines hold under a name, and by the tokenizer in their folder where there is
    one."""
    with suppress(SourceError):
        model = replace(model, tokens=TokenText(folder), renderer=_renderer(folder))
    return replace(model, lora_path=lora_path, root=folder)


def _renderer(folder: Path) -> ChatRenderer | None:
    try:
        return load_renderer(folder)
    except SourceError:  # a base model of others has no chat template
        return None


async def with_its_context(model: ServedModel) -> ServedModel:
    """The same, with the context that its engine, which is up, says that it has."""
    assert isinstance(model.backend, Fleet)
    if model.is_sglang:
        return model
    told = await (await model.backend.choose()).client.model_info()
    return replace(model, context_length=int(told["context_length"]))


def _settings(args: argparse.Namespace, device: Device, context: int, token: str, num_models: int) -> EngineSettings:
    shared: dict[str, Any] = {"engine": args.engine, "device": device, "token": token}
    shared |= {"max_batch": args.max_batch, "threads": args.threads}
    if args.engine == "embedded":
        return EngineSettings(
            dtype=args.dtype,
            context_length=args.context_length,
            deterministic=args.deterministic,
            stream_every_s=STREAM_EVERY_S,
            **shared,
        )
    num_gpus = len(visible_gpus()) if device == "cuda" else 1
    sharing = -(-args.replicas * num_models * args.tensor_parallel // num_gpus)
    memory = SGLANG_MEMORY[device] / sharing
    # With its tokenizer: grammars need it, and so does text by /generate.
    options = {"skip-tokenizer-init": False, "grammar-backend": "xgrammar"}
    if args.engine == "vllm":  # a share of the device on a GPU, and a size on a CPU, where it would take a half
        options = {"gpu_memory_utilization": memory} if device == "cuda" else {}
    return EngineSettings(
        dtype="auto" if device == "cuda" else "float32",
        context_length=context,
        start_timeout_s=SGLANG_START_S,
        python=args.python,
        tensor_parallel=args.tensor_parallel,
        memory_fraction=memory,
        options=options,
        **shared,
    )
