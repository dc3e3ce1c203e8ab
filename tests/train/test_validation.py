import math

import numpy as np
import pytest
import torch

from nanodag.train.packing import document_piece, make_batch
from nanodag.train.validation import score_text


class Uniform:
    """An engine of one rank whose model finds all of 8 tokens as likely."""

    device = torch.device("cpu")

    def summed(self, *values):
        return list(values)

    def __call__(self, input_ids, position_ids, *, targets, want, attend):
        return torch.full((int((targets >= 0).sum()),), -math.log(8)), None


def test_bits_per_byte_are_over_the_bytes_of_the_text_not_those_of_a_blank_put_before_it():
    token_bytes = torch.tensor([0, 2, 1, 1, 1, 1, 1, 1], dtype=torch.int32)  # 1 is `▁a`; the text is `abc`, 3 bytes
    pieces = [document_piece([1, 2, 3], 0, surplus_bytes=1), document_piece([2, 3], 0)]
    batch = make_batch([pieces], num_rows=1, row_length=9, pad_id=0)
    score = score_text(Uniform(), token_bytes, [batch])
    # 3 bits a token, ends of documents not counted
    assert score.metrics["bits_per_byte"] == pytest.approx((3 + 2) * 3 / (3 + 2))
    assert score.loss == pytest.approx(math.log(8))
    assert np.count_nonzero(batch.labels != -100) == 7
