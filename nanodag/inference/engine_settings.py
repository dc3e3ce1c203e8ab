"""Description of an engine: one record says how its processes run; the embedded sampler's get it as JSON. No torch.

A new option is a field here, and a line where it is used.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from nanodag.host.machine import visible_gpus
from nanodag.host.ports import LOOPBACK
from nanodag.inference.access_checks import DEFAULT_MAX_BODY_BYTES
from nanodag.inference.cache_size import DEFAULT_CACHE_BYTES
from nanodag.inference.engine_install import Device
from nanodag.inference.sglang_options import Option


class EngineSettings(BaseModel):
    """Settings of an engine's process. A value of None leaves it to the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    engine: Literal["embedded", "sglang", "vllm"] = "embedded"
    model: Path = Path()
    base: Path | None = None
    """The model of adapters; `model` may then be a folder of them. None: `model`."""
    adapters: Mapping[str, Path] = {}
    """Folders of peft's format over `model`, by the names that requests give: for vLLM."""
    lora_rank: int = 0
    """Largest one of adapters that it has or gets."""
    weight_version: str = "default"
    device: Device = "cpu"
    dtype: str = "auto"
    """`float32`, `bfloat16` or `auto`."""
    gpus: str = ""
    """GPUs that it sees, as CUDA_VISIBLE_DEVICES names them; "" for those of this process."""
    host: str = LOOPBACK
    network: str = ""
    """Address of its machine on whose interface gloo and NCCL meet the others of a group of weights; "" for what `host`
    says."""
    port: int = 0
    token: str = Field(default="", exclude=True, repr=False)
    """Key that requests must bear. It goes by the environment: every user of the machine reads a command line."""
    max_batch: int | None = None
    """Samples that one process decodes at once."""
    context_length: int | None = None
    """Tokens of prompt and answer together."""
    threads: int = 1
    seed: int | None = None
    """For requests that have none of their own."""
    start_timeout_s: float = 120.0
    """Without a sign of progress."""

    # Of the embedded engine, and partly of vLLM.
    cache_bytes: int = DEFAULT_CACHE_BYTES
    """Most that keys and values may take."""
    deterministic: bool = False
    """The same bits for a request whoever runs beside it."""
    stream_every_s: float = 0.0
    """Least time between two events of a stream; 0 for every token."""
    allow_host: tuple[str, ...] = ()
    """Names of its machine that requests may bear, beside its own."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    """Of a request; more is answered 413."""
    max_text_bytes: int = 1 << 20
    """Of a request's prompts that are text: a tokenizer takes seconds for a MB."""
    ready_file: Path | None = None
    """Gets `{"port": N, "pid": N}`, whole and once, when it answers."""

    # Of SGLang and vLLM.
    python: str = "auto"
    """Interpreter of its environment, as `sampler.python`."""
    tensor_parallel: int = 1
    cache_tokens: int | None = None
    """Most that its cache holds, so that it takes one amount whoever starts first; else max_batch contexts."""
    memory_fraction: float | None = None
    """Of what is free when it starts: the most that weights and cache may take."""
    options: Mapping[str, Option] = {}
    """Further ones of its server, by name; they go before those given here."""

    def of_replica(self, number: int, model: Path, version: str | int) -> "EngineSettings":
        """Settings of one process of several: on GPUs of its own as far as there are so many, then shared."""
        update: dict[str, object] = {"model": model, "weight_version": str(version)}
        if self.device == "cuda" and not self.gpus:
            each = self.tensor_parallel if self.engine != "embedded" else 1
            visible = visible_gpus()
            update["gpus"] = ",".join(visible[(number * each + n) % len(visible)] for n in range(each))
        if self.engine != "embedded":  # it draws from one sequence
            update["seed"] = (self.seed or 0) + number
        elif self.deterministic:
            update["threads"] = 1
        return self.model_copy(update=update)

    def tell_port(self, port: int) -> None:
        """Write the file that says where a server answers, if it has one."""
        if self.ready_file is not None:
            partial = self.ready_file.with_suffix(".partial")
            partial.write_text(json.dumps({"port": port, "pid": os.getpid()}))
            partial.rename(self.ready_file)
