"""A few greedy continuations while training, so that a person sees what the model has learned."""

from collections.abc import Sequence
from typing import Any

import torch

from nanodag.model.decoder import Decoder

NUM_NEW_TOKENS = 32


@torch.no_grad()
def greedy(
    model: Any, prompts: Sequence[Sequence[int]], *, stop_ids: frozenset[int], device: torch.device
) -> list[list[int]]:
    """New tokens of each prompt, at most NUM_NEW_TOKENS, without the stop token.

    The whole row is computed again for each token: for a few short prompts that is cheaper than a cache is complicated.
    Every rank must call it with the same prompts.
    """
    outputs = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(NUM_NEW_TOKENS):
            row = torch.tensor([ids], device=device)
            logits = model(row, torch.arange(len(ids), device=device)[None], torch.zeros_like(row), want="logits")
            token = int(logits[0, -1].argmax())
            if token in stop_ids:
                break
            ids.append(token)
        outputs.append(ids[len(prompt) :])
    return outputs


class Uncompiled:
    """Inside this block a decoder runs without compiled code: for shapes that come once, compiling costs more than it
    saves."""

    def __init__(self, model: Decoder, *, active: bool = True) -> None:
        self._model, self._active = model, active

    def __enter__(self) -> None:
        self._kept = self._model.functions.compiled
        self._model.functions.compiled = self._kept and not self._active

    def __exit__(self, *error: object) -> None:
        self._model.functions.compiled = self._kept
