"""Weights of the model that an engine begins with and of LoRA's adapters, which come alone.

The trainer's function merges them in the trainer's precision (nanodag.model.lora), so both sides have the same bits.
The base is mapped from its files, which takes no memory of its own. That of a class of transformers is held in float32
on the CPU, as its parameters are not the tensors of its files.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from nanodag.model.architecture import Architecture
from nanodag.model.headers import ADAPTER_CONFIG
from nanodag.model.lora import merged_onto, read_adapter
from nanodag.model.transformers_class import load_class
from nanodag.sampler.weights import NamedTensors, read_tensors

if TYPE_CHECKING:
    from nanodag.sampler.engine import Engine


def base_tensors(folder: Path, architecture: Architecture) -> dict[str, Tensor]:
    """A model's tensors by the names of the trainer's parameters, on the CPU."""
    if architecture.model_code == "transformers":
        return {name: p.detach() for name, p in load_class(folder).whole.named_parameters()}
    tied = ("lm_head.weight",) if architecture.tied else ()
    return {name: tensor for name, tensor in read_tensors(folder).items() if name not in tied}


class AdapterBuilder:
    """Makes weights of an engine's base and of adapters by peft's names, as a WeightsBuilder makes them of all tensors.
    source: where they are from, for messages. Any thread may call it."""

    def __init__(self, engine: "Engine", scale: float, source: str) -> None:
        self._engine, self._scale, self._source, self._adapters = engine, scale, source, dict[str, Tensor]()

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """More adapters, in any order."""
        self._adapters |= {name: tensor.to(self._engine.device) for name, tensor in tensors.items()}

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the model, (name, tensor). Raises BadRequest for adapters of another one."""
        return merged_onto(self._engine.base().items(), self._adapters, scale=self._scale, source=self._source)

    def whole(self) -> NamedTensors:
        """Finish the weights. Raises BadRequest as `merged` does, and for NaN or infinity."""
        builder = self._engine.builder(self._source)
        for name, tensor in self.merged():
            builder.add({name: tensor})
        weights = builder.whole()
        weights.adapters = self
        return weights


def builder_of(engine: "Engine", folder: Path) -> AdapterBuilder | None:
    """Builder with the adapters in a folder of peft's format; None for a whole model. Raises BadRequest if damaged."""
    if not os.path.isfile(folder / ADAPTER_CONFIG):  # False also for a path that no file can have
        return None
    tensors, scale = read_adapter(folder)
    builder = AdapterBuilder(engine, scale, f"the adapters in {folder}")
    builder.add(tensors)
    return builder
