"""How fast GPUs are: the share of their peak that each kind of work reaches. CPUs stand in nanodag.plan.cpu_work.

Peaks of GPUs stand in nanodag.host.machine. The shares are what such software usually reaches, and none was measured
with this code.
"""

from dataclasses import dataclass

from nanodag.host.machine import Machine


@dataclass(frozen=True, kw_only=True)
class PeakShares:
    """Share of the peak that a kind of work reaches. training: a compiled supervised step. trainer: of RL. likelihood:
    evaluation's forward passes. decoding: of what memory bandwidth allows."""

    training: float
    trainer: float
    likelihood: float
    decoding: float


GPU_SHARES = {
    "embedded": PeakShares(training=0.40, trainer=0.25, likelihood=0.20, decoding=0.15),
    "sglang": PeakShares(training=0.40, trainer=0.25, likelihood=0.20, decoding=0.50),
}
START_S = 60.0
"""Seconds to start a worker that trains on a GPU: imports, the model, the first compiled step."""
EVALUATION_START_S = 40.0
"""Seconds to start an evaluation on a GPU."""
SGLANG_START_S = 60.0
"""Seconds to start SGLang's servers, once in an evaluation."""
RL_STEP_S = 2.0
"""Seconds of an RL step on a GPU beside sampling and training: rewards, new weights."""
PACKED_TOKENS_S = 455_000
"""Tokens a second of a core that the data thread packs: below what a GPU takes, it sets the pace."""


def gpu_peak(machine: Machine, precision: str, *, ranks: int) -> float:
    """FLOPs a second of so many GPUs; 0 where the machine's GPU is not known."""
    return ranks * machine.gpu.peak_in(precision) if machine.gpu is not None else 0.0


def decoding_seconds(
    *,
    machine: Machine,
    engine: str,
    samplers: int,
    tokens: float,
    weight_bytes: float,
    cache_bytes: float,
    flops_per_token: float,
    at_once: int,
) -> float | None:
    """Seconds to decode so many tokens on GPUs, shared out to so many samplers that decode at_once samples each.

    A GPU reads all weights and the samples' cache for each step. cache_bytes: of one sample, on average. None where
    the machine's speed is not known.
    """
    if machine.gpu is None or not machine.gpu.bandwidth or not machine.gpu.peak:
        return None
    share = GPU_SHARES[engine].decoding
    step = (weight_bytes + at_once * cache_bytes) / machine.gpu.bandwidth + at_once * flops_per_token / machine.gpu.peak
    return tokens / (samplers * at_once) * step / share
