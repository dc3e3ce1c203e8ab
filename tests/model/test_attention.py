"""Attention of packed documents, in the ways that the machine's kind calls for."""

import pytest
import torch

from nanodag.model.attention import document_attention, visible

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 1, 1, 1, 1]])


def by_hand(query, key, value):
    """Softmax attention in float64, one head after the other."""
    query, key, value = (t.double().transpose(1, 2) for t in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~visible(DOCUMENTS)[:, None], float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def test_what_a_token_sees_written_out():
    assert visible(torch.tensor([[0, 0, 1, -1]]))[0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_output_and_gradients_equal_the_formula(dtype, atol, num_kv_heads):
    torch.manual_seed(0)
    shapes = ((2, 6, 2, 8), (2, 6, num_kv_heads, 8), (2, 6, num_kv_heads, 8))
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    out, wanted = document_attention(DOCUMENTS, dtype, 8)(*tensors), by_hand(*exact)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=atol)
    mix = torch.randn(out.shape)
    found = torch.autograd.grad((out.float() * mix).sum(), tensors)
    for gradient, other in zip(found, torch.autograd.grad((wanted * mix).sum(), exact), strict=True):
        torch.testing.assert_close(gradient.double(), other, rtol=0, atol=atol)
