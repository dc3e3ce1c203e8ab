"""The loss of a critic."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 of each token, and where the bound acts.

    values: (T,) float32, with gradient. old_values: of the critic at the start of the step. returns: what to predict.
    clip c: 0 for none. Returns (T,) float32 and (T,) bool. Source: openai/baselines ppo2; verl's compute_value_loss,
    TRL's PPOTrainer, OpenRLHF's ValueLoss.
    """
    plain = (values - returns).square()
    if not clip:
        return plain / 2, torch.zeros_like(values, dtype=torch.bool)
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(plain, bounded) / 2, bounded > plain
