"""Builds and calls `kernel.c`: a decode step of a float32 model on one CPU core in one call instead of hundreds.

The C compiler of the machine is asked once for each kind of processor; what it makes is kept in the user's cache folder
(`NANODAG_CACHE`, else `XDG_CACHE_HOME/nanodag`, else `~/.cache/nanodag`). Where there is no compiler, or a model is not
of a shape that the kernel takes, torch decodes instead, with the same results up to rounding.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import Structure, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanodag.data.digests import cache_folder
from nanodag.sampler.architecture import Architecture
from nanodag.sampler.decode_views import Buffers
from nanodag.sampler.weights import VOCABULARY_BLOCK, Weights

log = logging.getLogger(__name__)

LANES = 16  # widths must be multiples of it
SOURCE = Path(__file__).with_name("kernel.c")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
BUILD_TIMEOUT_S = 120.0


class _Layer(Structure):
    _fields_ = [
        (name, c_void_p)
        for name in ("qkv", "qkv_bias", "qk_gain", "output", "output_bias", "gate_up", "down", "keys", "values")
    ]


class _Model(Structure):
    _fields_ = [
        *(
            (name, c_int64)
            for name in (
                "num_layers", "hidden_size", "num_kv_heads", "heads_per_kv", "head_dim", "intermediate_size",
                "vocab_size", "vocab_width", "capacity", "hidden_stride",
            )
        ),
        ("norm_eps", c_double),
        *((name, c_void_p) for name in ("embedding", "head", "norm", "rotations", "layers")),
        *(
            (name, c_void_p)
            for name in ("hidden", "normed", "qkv", "attended", "gate_up", "activated", "logits", "scratch")
        ),
    ]  # fmt: skip


class Kernel:
    """The compiled step, bound to one model's weights and buffers, which may change in value but not in place."""

    def __init__(
        self, library: ctypes.CDLL, architecture: Architecture, weights: Weights, buffers: Buffers, rotations: Tensor
    ) -> None:
        a = architecture
        self._library = library
        self._logits = buffers.logits
        # The structures hold bare addresses: these keep what they point to.
        scratch = torch.zeros(max(buffers.capacity, buffers.logits.shape[1] // VOCABULARY_BLOCK))
        self._kept = (weights, buffers, rotations, scratch)
        self._layers = (_Layer * a.num_layers)()
        for index, layer in enumerate(weights.layers):
            for name in ("qkv", "qkv_bias", "qk_gain", "output", "output_bias", "gate_up", "down"):
                setattr(self._layers[index], name, _address(getattr(layer, name)))
            self._layers[index].keys = _address(buffers.keys[index])
            self._layers[index].values = _address(buffers.values[index])
        self._model = _Model(
            num_layers=a.num_layers,
            hidden_size=a.hidden_size,
            num_kv_heads=a.num_kv_heads,
            heads_per_kv=a.heads_per_kv,
            head_dim=a.head_dim,
            intermediate_size=a.intermediate_size,
            vocab_size=a.vocab_size,
            vocab_width=buffers.logits.shape[1],
            capacity=buffers.capacity,
            hidden_stride=buffers.hidden.stride(0),
            norm_eps=a.norm_eps,
            embedding=_address(weights.embedding),
            head=_address(weights.head),
            norm=_address(weights.norm),
            rotations=_address(rotations),
            layers=ctypes.cast(self._layers, c_void_p),
            hidden=buffers.hidden.data_ptr(),
            normed=_address(buffers.normed),
            qkv=_address(buffers.qkv),
            attended=_address(buffers.attended),
            gate_up=_address(buffers.gate_up),
            activated=_address(buffers.activated),
            logits=_address(buffers.logits),
            scratch=_address(scratch),
        )
        self._reference = ctypes.byref(self._model)

    def decode(self, tokens: np.ndarray, positions: np.ndarray) -> None:
        """As Model.decode; each row reads as much of the cache as it has. tokens, positions: (R,) int64."""
        self._library.decode(self._reference, len(tokens), tokens.ctypes.data, positions.ctypes.data)

    def logits(self, rows: int, inverse_temperature: Tensor | None) -> Tensor:
        """As Model.logits."""
        self._library.logits(self._reference, rows, _address(inverse_temperature))
        return self._logits[:rows]

    def draw(self, greedy: np.ndarray, keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw from what ``logits`` left, and overwrite it. As drawing.draw without top-p and top-k.

        greedy: (R,) bool. keys: (R,) uint64. counts: (R,) int64. Returns tokens (R,) int64, log-probabilities (R,)
        float64.
        """
        tokens, logprobs = np.empty(len(keys), dtype=np.int64), np.empty(len(keys))
        arrays = (greedy, keys, counts, tokens, logprobs)
        self._library.draw(self._reference, len(keys), *(array.ctypes.data for array in arrays))
        return tokens, logprobs


def bind(architecture: Architecture, weights: Weights, buffers: Buffers, rotations: Tensor) -> Kernel | None:
    """The kernel for one model, or None where torch has to do: another device, dtype or shape, or no compiler."""
    a = architecture
    widths = (a.hidden_size, a.head_dim, a.intermediate_size)
    is_plain = all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in weights.tensors())
    if not is_plain or any(width % LANES for width in widths) or torch.get_num_threads() != 1:
        return None
    library = _library()
    return None if library is None else Kernel(library, architecture, weights, buffers, rotations)


@cache
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        log.warning("There is no C compiler (cc): decoding takes about twice as long without the compiled kernel.")
        return None
    try:
        path = _built(compiler)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("The decode kernel could not be built with %s; torch decodes instead. %s", compiler, detail)
        return None
    library.decode.argtypes = [c_void_p, c_int64, c_void_p, c_void_p]
    library.logits.argtypes = [c_void_p, c_int64, c_void_p]
    library.draw.argtypes = [c_void_p, c_int64, *[c_void_p] * 5]
    library.decode.restype = library.logits.restype = library.draw.restype = None
    return library


def _built(compiler: str) -> Path:
    """The shared library, made now or found. Two processes may build it at once: each renames its own into place."""
    identity = "\0".join([SOURCE.read_text(encoding="utf-8"), compiler, *FLAGS, _processor()])
    path = cache_folder() / f"decode-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
            made.replace(path)
    return path


def _processor() -> str:
    """What `-march=native` looks at: a home folder may be shared by machines of several kinds."""
    information = Path("/proc/cpuinfo")
    if not information.exists():
        return platform.platform() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = information.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(wanted))


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
