"""Buckets of weights by shared memory, as SGLang's `update_weights_from_tensor` takes them: what is sent is a handle.

On a CPU the handle names a file in shared memory, on a GPU memory of that GPU (CUDA IPC). Who sends keeps the bucket
until whoever received it has answered. Each receiver needs a handle of its own, because torch counts who has opened it.
A handle names its GPU by UUID, as SGLang reads it: the same GPU has another number in each process that sees others.

Source: sgl-project/sglang 0.5.23, srt/utils/common.py (MultiprocessingSerializer, SafeUnpickler), patch_torch.py and
srt/weight_sync/tensor_bucket.py; pytorch 2.13, torch/multiprocessing/reductions.py. SGLang reads only names that it
knows out of a pickle; SimpleNamespace is one, and has the fields of its FlattenedTensorMetadata.
"""

import base64
import io
import pickle
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions, set_sharing_strategy

CUDA_DEVICE = 6  # place of storage_device among the arguments of torch's rebuild_cuda_tensor
DTYPES = ("float32", "bfloat16", "float16", "uint8")
_ALLOWED = {
    "types": ("SimpleNamespace",),
    "torch": ("Size", "Tensor", *DTYPES),
    "torch.nn.parameter": ("Parameter",),
    "torch.storage": ("TypedStorage", "UntypedStorage"),
    "torch.multiprocessing.reductions": ("rebuild_storage_filename", "rebuild_tensor", "rebuild_typed_storage"),
}


def share(
    flat: Tensor, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, count: int
) -> tuple[Tensor, list[str]]:
    """An object to keep as long as it is shared, and so many handles, in base64. flat: (num_bytes,) uint8, tensors
    whose bytes lie one after the other; on a CPU it is copied into shared memory.

    Raises RuntimeError where there is no room for it.
    """
    # By file descriptors, torch's default, a receiver must be a child of this process.
    set_sharing_strategy("file_system")
    if flat.device.type == "cpu":  # what flat is a view of must not move there as a whole
        storage = torch.UntypedStorage._new_using_filename_cpu(flat.nbytes)
        flat = torch.empty(0, dtype=torch.uint8).set_(storage).copy_(flat)
    metadata, begin = [], 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        place = {"start_idx": begin, "end_idx": begin + size, "numel": size}
        metadata.append(SimpleNamespace(name=name, shape=torch.Size(shape), dtype=dtype, **place))
        begin += size
    return flat, [_pickled({"flattened_tensor": flat, "metadata": metadata}) for _ in range(count)]


def opened(handle: bytes, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a handle by name, copied to the device. Raises RuntimeError when it is no such handle, of another
    GPU, or what it names is gone."""
    try:
        content = _Unpickler(io.BytesIO(handle), device).load()
        flat = content["flattened_tensor"].to(device=device, copy=True)
        return {
            meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
            for meta in content["metadata"]
        }
    except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"this is no handle of a bucket of tensors: {error}") from error


def _pickled(content: Any) -> str:
    stream = io.BytesIO()
    pickler: Any = ForkingPickler(stream)  # whose annotations lack the table
    pickler.dispatch_table[Tensor] = _reduced
    pickler.dump(content)
    return base64.b64encode(stream.getvalue()).decode()


def _reduced(tensor: Tensor) -> tuple[Any, ...]:
    """Pickled form of a tensor as torch makes it, with its GPU's UUID in place of the GPU's number here."""
    rebuild, values = reductions.reduce_tensor(tensor)
    if rebuild is reductions.rebuild_cuda_tensor:
        values = (*values[:CUDA_DEVICE], gpu_uuid(values[CUDA_DEVICE]), *values[CUDA_DEVICE + 1 :])
    return rebuild, values


def gpu_uuid(device: int | torch.device) -> str:
    """Name of a GPU that is the same in every process of its machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


class _Unpickler(pickle.Unpickler):
    """Knows tensors in shared memory, and nothing that could run code."""

    def __init__(self, stream: io.BytesIO, device: torch.device) -> None:
        super().__init__(stream)
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return self._on_our_device
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
        return super().find_class(module, name)

    def _on_our_device(self, *arguments: Any) -> Tensor:
        """Raises ValueError for memory of a GPU that is not this sampler's."""
        values = list(arguments)
        ours = gpu_uuid(self._device) if self._device.type == "cuda" else str(self._device)
        if values[CUDA_DEVICE] != ours:
            raise ValueError(f"its memory is of GPU {values[CUDA_DEVICE]}, and this sampler is on {ours}")
        values[CUDA_DEVICE] = self._device.index or 0
        return reductions.rebuild_cuda_tensor(*values)
