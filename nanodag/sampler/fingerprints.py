"""Fingerprints of weights: what trainer and sampler compare after a sync. One tensor, one fingerprint.

A fingerprint is the first 8 bytes of the sha256 of a tensor's bytes, in hex; so is SGLang's, where the tensor lies on a
CPU. Two layouts:

checkpoint  each tensor of a Hugging Face directory under its own name: what the embedded sampler answers
sglang      what SGLang holds on a CPU: query, key and value one under the other, gate and up too; embedding and output
            head filled up with zeros to a multiple of 64 rows, the MLP's inner width to one of 32; in the precision
            that it computes in

Source: sgl-project/sglang 0.5.23, srt/utils/weight_checker.py, srt/managers/mm_utils.py (tensor_hash),
srt/layers/vocab_parallel_embedding.py, srt/configs/update_config.py. Not covered: SGLang on a GPU, which hashes another
way, and tensor parallelism, where each rank holds a part.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

Layout = Literal["checkpoint", "sglang"]
# the whole -> its parts, in their order
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# What is filled up with zeros: (ends of the name, dimension, to a multiple of)
_PADDED = (
    (("embed_tokens.weight", "lm_head.weight"), 0, 64),
    (("gate_proj.weight", "up_proj.weight"), 0, 32),
    (("down_proj.weight",), 1, 32),
)


class Fingerprints:
    """Takes a model's tensors one after the other and keeps none of them. dtype: that they are converted to first; None
    leaves them as they are."""

    def __init__(self, layout: Layout, dtype: torch.dtype | None = None) -> None:
        self._layout = layout
        self._dtype = dtype
        self._found: dict[str, str] = {}
        self._open: dict[str, tuple[int, Any]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor under the name that transformers gives it. Parts of one matrix must come in their order."""
        tensor = tensor.detach()
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        whole, place, num_places = name, 0, 1
        if self._layout == "sglang":
            tensor = _padded(name, tensor)
            for fused, parts in _FUSED.items():
                if part := next((part for part in parts if f".{part}." in name), ""):
                    whole, place, num_places = name.replace(part, fused), parts.index(part), len(parts)
        due, digest = self._open.pop(whole, (0, hashlib.sha256()))
        assert place == due, f"part {place} of {whole} came where {due} was due"
        # Rows follow one another, so the bytes of the whole are those of its parts.
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if place + 1 == num_places:
            self._found[whole] = digest.digest()[:8].hex()
        else:
            self._open[whole] = (place + 1, digest)

    def all(self) -> dict[str, str]:
        """Fingerprints of everything that was added, by name."""
        assert not self._open, f"these lack parts: {sorted(self._open)}"
        return dict(self._found)


def fingerprints_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Fingerprints of every tensor, in the layout of a checkpoint."""
    fingerprints = Fingerprints("checkpoint")
    for name, tensor in tensors:
        fingerprints.add(name, tensor)
    return fingerprints.all()


def overall(fingerprints: Mapping[str, str]) -> str:
    """One for the whole model, as SGLang computes it."""
    digest = hashlib.sha256()
    for name in sorted(fingerprints):
        digest.update(name.encode())
        digest.update(fingerprints[name].encode())
    return digest.hexdigest()


def _padded(name: str, tensor: Tensor) -> Tensor:
    for ends, dimension, multiple in _PADDED:
        if name.endswith(ends) and (missing := -tensor.shape[dimension] % multiple):
            return torch.nn.functional.pad(tensor, (0, 0, 0, missing) if dimension == 0 else (0, missing))
    return tensor
