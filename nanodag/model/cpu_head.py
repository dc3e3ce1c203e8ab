"""Calls `head.c`: softmax over the vocabulary on CPU cores, one walk over the logits where torch takes seven.

Letters: N rows, V vocabulary.
"""

import ctypes
from ctypes import Structure, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nanodag.model.c_library import c_library
from nanodag.model.core_threads import on_threads

SOURCE = Path(__file__).with_name("head.c")
DTYPES = (torch.float32, torch.bfloat16)
LANES = 16  # at most: what a row's scratch is longer than V


def can_score(logits: Tensor) -> bool:
    """Whether the functions here take such logits."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES


def losses(logits: Tensor, targets: Tensor, *, with_gradient: bool) -> Tensor:
    """-log p of each target, (N,) float32; with_gradient: the logits (N, V) become its gradient."""
    found = torch.empty(len(logits))
    _run("losses", logits, targets, 1.0, d_logits=logits if with_gradient else None, losses=found)
    return found


def score(logits: Tensor, targets: Tensor, temperature: float, *, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Over the temperature: each target's logit, logsumexp, and entropy (0 where not wanted), (N,) float32 each."""
    selected, logsumexp, entropies = torch.zeros(3, len(logits)).unbind()
    wanted = entropies if with_entropy else None
    _run("score", logits, targets, temperature, selected=selected, logsumexp=logsumexp, entropies=wanted)
    return selected, logsumexp, entropies


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits (N, V): its likeliest token, the first of several, (N,) int64; and logsumexp, (N,)
    float32."""
    places, logsumexp = torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))
    _run("likeliest", logits, places, 1.0, places=places, logsumexp=logsumexp)
    return places, logsumexp


def score_back(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    logsumexp: Tensor,
    entropies: Tensor,
    d_logprobs: Tensor,
    d_entropies: Tensor | None,
) -> Tensor:
    """The gradient of the logits (N, V), in their dtype, from those of log-probabilities and entropies."""
    d_logits = torch.empty_like(logits)
    _run(
        "score_back",
        logits,
        targets,
        temperature,
        d_logits=d_logits,
        logsumexp=logsumexp,
        entropies=entropies,
        d_logprobs=d_logprobs.contiguous(),
        d_entropies=None if d_entropies is None else d_entropies.contiguous(),
    )
    return d_logits


class _Rows(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "vocabulary", "is_bf16")),
        *((name, c_void_p) for name in ("logits", "d_logits", "targets")),
        ("temperature", c_double),
        *((name, c_void_p) for name in ("losses", "selected", "logsumexp", "entropies")),
        *((name, c_void_p) for name in ("d_logprobs", "d_entropies", "places")),
    ]


def _run(function: str, logits: Tensor, targets: Tensor, temperature: float, **tensors: Tensor | None) -> None:
    kept = {"logits": logits, "targets": targets.contiguous(), **tensors}
    for name, tensor in kept.items():
        assert tensor is None or tensor.is_contiguous(), name
    num_rows, vocabulary = logits.shape
    places = targets.numpy()  # its bounds are no question to torch, which on other devices is one to wait for
    lowest, highest = (int(places.min()), int(places.max())) if num_rows else (0, 0)
    if lowest < 0 or highest >= vocabulary:  # C would read beyond the row
        raise IndexError(f"targets are from {lowest} to {highest}; the vocabulary has {vocabulary} tokens")
    addresses = {name: None if tensor is None else tensor.data_ptr() for name, tensor in kept.items()}
    rows = _Rows(
        num_rows=num_rows,
        vocabulary=vocabulary,
        is_bf16=logits.dtype == torch.bfloat16,
        temperature=temperature,
        **addresses,
    )
    reference, call = ctypes.byref(rows), getattr(_library(), function)

    def work(thread: int, num_threads: int) -> None:
        scratch = torch.empty(vocabulary + LANES)
        bounds = (num_rows * place // num_threads for place in (thread, thread + 1))
        call(reference, *bounds, scratch.data_ptr())

    on_threads(work)


@cache
def _library() -> ctypes.CDLL:
    library = c_library(SOURCE, "the losses of training on a CPU")
    for name in ("losses", "score", "score_back", "likeliest"):
        function = getattr(library, name)
        function.argtypes, function.restype = [c_void_p, c_int64, c_int64, c_void_p], None
    return library
