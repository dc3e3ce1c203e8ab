"""Weights in 4 bits against a search for the nearest value in float64."""

import numpy as np
import pytest
import torch

from nanodag.model.folder import load
from nanodag.model.four_bits import VALUES, quantized, restored
from nanodag.model.lora import BETWEEN, add_lora, merged
from tests.model.test_lora import IDS, logits_of
from tests.rl.models import save_tiny_model


@pytest.mark.parametrize("shape", [(4, 32), (3, 5, 7), (64,)])
def test_each_number_is_the_nearest_of_sixteen_times_the_scale_of_its_block(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantized(weight)
    found = restored(codes, scales, shape, torch.float32).double().numpy().ravel()
    flat = weight.double().numpy().ravel()
    for begin in range(0, len(flat), 64):
        block = flat[begin : begin + 64]
        scale = float(torch.tensor(np.abs(block).max()).bfloat16())
        by_hand = scale * np.array(VALUES)[np.abs(block[:, None] / scale - np.array(VALUES)).argmin(1)]
        np.testing.assert_allclose(found[begin : begin + 64], by_hand, atol=1e-6)
    assert codes.dtype == torch.uint8 and len(codes) == 32 * len(scales)


def test_zeros_stay_zeros_and_what_is_restored_is_quantized_to_itself():
    weight = torch.cat([torch.zeros(64), torch.randn(64, generator=torch.Generator().manual_seed(1))])
    once = restored(*quantized(weight), (128,), torch.float32)
    assert not once[:64].any() and torch.equal(restored(*quantized(once), (128,), torch.float32), once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_over_four_bits_are_the_model_of_restored_matrices_and_merged_to_its_bits(tmp_path, dtype):
    folder = save_tiny_model(tmp_path / "model", vocabulary=64)
    plain, model = load(folder), load(folder)
    add_lora(model, rank=4, alpha=12.0, seed=0, in_four_bits=True)
    held = {name: p for name, p in model.named_parameters() if ".original" in name}
    layers = {name.partition(BETWEEN)[0] for name in held}
    weights = dict(plain.named_parameters())
    matrices = [weights[f"{layer}.weight"] for layer in layers]
    assert sum(p.nbytes for p in held.values()) <= 0.57 * sum(m.numel() for m in matrices)
    with torch.no_grad():
        for matrix in matrices:
            matrix.copy_(restored(*quantized(matrix), tuple(matrix.shape), torch.float32))
    model, plain = model.to(dtype), plain.to(dtype)
    assert torch.equal(logits_of(model, IDS), logits_of(plain, IDS))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".up"):
                p.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    made = {name: tensor.clone() for name, tensor in merged(model.named_parameters(), scale=3.0)}
    assert made.keys() == weights.keys()
    plain.load_state_dict(made, strict=False)
    assert torch.equal(logits_of(model, IDS), logits_of(plain, IDS))
