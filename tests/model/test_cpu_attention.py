"""Attention on CPU cores against plain scaled_dot_product_attention in float64, which shares no code with it."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nanodag.model import c_library, cpu_attention
from nanodag.model.attention import document_attention
from nanodag.model.cpu_attention import CpuAttention, Pieces, pieces_of_documents

# Documents of one token, around a block of 48 queries, of several blocks; padding at last.
DOCUMENTS = torch.tensor([[0] * 130 + [1] * 47, [0] * 48 + [1] * 49 + [2] + [3] * 17 + [4] * 50 + [-1] * 12])
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 0.06}


def exact(query, key, value, mask):
    """(N, H, D) in float64, where mask (N, N) says what is seen."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    return scaled_dot_product_attention(*(t.transpose(0, 1) for t in (query, key, value)), attn_mask=mask).transpose(
        0, 1
    )


def tensors_of(num_tokens, num_kv_heads, width, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = ((num_tokens, 4, width), (num_tokens, num_kv_heads, width), (num_tokens, num_kv_heads, width))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def assert_exact(pieces, mask, tensors):
    found = CpuAttention.apply(*tensors, pieces)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wanted = exact(*doubles, mask)
    atol = TOLERANCES[tensors[0].dtype]
    assert found.dtype == tensors[0].dtype
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol)
    mix = torch.randn(found.shape).to(found.dtype)
    gradients = torch.autograd.grad(found, tensors, mix)
    for gradient, other in zip(gradients, torch.autograd.grad(wanted, doubles, mix.double()), strict=True):
        torch.testing.assert_close(gradient.double(), other, rtol=1e-2 if atol > 1e-3 else 0, atol=atol)


def seen_in_documents(ids):
    """(N, N) bool over the flattened rows."""
    of_row = torch.arange(len(ids))[:, None].expand_as(ids)
    number = (of_row * 1000 + ids).flatten()
    return (number[:, None] == number[None, :]) & torch.ones(len(number), len(number), dtype=torch.bool).tril()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_kv_heads", "width"), [(4, 32), (2, 16), (1, 48), (2, 64)])
def test_output_and_gradients_of_documents_are_those_of_float64(num_kv_heads, width, dtype):
    tensors = tensors_of(DOCUMENTS.numel(), num_kv_heads, width, dtype)
    assert_exact(pieces_of_documents(DOCUMENTS.numpy()), seen_in_documents(DOCUMENTS), tensors)


@pytest.fixture
def older_processor(tmp_path, monkeypatch):
    """The code as it is built without AVX-512."""
    monkeypatch.setenv("NANODAG_CACHE", str(tmp_path))
    monkeypatch.setattr(c_library, "FLAGS", (*c_library.FLAGS, "-U__AVX512F__"))
    cpu_attention._library.cache_clear()
    yield
    cpu_attention._library.cache_clear()


def test_a_processor_without_avx512_computes_the_same(older_processor):
    tensors = tensors_of(DOCUMENTS.numel(), 2, 48)
    assert_exact(pieces_of_documents(DOCUMENTS.numpy()), seen_in_documents(DOCUMENTS), tensors)


# A prompt of 50 tokens with responses of 60, 0 and 3; one of 2 with a response of 100; one of 0 with two of 5 and 7.
PIECES = [[(0, 50), (50, 60), (110, 0), (110, 3)], [(113, 2), (115, 100)], [(215, 0), (215, 5), (220, 7)]]


def test_pieces_of_a_group_see_its_first_one_and_themselves():
    pieces = torch.tensor([piece for group in PIECES for piece in group]).numpy()
    mask = torch.zeros(227, 227, dtype=torch.bool)
    for (first, size), *others in PIECES:
        mask[first : first + size, first : first + size] = True
        for start, length in others:
            mask[start : start + length, first : first + size] = True
            mask[start : start + length, start : start + length] = True
    groups = torch.tensor([0, 4, 6, 9]).numpy()
    before = torch.tensor([0, 50, 50, 50, 0, 2, 0, 0, 0]).numpy()
    assert_exact(Pieces(groups, pieces, before, pieces), mask.tril(), tensors_of(227, 2, 32))


def test_the_number_of_threads_changes_no_bit():
    tensors = tensors_of(DOCUMENTS.numel(), 2, 32)
    pieces, mix, found = pieces_of_documents(DOCUMENTS.numpy()), torch.randn(tensors[0].shape), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out = CpuAttention.apply(*tensors, pieces)
            found.append([out, *torch.autograd.grad(out, tensors, mix)])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_heads_that_are_views_with_gaps_between_tokens_are_read_in_place():
    fused = torch.randn(DOCUMENTS.numel(), 3, 4, 32)
    pieces = pieces_of_documents(DOCUMENTS.numpy())
    views, copies = fused.unbind(1), [part.contiguous() for part in fused.unbind(1)]
    assert torch.equal(CpuAttention.apply(*views, pieces), CpuAttention.apply(*copies, pieces))


def test_not_a_number_in_a_document_stays_in_it():
    tensors = [torch.randn(1, 177, 2, 16) for _ in range(3)]
    tensors[1][0, 150] = float("nan")
    out = document_attention(DOCUMENTS[:1].numpy())(*tensors)
    assert out[0, :150].isfinite().all()
    assert out[0, 150:].isnan().all()
