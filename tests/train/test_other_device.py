"""What a rank of the supervised loop computes, on a device that is not the CPU: the same numbers, nothing mixed in.

Not covered: DeepSpeed and the optimizers.
"""

import numpy as np
import pytest
import torch
from torch.func import functional_call

from nanodag.config.dial import Shape
from nanodag.model.build import initialise, qwen3_architecture
from nanodag.model.decoder import Decoder
from nanodag.train.objective import next_token_loss, to_device
from nanodag.train.packing import Piece, conversation_piece, make_batch
from nanodag.train.validation import score_text
from tests.sampler.other_device import NAME, OtherDevice
from tests.watched import Watched

SHAPE = Shape(depth=1, width=16, num_heads=2, num_kv_heads=1, head_width=8, mlp_width=24, tied_embeddings=True)


def conversation(first: int, length: int) -> Piece:
    return conversation_piece(np.arange(first, first + length, dtype=np.int32), np.arange(length) >= 2)


BATCH = make_batch(
    [[conversation(1, 6), conversation(9, 4)], [conversation(3, 9)]], num_rows=2, row_length=10, pad_id=0
)


class OneRank:
    """An engine without DeepSpeed: its model with the weights of one device."""

    def __init__(self, model, device, weights):
        self._model, self._weights, self.device = model, weights, device

    def __call__(self, *arguments, **options):
        return functional_call(self._model, self._weights, arguments, options)

    def summed(self, *values):
        return list(values)


def test_loss_gradients_and_validation_are_the_same_and_no_loss_waits_for_the_device():
    model = Decoder(qwen3_architecture(SHAPE, vocabulary=20, rope_theta=1e4, max_positions=16))
    initialise(model, 0)
    token_bytes = torch.arange(20, dtype=torch.int32)

    def work(device):
        weights = {name: p.detach().to(device).requires_grad_() for name, p in model.named_parameters()}
        engine = OneRank(model, device, weights)
        with Watched() as seen:
            loss = next_token_loss(engine, to_device(BATCH, device))
        assert not seen.reads
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        assert loss.device.type == device.type and all(g is None or g.device.type == device.type for g in gradients)
        score = score_text(engine, token_bytes.to(device), [BATCH, BATCH])
        found = [value for g in gradients if g is not None for value in g.flatten().tolist()]
        return [loss.item(), score.loss, score.metrics["bits_per_byte"], *found]

    here = work(torch.device("cpu"))
    with OtherDevice():
        there = work(torch.device(NAME))
    assert there == pytest.approx(here, rel=1e-4, abs=1e-5) and len(here) > 500
