"""Attention of packed documents, in the ways that the machine's kind calls for."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from nanodag.model import attention
from nanodag.model.attention import document_attention, length_classes

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 1, 1, 1, 1]])


def by_hand(query, key, value):
    """Softmax attention in float64, one head after the other."""
    query, key, value = (t.double().transpose(1, 2) for t in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    seen = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]) & torch.ones(6, 6, dtype=torch.bool).tril()
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_output_and_gradients_equal_the_formula(dtype, atol, num_kv_heads):
    torch.manual_seed(0)
    shapes = ((2, 6, 2, 8), (2, 6, num_kv_heads, 8), (2, 6, num_kv_heads, 8))
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    out, wanted = document_attention(DOCUMENTS.numpy())(*tensors), by_hand(*exact)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=atol)
    mix = torch.randn(out.shape)
    found = torch.autograd.grad((out.float() * mix).sum(), tensors)
    for gradient, other in zip(found, torch.autograd.grad((wanted * mix).sum(), exact), strict=True):
        torch.testing.assert_close(gradient.double(), other, rtol=0, atol=atol)


def test_documents_of_about_one_length_lie_side_by_side():
    # lengths 3, 2, 1 and 1, 5: in classes up to 1, 2, 4 and 8
    classes, back = length_classes(DOCUMENTS.numpy())
    assert [places.tolist() for places in classes] == [[[5], [6]], [[3, 4]], [[0, 1, 2]], [[7, 8, 9, 10, 11]]]
    laid_out = np.concatenate([places.ravel() for places in classes])
    assert laid_out[back].tolist() == list(range(12))


def test_less_than_half_of_what_lies_side_by_side_is_filled_up():
    lengths = [1, 2, 3, 4, 5, 8, 9, 16, 17, 900]
    classes, back = length_classes(np.repeat(np.arange(len(lengths)), lengths)[None])
    assert sum(places.size for places in classes) < 2 * sum(lengths)
    assert np.concatenate([places.ravel() for places in classes])[back].tolist() == list(range(sum(lengths)))


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made, and what is read back from the device."""

    num_bytes, reads = 0, ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        tensors = [value for value in tree_flatten(found)[0] if isinstance(value, torch.Tensor)]
        self.num_bytes = max([self.num_bytes, *(tensor.untyped_storage().nbytes() for tensor in tensors)])
        if function in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default):
            self.reads = (*self.reads, function)
        return found


@pytest.mark.parametrize(
    ("way", "device", "dtype"),
    [("flash", "meta", torch.bfloat16), ("by_length", "cpu", torch.float32), ("own", "cpu", torch.float32)],
)
def test_no_way_for_long_rows_holds_anything_of_queries_by_keys_or_waits_for_the_device(
    way, device, dtype, monkeypatch
):
    """On `meta` the kernel of CUDA is asked what it makes of these shapes; the others compute."""
    monkeypatch.setattr(attention, "way_of", lambda query: way)
    documents = np.repeat([0, 1, 2], [4000, 80, 16])[None]
    tensors = [torch.zeros(1, 4096, heads, 16, dtype=dtype, device=device, requires_grad=True) for heads in (2, 1, 1)]
    with Largest() as seen:
        out = document_attention(documents)(*tensors)
        gradients = torch.autograd.grad(out.float().sum(), tensors)
    assert out.shape == tensors[0].shape and out.dtype == dtype
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in tensors]
    assert seen.num_bytes < 4096 * 4096 / 4, "a mask of bytes has four times as many"
    assert not seen.reads
