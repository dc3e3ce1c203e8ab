"""Builds and calls `kernel.c`: prompts and steps of a model on one CPU core in one call instead of hundreds.

On another device, on several threads, or where a model is not of a shape that the kernel takes, torch decodes, with the
same results up to rounding.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanodag.model.architecture import Architecture
from nanodag.model.c_library import c_library, fields
from nanodag.sampler.weights import VOCABULARY_BLOCK, Weights

LANES = 16  # widths must be multiples of it
CACHE_BLOCK = 16  # tokens that lie together in a cache of bfloat16: TOKENS of kernel.c
PANEL_COLUMNS = 64  # of a matrix, that are multiplied at a time: PANEL * LANES of kernel.c at most
PROMPT_ROWS = 96  # tokens of prompts that are run together: activations of more would not fit a core's cache
SOURCE = Path(__file__).with_name("kernel.c")


class Buffers:
    """Cache and states of B slots of C tokens: keys and values (B, K, C, D) of each layer, in ``cache_dtype``, and the
    last layer's output (B, H) of what is decoded, and of each slot's prompt. All are zeros, not empty: masked positions
    are multiplied by zero, which stale NaN would survive. Capacity that is never used costs no memory on a CPU."""

    def __init__(
        self, a: Architecture, num_slots: int, capacity: int, device: torch.device, cache_dtype: torch.dtype
    ) -> None:
        self.num_slots, self.capacity, self.cache_dtype = num_slots, capacity, cache_dtype
        shape = (num_slots, a.num_kv_heads, capacity, a.head_dim)
        self.keys = [_zeros_when_touched(shape, device, cache_dtype) for _ in range(a.num_layers)]
        self.values = [_zeros_when_touched(shape, device, cache_dtype) for _ in range(a.num_layers)]
        # Rows that lie a power of two apart would share a set of the processor's cache.
        self.hidden = torch.zeros(num_slots, a.hidden_size + LANES, device=device)[:, : a.hidden_size]
        self.prompt_hidden = torch.zeros(num_slots, a.hidden_size, device=device)


def _zeros_when_touched(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros, which on a CPU take no memory until they are used: torch.zeros writes all of them at once."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, dtype.itemsize * math.prod(shape)), dtype=dtype).view(shape)


class _Matrix(Structure):
    _fields_ = [("at", c_void_p), ("is_bf16", c_int64)]


class _Layer(Structure):
    _fields_ = [
        *fields(_Matrix, "qkv output gate_up down"),
        *fields(c_void_p, "qkv_bias qk_gain output_bias keys values"),
        *fields(c_int64, "is_rotated window"),
    ]


_SIZES = fields(c_int64, "num_layers hidden_size num_kv_heads heads_per_kv head_dim intermediate_size vocab_size")


class _Model(Structure):
    _fields_ = [
        *_SIZES,
        *fields(c_int64, "vocab_width capacity hidden_stride cache_is_bf16"),
        ("norm_eps", c_double),
        *fields(_Matrix, "embedding head"),
        *fields(c_void_p, "norm rotations layers hidden normed qkv attended gate_up activated logits scratch rounded"),
        ("packed", c_void_p),
    ]


class Kernel:
    """The compiled step of one model, bound to its buffers, and to the weights that it was given last."""

    def __init__(
        self, library: ctypes.CDLL, architecture: Architecture, weights: Weights, buffers: Buffers, rotations: Tensor
    ) -> None:
        a = architecture
        self.library, rows = library, max(buffers.num_slots, PROMPT_ROWS)
        self.logits = torch.zeros(buffers.num_slots, weights.head.shape[1])
        deepest = max(a.hidden_size, a.num_heads * a.head_dim, a.intermediate_size)
        worked_in = {
            "rotations": rotations,
            "normed": torch.zeros(rows, a.hidden_size),
            "qkv": torch.zeros(rows, a.qkv_width),
            "attended": torch.zeros(rows, a.num_heads * a.head_dim),
            "gate_up": torch.zeros(rows, 2 * a.intermediate_size),
            "activated": torch.zeros(rows, a.intermediate_size),
            "logits": self.logits,
            "scratch": torch.zeros(max(buffers.capacity, self.logits.shape[1] // VOCABULARY_BLOCK)),
            "rounded": torch.zeros(rows, deepest, dtype=torch.bfloat16),
            "packed": torch.zeros(deepest, PANEL_COLUMNS, dtype=torch.int32),
        }
        # The structures hold bare addresses: these keep what they point to.
        self._kept, self._buffers, self._capacity = worked_in, buffers, buffers.capacity
        self._layers = (_Layer * a.num_layers)()
        for index in range(a.num_layers):
            self._layers[index].keys = _address(buffers.keys[index])
            self._layers[index].values = _address(buffers.values[index])
            self._layers[index].is_rotated = index not in a.unrotated_layers
            self._layers[index].window = a.window_of(index) or 0
        self._model = _Model(
            **{name: getattr(a, name) for name, _ in _SIZES},
            **{name: _address(tensor) for name, tensor in worked_in.items()},
            vocab_width=self.logits.shape[1],
            capacity=buffers.capacity,
            hidden_stride=buffers.hidden.stride(0),
            cache_is_bf16=buffers.cache_dtype == torch.bfloat16,
            norm_eps=a.norm_eps,
            layers=ctypes.cast(self._layers, c_void_p),
            hidden=buffers.hidden.data_ptr(),
        )
        self.reference = ctypes.byref(self._model)
        # The same model with outputs of its own, so that prompts leave those of running samples alone.
        self._prompt_hidden = torch.zeros(PROMPT_ROWS, buffers.hidden.stride(0))
        self._prompt_model = _Model.from_buffer_copy(self._model)
        self._prompt_model.hidden = self._prompt_hidden.data_ptr()
        self.use(weights)

    def use(self, weights: Weights) -> None:
        """Compute with these from now on. Nothing is copied, so this takes microseconds."""
        self._weights = weights
        for place, layer in zip(self._layers, weights.layers, strict=True):
            for name in ("qkv", "output", "gate_up", "down"):
                setattr(place, name, _matrix(getattr(layer, name)))
            for name in ("qkv_bias", "qk_gain", "output_bias"):
                setattr(place, name, _address(getattr(layer, name)))
        for model in (self._model, self._prompt_model):
            model.embedding, model.head = _matrix(weights.embedding), _matrix(weights.head)
            model.norm = _address(weights.norm)

    def prefill(self, prompts: Sequence[np.ndarray], slots: Sequence[int], starts: Sequence[int]) -> None:
        """Run each prompt (T,) int64 from its start on and write its keys, values and last hidden state to its slot,
        which holds what is before the start."""
        assert max(len(prompt) for prompt in prompts) <= self._capacity
        rests = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        lengths = [len(rest) for rest in rests]
        tokens, ends = np.concatenate(rests), np.cumsum(lengths)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        of_slots = np.repeat(np.array(slots, dtype=np.int64), lengths)
        for start in range(0, len(tokens), PROMPT_ROWS):
            arrays = [array[start : start + PROMPT_ROWS] for array in (tokens, positions, of_slots)]
            rows = len(arrays[0])
            first, end = np.searchsorted(ends, (start + 1, start + rows + 1))  # prompts that end here
            last = ends[first:end] - 1 - start
            addresses = (array.ctypes.data for array in arrays)
            self.library.forward(ctypes.byref(self._prompt_model), rows, *addresses, len(last), last.ctypes.data)
            for row, slot in enumerate(slots[first:end]):
                self._buffers.prompt_hidden[slot] = self._prompt_hidden[row, : self._model.hidden_size]


def bind(architecture: Architecture, weights: Weights, buffers: Buffers, rotations: Tensor) -> Kernel | None:
    """The kernel for one model, or None where torch has to do: another device or shape, or several threads.

    Raises MissingTool where no C compiler builds it."""
    a = architecture
    widths = (a.hidden_size, a.head_dim, a.intermediate_size)
    is_here = all(tensor.device.type == "cpu" for tensor in weights.tensors())
    if not is_here or any(width % LANES for width in widths) or torch.get_num_threads() != 1:
        return None
    return Kernel(_library(), architecture, weights, buffers, rotations)


_FORWARD, _STEP = [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p], [c_void_p, c_void_p, c_int64]
_TYPES = {"forward": (_FORWARD, None), "decode": (_STEP, None), "logits": (_STEP, None), "draw": (_STEP, c_int64)}
_library = cache(partial(c_library, SOURCE, "the embedded sampler's kernel", _TYPES))


def _matrix(tensor: Tensor | None) -> _Matrix:
    return _Matrix(_address(tensor), tensor is not None and tensor.dtype == torch.bfloat16)


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
