"""Loss on held-out text, in nats a token and in bits a byte."""

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanodag.train.deepspeed_engine import TrainEngine
from nanodag.train.objective import to_device
from nanodag.train.packing import Batch

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """loss: nats a label. bits_per_byte: over the bytes that the labels spell, so vocabularies can be compared. Special
    tokens spell none. For documents these are the bytes of the text, without those that a tokenizer puts before it."""

    loss: float
    bits_per_byte: float


class Validation:
    """A fixed part of the held-out data, the same at every call.

    batches: this rank's. token_bytes: (V,) int32, bytes of each token. All ranks take the same number of forward
    passes.
    """

    def __init__(self, engine: TrainEngine, batches: list[Batch], empty: Batch, token_bytes: Tensor) -> None:
        self._engine = engine
        self._token_bytes = token_bytes.to(engine.device)
        longest = int(engine.highest(len(batches)))
        self._batches = batches + [empty] * (longest - len(batches))

    @torch.no_grad()
    def score(self) -> ValidationLoss:
        """The score of the current weights."""
        engine = self._engine
        totals = torch.zeros(
            4, dtype=torch.float64, device=engine.device
        )  # nats, labels, nats of labels with bytes, bytes
        for batch in self._batches:
            moved = to_device(batch, engine.device)
            logprobs, _ = engine(
                moved.input_ids, moved.position_ids, targets=moved.labels, want="logprobs", attend=moved.attend
            )
            num_bytes = self._token_bytes[moved.labels[moved.labels >= 0]]
            nats = -logprobs.double()
            totals += torch.stack(
                [
                    nats.sum(),
                    nats.new_tensor(nats.numel()),
                    nats[num_bytes > 0].sum(),
                    num_bytes.sum().double() - batch.surplus_bytes,
                ]
            )
        nats_sum, labels, byte_nats, byte_count = engine.summed(*totals.tolist())
        bits_per_byte = byte_nats / math.log(2) / max(byte_count, 1.0)
        return ValidationLoss(loss=nats_sum / max(labels, 1.0), bits_per_byte=bits_per_byte)
