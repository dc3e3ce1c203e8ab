"""Memory of a device that is given away for a while: what lay in it waits in host memory.

A tensor's storage is emptied in place and filled again, so the tensor and every view of it (DeepSpeed's, AdamW's) stay
the objects that they were, and come back bit by bit. DeepSpeed's `offload_states` refuses optimizer states that are not
its FusedAdam's (0.19.8, runtime/zero/stage3.py), and moves a tensor's `data`, which would leave its views behind.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Lent:
    """One storage. host: what waits, (num_bytes,) uint8; None where nothing needs to be kept. It is made once: pinning
    memory takes longer than the copy."""

    storage: torch.UntypedStorage
    num_bytes: int
    is_kept: bool
    host: Tensor | None = None


class LentMemory:
    """The storages of some tensors, each once; those that are not on the device are left alone.

    kept: tensors whose values come back. scratch: tensors that come back as zeros. While they are lent nothing may read
    or write them; `readable` is for who needs a value.
    """

    def __init__(self, kept: Iterable[Tensor], scratch: Iterable[Tensor] = (), *, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, _Lent] = {}
        for tensors, is_kept in ((kept, True), (scratch, False)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if tensor.device.type == device.type and storage.nbytes():
                    lent = _Lent(storage, storage.nbytes(), is_kept)
                    self._storages.setdefault(storage._cdata, lent)
        self.is_lent = False

    @torch.no_grad()
    def lend(self) -> None:
        """Free the device's memory. torch keeps it for itself until its cache is emptied."""
        if self.is_lent:
            return
        for lent in self._storages.values():
            if lent.is_kept:
                if lent.host is None:
                    is_pinned = self._device.type == "cuda"
                    lent.host = torch.empty(lent.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
                lent.host.copy_(_bytes_of(lent.storage))
            lent.storage.resize_(0)
        self.is_lent = True

    @torch.no_grad()
    def take_back(self) -> None:
        """Have everything again where it was."""
        if not self.is_lent:
            return
        for lent in self._storages.values():
            lent.storage.resize_(lent.num_bytes)
            whole = _bytes_of(lent.storage)
            if lent.host is None:
                whole.zero_()
            else:
                whole.copy_(lent.host, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.is_lent = False

    def readable(self, tensor: Tensor) -> Tensor:
        """A tensor of equal values that can be read now: itself, or what waits in host memory of it."""
        lent = self._storages.get(tensor.untyped_storage()._cdata)
        if not self.is_lent or lent is None or lent.host is None:
            return tensor
        flat = lent.host.view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """(num_bytes,) uint8, over the storage itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
