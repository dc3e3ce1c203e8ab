"""Attention of packed rows by every back end, against the formula in float64, which shares no code with them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanodag.model import attention, c_library
from nanodag.model.attention import (
    BACK_ENDS,
    back_end_of,
    document_attention,
    flash_layout,
    group_attention,
    sequences_of_documents,
)
from tests.flash import bottom_right
from tests.watched import Watched

# Documents of one token, around a block of 48 queries, of several blocks; padding at last.
IDS = np.array([[0] * 130 + [1] * 47, [0] * 48 + [1] * 49 + [2] + [3] * 17 + [4] * 50 + [-1] * 12])
DOCUMENTS = sequences_of_documents(IDS)
# A prompt of 50 tokens with responses of 60 and 3; one of 2 with a response of 100; two that have nothing before them.
GROUP = np.array([[0, 50, -1], [50, 60, 0], [110, 3, 0], [113, 2, -1], [115, 100, 3], [215, 5, -1], [220, 7, -1]])
# Examples of 20 tokens, behind them a context of 9 with two answers, and a question of 4.
TREE = np.array([[0, 20, -1], [20, 9, 0], [29, 1, 1], [30, 8, 1], [38, 4, 0]])
SHAPES = {"documents": DOCUMENTS, "group": GROUP, "tree": TREE}
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 0.06}


def by_hand(query, key, value, sequences, window):
    """(N, H, D): each sequence behind those that it goes on from, one after the other."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    out, keys = [], []
    for start, length, behind in sequences.tolist():
        keys.append([*(keys[behind] if behind >= 0 else []), *range(start, start + length)])
        scores = torch.einsum("qhd,khd->hqk", query[start : start + length], key[keys[-1]]) / query.shape[-1] ** 0.5
        ages = torch.arange(len(keys[-1]) - length, len(keys[-1]))[:, None] - torch.arange(len(keys[-1]))
        seen = (ages >= 0) & (ages < (window or len(keys[-1])))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, value[keys[-1]]))
    return torch.cat(out)


def tensors_of(sequences, num_kv_heads, width, dtype=torch.float32):
    torch.manual_seed(0)
    num_tokens = int(sequences[:, 1].sum())
    return [torch.randn(1, num_tokens, n, width).to(dtype).requires_grad_() for n in (4, num_kv_heads, num_kv_heads)]


def assert_exact(sequences, tensors, window=None, *, has_gradient=True):
    doubles = [tensor.detach()[0].double().requires_grad_() for tensor in tensors]
    out, expected = attention.Packed(sequences)(*tensors, window), by_hand(*doubles, sequences, window)
    atol = TOLERANCES[tensors[0].dtype]
    assert out.dtype == tensors[0].dtype and out.shape == tensors[0].shape
    torch.testing.assert_close(out[0].double(), expected, rtol=0, atol=atol)
    if has_gradient:
        mix = torch.randn(out.shape).to(out.dtype)
        gradients = torch.autograd.grad(out, tensors, mix)
        for gradient, other in zip(gradients, torch.autograd.grad(expected, doubles, mix[0].double()), strict=True):
            torch.testing.assert_close(gradient[0].double(), other, rtol=1e-2 if atol > 1e-3 else 0, atol=atol)


@pytest.fixture(params=BACK_ENDS)
def back_end(request, monkeypatch):
    monkeypatch.setattr(attention, "back_end_of", lambda query: request.param)
    monkeypatch.setattr(attention, "attend_within", bottom_right)
    return request.param


@pytest.mark.parametrize("window", [None, 1, 7, 64, 500])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_back_end_equals_the_formula_in_value_and_gradient(back_end, shape, window):
    has_gradient = back_end != "own" or shape != "tree"
    for num_kv_heads, width in ((4, 32), (2, 16), (1, 48)):
        tensors = tensors_of(SHAPES[shape], num_kv_heads, width)
        assert_exact(SHAPES[shape], tensors, window, has_gradient=has_gradient)


@pytest.mark.parametrize("window", [None, 64])
def test_in_bfloat16_every_back_end_is_near_the_formula(back_end, window):
    assert_exact(DOCUMENTS, tensors_of(DOCUMENTS, 2, 64, torch.bfloat16), window)


def test_where_the_last_tokens_of_each_sequence_ask_they_are_answered_as_among_all(back_end):
    for sequences in SHAPES.values():
        query, key, value = tensors_of(sequences, 2, 16)
        places = np.concatenate([np.arange(start + length // 2, start + length) for start, length, _ in sequences])
        with torch.no_grad():
            whole = attention.Packed(sequences)(query, key, value, 7)
            found = attention.Packed(sequences, places)(query[:, places], key, value, 7)
        torch.testing.assert_close(found, whole[:, places], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "head_dim", "expected"),
    [
        ("cuda", (9, 0), torch.bfloat16, 64, "flash"),
        ("cuda", (8, 0), torch.bfloat16, 128, "flash"),
        ("cuda", (8, 0), torch.float32, 64, "plain"),
        ("cuda", (7, 5), torch.bfloat16, 64, "plain"),
        ("cuda", (9, 0), torch.bfloat16, 20, "plain"),
        ("cpu", None, torch.float32, 64, "own"),
        ("cpu", None, torch.bfloat16, 16, "own"),
        ("cpu", None, torch.float32, 20, "plain"),
        ("cpu", None, torch.float64, 16, "plain"),
    ],
)
def test_the_back_end_by_what_a_device_can(device, capability, dtype, head_dim, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 9, 14, head_dim))
    assert back_end_of(query) == expected


def test_responses_lie_behind_their_prompts_and_flash_attention_has_the_keys_of_both():
    responses = np.array([[3, 2, 0], [5, 1, 0], [6, 0, 0]])
    keys, queries, num_keys = flash_layout(attention.sequences_of_group(np.array([[0, 3]]), responses))
    assert queries.tolist() == [3, 2, 1] and num_keys.tolist() == [3, 5, 4]
    assert keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5]


LONG_GROUP = np.array([[0, 1024]]), np.array([[1024, 1024, 0], [2048, 1024, 0]])


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize(
    ("chosen", "device", "dtype", "window"),
    [
        ("flash", "meta", torch.bfloat16, None),
        ("flash", "meta", torch.bfloat16, 100),
        ("plain", "cpu", torch.float32, None),
        ("own", "cpu", torch.float32, 100),
    ],
)
def test_long_rows_hold_nothing_of_queries_by_keys_and_wait_for_no_device(
    is_group, chosen, device, dtype, window, monkeypatch
):
    """On `meta` the kernel of CUDA is asked what it makes of these shapes; the others compute."""
    monkeypatch.setattr(attention, "back_end_of", lambda query: chosen)
    attend = group_attention(*LONG_GROUP) if is_group else document_attention(np.repeat([0, 1], [2992, 80])[None])
    tensors = [torch.zeros(1, 3072, heads, 16, dtype=dtype, device=device, requires_grad=True) for heads in (2, 1, 1)]
    with Watched() as seen:
        out = attend(*tensors, window)
        gradients = torch.autograd.grad(out.float().sum(), tensors)
    assert out.shape == tensors[0].shape and out.dtype == dtype
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in tensors]
    assert seen.num_bytes < 2048 * 2048, "a mask of bytes has twice as many"
    assert not seen.reads


def test_a_processor_without_avx512_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("NANODAG_CACHE", str(tmp_path))
    monkeypatch.setattr(c_library, "FLAGS", (*c_library.FLAGS, "-U__AVX512F__"))
    attention._library.cache_clear()
    try:
        for window in (None, 40):
            assert_exact(DOCUMENTS, tensors_of(DOCUMENTS, 2, 48), window)
    finally:
        attention._library.cache_clear()


def test_the_number_of_threads_changes_no_bit():
    tensors = tensors_of(DOCUMENTS, 2, 32)
    mix, results = torch.randn(tensors[0].shape), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out = document_attention(IDS)(*tensors)
            results.append([out, *torch.autograd.grad(out, tensors, mix)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_heads_that_are_views_with_gaps_between_tokens_are_read_in_place():
    fused = torch.randn(1, IDS.size, 3, 4, 32)
    views, copies = fused.unbind(2), [part.contiguous() for part in fused.unbind(2)]
    assert torch.equal(attention.Packed(DOCUMENTS)(*views), attention.Packed(DOCUMENTS)(*copies))


def test_not_a_number_in_a_document_stays_in_it():
    tensors = [torch.randn(1, 177, 2, 16) for _ in range(3)]
    tensors[1][0, 150] = float("nan")
    out = document_attention(IDS[:1])(*tensors)
    assert out[0, :150].isfinite().all()
    assert out[0, 150:].isnan().all()
