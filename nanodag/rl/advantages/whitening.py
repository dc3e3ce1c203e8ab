"""Normalisation over the whole batch."""

from torch import Tensor

EPSILON = 1e-8


def whitened(values: Tensor, num_tokens: Tensor) -> Tensor:
    """(v - mean) / sqrt(variance + 1e-8), both over tokens: the value of a rollout counts once for each trained token.

    values: (B,) float64, exact float32 numbers or differences of them; num_tokens: (B,) int64. The variance is unbiased
    (divided by tokens - 1). Equal values give exactly 0: in float64 the sum of up to 2^29 equal float32 numbers is
    exact. Source: verl's masked_whiten over a matrix that repeats the value; OpenRLHF divides by tokens and takes
    max(variance, 1e-8).
    """
    weights = num_tokens.double()
    total = weights.sum().clamp(min=1.0)
    centred = values - (weights * values).sum() / total
    variance = (weights * centred.square()).sum() / (total - 1.0).clamp(min=1.0)
    return centred / (variance + EPSILON).sqrt()
