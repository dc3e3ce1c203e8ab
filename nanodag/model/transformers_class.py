"""The classes that transformers has for causal models: read from a folder, their bodies, how logits follow from those.

A model's own code is never run.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from nanodag.errors import ConfigError
from nanodag.errors.words import counted
from nanodag.model.headers import ADAPTER_CONFIG
from nanodag.model.pictures import Pictures, takes_images

log = logging.getLogger(__name__)

LOGIT_TOLERANCE = 1e-3  # of the largest
_PROBE = 8  # tokens by which a class's own logits are compared with those that are computed here


@dataclass(frozen=True, eq=False)
class LoadedClass:
    """A model in its class of transformers, without dropout. Its logits are those of hidden states times the head's
    weight, `capped`."""

    whole: Any
    pictures: Pictures | None = None  # of a model that reads images

    @cached_property
    def body(self) -> Callable[..., Any]:
        """The decoder below the head: token ids, and maybe a cache, to the last hidden states."""
        found = self.whole.model if self.pictures is not None else self.whole.get_decoder()
        return self.whole.model if found is self.whole else found  # Llama 4 finds none by its prefix

    @property
    def scale(self) -> float:
        """Factor of the hidden states, for that of the logits."""
        config = self.whole.config
        factor = float(getattr(config, "lm_head_multiplier", 1.0)) * float(getattr(config, "logit_scale", 1.0))
        return factor / float(getattr(config, "logits_scaling", 1.0))

    @property
    def cap(self) -> float | None:
        cap = getattr(self.whole.config, "final_logit_softcapping", None)
        return None if cap is None else float(cap)

    @property
    def head(self) -> Any:
        """The output head's weight, (V, W)."""
        return self.whole.lm_head.weight

    def hidden_of(self, **inputs: Any) -> Tensor:
        """(R, T) int64 `input_ids` -> (R, T, W), each row a text from its begin, scaled for the head. Ids may spell
        images of a model that reads them; who has looked these up gives what `Pictures.inputs_of` said."""
        if self.pictures is not None and "pixel_values" not in inputs:
            inputs |= self.pictures.inputs_of(inputs["input_ids"])
        hidden: Tensor = self.body(**inputs)[0].to(self.head.dtype)  # Mamba 2 adds up in float32
        return hidden if self.scale == 1.0 else hidden * self.scale

    def cast(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move it, its parameters in this precision. Buffers keep theirs: angles of positions in bfloat16 are wrong."""
        self.whole.to(device)
        for parameter in self.whole.parameters():
            parameter.data = parameter.data.to(dtype)


@contextmanager
def _unreadable(folder: Path) -> Iterator[None]:
    """Raise ConfigError where transformers fails at a folder, whose files somebody else wrote."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (
        *(ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError),
        *(SafetensorError, StrictDataclassError),
    ) as error:
        raise ConfigError(f"transformers cannot read the model in {folder}: {error}") from error


def _config_of(folder: Path) -> Any:
    """A folder's config.json as transformers reads it. Raises ConfigError for one that names code of a hub, and beside
    adapters, in whose base's place transformers would put another model."""
    from transformers import AutoConfig

    if (folder / ADAPTER_CONFIG).exists():
        raise ConfigError(f"{folder} holds {ADAPTER_CONFIG}: import its base, and name this folder as `adapter`.")
    with _unreadable(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for name in ("_attn_implementation", "_experts_implementation"):
        if "/" in str(getattr(config, name, "")):  # transformers would fetch and run that where `kernels` is installed
            raise ConfigError(f"{folder}/config.json names the code {getattr(config, name)!r}, and none is run.")
    return config


def _auto_class(config: Any) -> Any:
    """The class of transformers that chooses a model's: of those that read images here, or of causal models."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def check_known(folder: Path) -> None:
    """Raise ConfigError where transformers has no class of causal models for a folder's config.json."""
    from transformers import __version__

    config = _config_of(folder)
    if type(config) not in _auto_class(config)._model_mapping:
        raise ConfigError(
            f"model_code: transformers, and transformers {__version__} has no causal model of type "
            f"{config.model_type}, as config.json in {folder} says."
        )


def load_class(folder: Path) -> LoadedClass:
    """The class that transformers has for a folder's model, in float32 on CPU: in another precision from_pretrained
    would change torch's default for all threads meanwhile.

    Raises ConfigError where transformers does not know the type, a tensor is missing, or logits are made in a way that
    is not known here.
    """
    from transformers import PretrainedConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = _config_of(folder)
    with _unreadable(folder):
        parts = [config, *(part for part in vars(config).values() if isinstance(part, PretrainedConfig))]
        for part in parts:
            for name in [name for name, value in vars(part).items() if "drop" in name and isinstance(value, float)]:
                setattr(part, name, 0.0)
        whole, report = _auto_class(config).from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    if missing := sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])}):
        raise ConfigError(f"{folder} lacks {counted(len(missing), 'tensor')}, the first is {missing[0]}.")
    if unknown := sorted(report["unexpected_keys"]):
        log.warning("%s: %s without a place, the first is %s", folder, counted(len(unknown), "tensor"), unknown[0])
    loaded = LoadedClass(whole.eval(), Pictures(folder, whole) if takes_images(config) else None)
    _check_logits(folder, loaded)
    return loaded


@torch.no_grad()
def _check_logits(folder: Path, loaded: LoadedClass) -> None:
    whole, name = loaded.whole, type(loaded.whole).__name__
    head = whole.get_output_embeddings()
    if head is None or getattr(whole, "lm_head", None) is not head or getattr(head, "bias", None) is not None:
        raise ConfigError(f"{folder}: the head of {name} is no `lm_head` without bias.")
    ids = torch.arange(_PROBE)[None] % len(loaded.head)
    expected = whole(input_ids=ids, use_cache=False).logits
    logits = capped(loaded.hidden_of(input_ids=ids, use_cache=False) @ loaded.head.T, loaded.cap)
    if not expected.isfinite().all():  # of weights that have diverged: who uses them says so
        return
    worst = float((logits - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    if not worst <= LOGIT_TOLERANCE:
        raise ConfigError(
            f"{folder}: {name} makes its logits in a way that is not known here; they differ by {worst:.1g} of the "
            "largest."
        )


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap), as Gemma 2 has it (arXiv:2408.00118); the logits themselves without one."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
