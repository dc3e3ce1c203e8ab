"""Estimators of KL(policy || reference) from one sampled token, x = trainer - reference.

Contract: `fn(trainer_logprobs, reference_logprobs) -> (T,)`, with gradient to the first. All have the expectation
KL under the policy (k2 up to third order). Used in the loss, their gradients differ: that of k2 is the unbiased one
of the KL on policy, that of k1 has expectation 0. Source: J. Schulman, "Approximating KL divergence", 2020;
low_var as verl's `low_var_kl` and slime's.
"""

from torch import Tensor

from nanodag.registry import entry


@entry("kl", "k1")
def k1(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """x: unbiased, may be negative, much variance."""
    return trainer_logprobs - reference_logprobs


@entry("kl", "k2")
def k2(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """x^2 / 2: never negative, biased."""
    return (trainer_logprobs - reference_logprobs).square() / 2


@entry("kl", "k3")
def k3(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-x) - 1 + x: unbiased, never negative; overflows when the two are far apart. The one of the GRPO paper."""
    x = trainer_logprobs - reference_logprobs
    return (-x).expm1() + x


@entry("kl", "low_var")
def low_var(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k3 of x clamped to [-20, 20], the result clamped to at most 10, where its gradient ends."""
    x = (trainer_logprobs - reference_logprobs).clamp(-20.0, 20.0)
    return ((-x).expm1() + x).clamp(-10.0, 10.0)


def unbiased(estimates: Tensor, trainer_logprobs: Tensor, reference_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """ratio * estimate, its gradient ratio * x: in expectation under old, the KL and the gradient of the KL.

    Whatever the kind, the gradient is that of the KL, off policy too; the kinds differ in the value that is logged. For
    k3 both are exactly what ratio * k3 gives when it is differentiated as it stands. x is clamped to [-20, 20], the
    ratio's exponent too. Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1; TRL's use_bias_correction_kl, slime's
    use_unbiased_kl; OpenRLHF has the gradient, with the ratio at most 10, and leaves the value unweighted.
    """
    x = (trainer_logprobs - reference_logprobs).detach().clamp(-20.0, 20.0)
    ratio = (trainer_logprobs.detach() - old_logprobs).clamp(-20.0, 20.0).exp()
    return ratio * (estimates.detach() + x * (trainer_logprobs - trainer_logprobs.detach()))
