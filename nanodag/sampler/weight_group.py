"""The trainer's rank 0 and the samplers' ranks in one process group of their own, through which weights are broadcast.

SGLang joins by torch.distributed's functions, which keep what members tell each other in a store under prefixes made of
the group's name; here the same prefixes lead to a bare gloo group, so that a process needs no default group, and any
number of groups can come and go. A member that dies closes its connections: a peer that sends to it or waits gets an
error at once; one that hangs, after the time-out.

Source: sgl-project/sglang 0.5.23, srt/utils/common.py (init_custom_process_group); pytorch 2.13,
torch/distributed/distributed_c10d.py (_new_process_group_helper). Not covered: NCCL.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from nanodag.inference.bound_store import BoundStore

LOOPBACK = "127.0.0.1"


def open_store(timeout_s: float) -> TCPStore:
    """Where members of a group find each other, on a free port; for rank 0. It goes with this process."""
    return BoundStore(LOOPBACK, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)


def find_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """The store that rank 0 has opened. Raises RuntimeError when nothing answers there in time."""
    return TCPStore(address, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)


class WeightGroup:
    """One member. Making it returns when all of them are there, and raises RuntimeError when they are not in time."""

    def __init__(self, store: Store, *, name: str, rank: int, size: int, timeout_s: float) -> None:
        self.name = name
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        prefix_store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        gloo: Any = ProcessGroupGloo  # whose annotations lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]  # else of the machine's name
        options._timeout = self._timeout
        self._gloo = gloo(prefix_store, rank, size, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's tensor into everybody's. Raises RuntimeError, after which the group is of no use, when a member is
        gone or does not take part in time."""
        self._gloo.broadcast(tensor, 0).wait(self._timeout)

    def close(self) -> None:
        """Leave: the others' broadcasts fail from now on."""
        self._gloo.shutdown()
        del self._gloo


def split(flat: Tensor, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> dict:
    """The tensors, by name, whose bytes lie one after the other in flat, (num_bytes,) uint8; views, no copies."""
    tensors: dict[str, Tensor] = {}
    begin = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        tensors[name] = flat[begin:end].view(dtype).reshape(tuple(shape))
        begin = end
    assert begin == flat.numel(), f"{flat.numel()} bytes hold tensors of {begin}"
    return tensors
