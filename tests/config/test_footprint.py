"""The dial's numbers by hand, and memory by arithmetic: sums by hand, and what autograd keeps."""

from dataclasses import replace

import pytest
import torch

from nanodag.config import footprint
from nanodag.config.dial import Shape, flops_per_token, num_parameters, schedule_of, shape_of
from nanodag.model.build import initialise, qwen3_architecture
from nanodag.model.decoder import Decoder

GIB = 1 << 30
SMALL = Shape(depth=2, width=64, num_heads=4, num_kv_heads=2, head_width=16, mlp_width=192, tied_embeddings=True)
COUNTED = {"total": 1000, "matrices": 600}


def state(precision, zero_stage, num_ranks=1, **options):
    options = {"device": "cpu", "precision": precision, "zero_stage": zero_stage, "num_ranks": num_ranks, **options}
    return footprint.train_state(COUNTED, **options)


@pytest.mark.parametrize(("found", "expected"), [
    (state("bf16", 1), {"weights": 2000, "gradients": 6000, "optimizer": 12_000}),  # AdamW: 20 bytes a parameter
    (state("bf16", 1, 4), {"gradients": 6000, "optimizer": 3000}),  # ranks share master weights and moments alone
    (state("bf16", 1, optimizer="muon"), {"optimizer": 4 * 1000 + 4 * 600 + 8 * 400}),  # one moment of each matrix
    (state("fp32", 0), {"weights": 4000, "gradients": 4000, "optimizer": 8000}),  # no second copy of the weights
    (state("bf16", 3), {"weights": 2000}),  # one rank gathers nothing
    (state("bf16", 3, 4), {"weights": 500 + 2000}),  # at rest they are spread
    (state("bf16", 1, trained=10), {"optimizer": 120}),  # adapters alone have moments
    # of 600 in matrices, half a byte and a 16th for scales
    (state("bf16", 1, trained=10, matrix_bytes=0.5625), {"weights": 2 * 410 + 338}),
    # half of the states, half of the gradients and a pinned copy of these, in host memory
    (state("bf16", 3, 2, offload_optimizer=True), {"optimizer": 0, "host": 12_000 // 2 + 2 * 4000 // 2}),
])  # fmt: skip
def test_the_state_of_training_is_the_sum_by_hand(found, expected):
    assert {name: getattr(found, name) for name in expected} == expected


def test_the_speedruns_state_is_6_6_gib_on_each_of_8_gpus_and_its_activations_are_64_6():
    shape = shape_of(24)
    found = footprint.train_state(
        num_parameters(shape, 32768), precision="bf16", zero_stage=1, num_ranks=8, optimizer="muon", device="cuda"
    )
    assert (found.weights + found.gradients + found.optimizer) / GIB == pytest.approx(6.6, abs=0.05)
    assert footprint.activations(shape, 32768, precision="bf16") / GIB == pytest.approx(64.6, abs=0.5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_activations_are_what_autograd_keeps_of_a_layer(precision, num_kv_heads):
    shape = replace(SMALL, num_kv_heads=num_kv_heads)
    two, three = (kept_bytes(replace(shape, depth=depth), precision) for depth in (2, 3))
    found = (three - two) / (4 * 32)
    assert footprint.layer_activations(shape, precision) == pytest.approx(found, rel=0.06)


def kept_bytes(shape, precision, rows=4, length=32):
    """What a forward pass keeps for the backward pass, weights left out, each piece of memory once."""
    model = Decoder(qwen3_architecture(shape, vocabulary=512, rope_theta=10_000.0, max_positions=length))
    initialise(model, 0)
    model = model.to(torch.float32 if precision == "fp32" else torch.bfloat16)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(0, 512, (rows, length))
    places = torch.arange(length).expand(rows, -1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert model(ids, places, torch.zeros_like(ids), want="hidden").requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_checkpointing_keeps_a_layers_input_and_one_layer():
    layer = footprint.layer_activations(SMALL, "bf16")
    found = footprint.activations(SMALL, 10, precision="bf16", checkpointing=True)
    assert found == 10 * (2 * 2 * 64 + layer)


def test_a_head_of_many_tokens_holds_one_block_of_logits():
    big = footprint.head_memory(SMALL, 1 << 17, 1 << 20, precision="bf16", device="cpu")
    gradients = (1 << 17) * 64 * 8 + 2 * (1 << 20) * 64 * 2
    assert big == footprint.HEAD_BLOCK_BYTES + gradients


def test_the_shapes_of_two_depths():
    assert shape_of(12) == Shape(12, 768, 6, 6, 128, 2048, tied_embeddings=False)
    assert shape_of(2) == Shape(2, 128, 4, 4, 32, 384, tied_embeddings=True)  # narrow heads


def test_parameters_and_flops_are_counted_part_by_part():
    shape = shape_of(2)
    parts = num_parameters(shape, 1000)
    # Attention 4 x 128 x 128, SwiGLU 3 x 128 x 384; two layers.
    assert parts["matrices"] == 2 * (4 * 128 * 128 + 3 * 128 * 384)
    # Two norms of the width and two of a head's width a layer, one at the end.
    assert parts["norms"] == 2 * (2 * 128 + 2 * 32) + 128
    assert parts["embedding"] == 128_000 and parts["head"] == 0
    # 6 FLOPs for each weight of matrices and head, and causal attention: 6 x layers x width x length.
    assert flops_per_token(shape, 1000, 256) == 6 * (parts["matrices"] + 128_000) + 6 * 2 * 128 * 256


def test_the_reference_depth_has_the_reference_batch_and_rates_fall_with_a_smaller_batch():
    full = schedule_of(shape_of(12), 32768, tokens_per_parameter=10.5)
    assert full.batch_tokens == 2**19 and full.matrix_lr == 0.02
    assert schedule_of(shape_of(12), 32768, tokens_per_parameter=10.5, batch_tokens=2**17).matrix_lr == 0.01
    # 12 layers of 4 x 768 x 768 + 3 x 768 x 2048, and a head of 32768 x 768, times 10.5.
    assert full.horizon_tokens == int(10.5 * (12 * (4 * 768 * 768 + 3 * 768 * 2048) + 32768 * 768))
