"""The trainer's rank 0 and the samplers' ranks in one process group of their own, through which weights are broadcast.

SGLang joins by torch.distributed's functions, which keep what members tell each other in a store under prefixes made of
the group's name; here the same prefixes lead to a bare group of gloo or NCCL, so that a process needs no default group,
and any number of groups can come and go. A member that dies closes its connections: a peer that sends to it or waits
gets an error at once; one that hangs, after the time-out. gloo sends along a tree, so a member may wait for another
than rank 0, and know nothing of its giving up: with `close` it stops waiting.

Each member listens on one address: rank 0 on the one that it was given, another member on the one by which its machine
reaches rank 0.

Source: sgl-project/sglang 0.5.23, srt/utils/common.py (init_custom_process_group); pytorch 2.13,
torch/distributed/distributed_c10d.py (_new_process_group_helper).
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from nanodag.host.ports import address_towards
from nanodag.host.threads import begun
from nanodag.inference.bound_store import BoundStore
from nanodag.inference.nccl import VERSION_KEY
from nanodag.inference.weight_bodies import InitGroupBody, ReceiveWeightsBody

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Device of a group's tensors by its backend."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
GROUP_TIMEOUT_S = 600.0


def open_store(address: str, timeout_s: float, *, nccl: str = "") -> TCPStore:
    """Meeting place of a group's members, on a free port of an address; for rank 0. It goes with this process.
    nccl: rank 0's version of it, which members must have too; "" in a group of gloo.
    Raises OSError when this machine does not have the address."""
    store = BoundStore(address, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    if nccl:
        store.set(VERSION_KEY, nccl)
    return store


def join_group(body: InitGroupBody, rank: int = 0) -> "WeightGroup":
    """Membership in the group of a request, whose rank 0 waits at the address: returns when all members are there.
    rank: of this process among the sampler's. Raises RuntimeError or OSError where it does not come about: nothing
    answers there in time, or its NCCL has another version than this process's."""
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    return WeightGroup(
        BoundStore(body.master_address, body.master_port, None, False, timeout, wait_for_workers=False),
        name=body.group_name,
        rank=body.rank_offset + rank,
        size=body.world_size,
        timeout_s=GROUP_TIMEOUT_S,
        backend=body.backend,
    )


class WeightGroup:
    """One member. Making it returns when all of them are there, and raises RuntimeError when they are not in time.
    backend: gloo or nccl."""

    def __init__(
        self, store: TCPStore, *, name: str, rank: int, size: int, timeout_s: float, backend: str = "gloo"
    ) -> None:
        self.name = name
        self.device = torch.device(DEVICES[backend])
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        prefix_store = PrefixStore(f"{self.device.type}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._waiting: threading.Event | None = None
        make = _gloo if backend == "gloo" else _nccl
        self._group: Any = make(prefix_store, rank, size, self._timeout, address_towards(store.host, store.port))

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's tensor into everybody's; it lies on `device`. Raises RuntimeError, after which the group is of no
        use, when a member is gone or does not take part in time, or the group is closed meanwhile by another thread."""
        group = self._group
        if group is None:
            raise RuntimeError(f"the group {self.name} was left")
        if self.device.type == "cuda":
            in_time(partial(_on_gpu, group, tensor, self._timeout), 2 * self._timeout.total_seconds())
            return
        work = group.broadcast(tensor, 0)
        waiting = self._waiting = threading.Event()
        work.get_future().add_done_callback(lambda _: waiting.set())
        if self._group is not None:
            waiting.wait()
        self._waiting = None
        if self._group is None:
            threading.Thread(target=_until_ended, args=(work, group), daemon=True).start()
            raise RuntimeError(f"the group {self.name} was left")
        work.wait()

    def close(self) -> None:
        """Leave: the others' broadcasts fail from now on, and one that this member waits in."""
        group, self._group = self._group, None
        if self.device.type == "cuda":  # its shutdown waits for what is under way, which a lost member never ends
            with suppress(RuntimeError):
                group.abort()
        else:
            group.shutdown()
        if waiting := self._waiting:
            waiting.set()


def in_time(call: Callable[[], None], timeout_s: float) -> None:
    """Call it in a thread, which is left alone when it does not return: while NCCL makes a communicator it waits for a
    lost member without limit. Raises RuntimeError then, and what the call raises."""
    try:
        begun(call).result(timeout_s)
    except TimeoutError as late:
        raise RuntimeError(f"not all members took part within {timeout_s:g} s") from late


def _on_gpu(group: Any, tensor: Tensor, timeout: timedelta) -> None:
    with torch.cuda.device(tensor.device):  # of this thread, which began with GPU 0
        group.broadcast(tensor, 0).wait(timeout)
        torch.cuda.current_stream().synchronize()


def _until_ended(work: Any, group: Any) -> None:
    """Hold what gloo still waits in, for the time-out at most: neither call ends that, and a group without owner would
    hold up whoever let go of it."""
    with suppress(RuntimeError):
        work.wait()


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    gloo: Any = ProcessGroupGloo  # whose annotations lack most of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]  # else of the machine's name
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    from torch.distributed import ProcessGroupNCCL  # a torch for CPUs has none

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    # A group reads it when it is made. Without it torch's watchdog ends this whole process when a member is lost.
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ.pop(BLOCKING_WAIT) if before is None else os.environ.update({BLOCKING_WAIT: before})


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


def broadcast_of(group: WeightGroup, body: ReceiveWeightsBody) -> dict[str, Tensor]:
    """The tensors of one bucket. Raises RuntimeError when rank 0 is gone, or a tensor cannot be had."""
    dtypes = [getattr(torch, dtype) for dtype in body.dtypes]
    if body.load_format == "flattened_bucket":
        flat = torch.empty(body.num_bytes, dtype=torch.uint8, device=group.device)
        group.broadcast(flat)
        return split(flat, body.names, dtypes, body.shapes)
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=group.device)
        for name, dtype, shape in zip(body.names, dtypes, body.shapes, strict=True)
    }
    for tensor in tensors.values():
        group.broadcast(tensor)
    return tensors
