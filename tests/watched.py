"""Operations that torch carries out in a block."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watched(TorchDispatchMode):
    """The bytes of the largest tensor that is made, and what of a GPU would have been waited for."""

    num_bytes, reads = 0, ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves(found) if isinstance(value, torch.Tensor)]
        self.num_bytes = max([self.num_bytes, *(tensor.untyped_storage().nbytes() for tensor in tensors)])
        if function in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default):
            self.reads = (*self.reads, function)
        return found
