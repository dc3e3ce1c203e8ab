"""A device that a machine without one can compute with: its tensors lie in memory and report another device.

As on a GPU, an operation takes tensors of one device only, and results come back by `.cpu()`. What CUDA allows is
allowed here: copies between devices, indices on the CPU, and numbers (tensors without dimensions).
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "lazy"  # of a device that this torch knows by name and was not built for
READING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2")  # for whose result one must wait
CROSSING = ("_to_copy", "copy_", "copy", "index", "index_put_", "index_put")


class Elsewhere(Tensor):
    """A tensor of that device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Elsewhere":
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        with torch.inference_mode(False):  # a view that is made in it cannot be of a tensor that was not
            made = Tensor._make_wrapper_subclass(cls, inner.shape, device=torch.device(NAME, 0), **layout)
        made.inner = inner
        return made

    def tolist(self) -> list[Any]:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_on_device(function, args, kwargs or {})


def call_on_device(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation of the dispatcher, on whichever device. Raises RuntimeError where devices are mixed."""
    name = function._schema.name.removeprefix("aten::")
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    here = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere) and tensor.dim() > 0]
    if there and here and name not in CROSSING:
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} was given {NAME} and cpu")
    wanted = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    is_there = bool(there) if wanted is None else wanted == NAME
    if name == "copy_":
        is_there = isinstance(args[0], Elsewhere)
    kwargs = kwargs | ({"device": torch.device("cpu")} if wanted == NAME else {})
    inner_args, inner_kwargs = tree_map(lambda v: v.inner if isinstance(v, Elsewhere) else v, (args, kwargs))
    found = function(*inner_args, **inner_kwargs)
    changed = {id(tensor.inner): tensor for tensor in there}

    def outside(value: Any) -> Any:
        if not isinstance(value, Tensor) or not is_there:
            return value
        return changed.get(id(value)) if id(value) in changed else Elsewhere(value)

    if name in ("_to_copy",) and wanted == "cpu" and there:
        return found.clone()
    return tree_map(outside, found)


def is_read(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation needs to know on the host what is on the device: a GPU would be waited for."""
    name = function._schema.name.removeprefix("aten::")
    tensors = [value for value in tree_flatten(args)[0] if isinstance(value, Elsewhere)]
    if name in ("index", "index_put", "index_put_"):
        return any(tensor.dtype == torch.bool for tensor in tensors if tensor is not args[0])
    is_back = name == "_to_copy" and str(kwargs.get("device", "")).startswith("cpu")
    return bool(tensors) and (name in READING or is_back or (name == "copy_" and not isinstance(args[0], Elsewhere)))


class OtherDevice(TorchDispatchMode):
    """Inside, tensors can be made on that device, too. reads: what the host asked of it so far."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __enter__(self) -> "OtherDevice":
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes them here and then moves them
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_read(function, args, kwargs or {}):
            self.reads.append(function._schema.name)
        return call_on_device(function, args, kwargs or {})
