"""How fast machines are: peaks of their matrix products, and the share of them that each kind of work reaches.

Peaks of GPUs stand in nanodag.host.machine. Shares of CPUs were measured on two cores (docs/LOG.md); those of GPUs are
what such software usually reaches, and none was measured with this code.
"""

from dataclasses import dataclass

from nanodag.host.machine import Machine

CPU_PEAKS: dict[str, dict[str, float]] = {
    "other": {"fp32": 20e9, "bf16": 2e9},  # not measured
    "avx2": {"fp32": 73e9, "bf16": 6.5e9},
    "avx512": {"fp32": 105e9, "bf16": 25e9},  # bf16 not measured
    "avx512_bf16": {"fp32": 108e9, "bf16": 480e9},
    "amx": {"fp32": 116e9, "bf16": 900e9},  # bf16 not measured
}
"""FLOPs a second of one core, by instruction set and precision: the best of square products of 768."""

GPU_FP32 = 0.06
"""A GPU's float32 peak, as a share of its bfloat16 one: 67 of 989 TFLOPs on an H100."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Share of the peak that a kind of work reaches. training: a compiled supervised step. trainer: of RL. likelihood:
    evaluation's forward passes. decoding: of what memory bandwidth allows on a GPU, of the peak on a CPU."""

    training: float
    trainer: float
    likelihood: float
    decoding: float


NARROW = {"fp32": Shares(training=0.40, trainer=0.55, likelihood=0.70, decoding=0.50)}
WIDE = {
    "fp32": Shares(training=0.50, trainer=0.70, likelihood=0.80, decoding=0.80),
    "bf16": Shares(training=0.32, trainer=0.45, likelihood=0.30, decoding=0.33),
}
CPU_SHARES = {
    "other": NARROW | {"bf16": WIDE["fp32"]},
    "avx2": NARROW | {"bf16": WIDE["fp32"]},  # emulated, so that the peak is what limits it
    "avx512": WIDE,
    "avx512_bf16": WIDE,
    "amx": WIDE,
}
GPU_SHARES = {
    "embedded": Shares(training=0.40, trainer=0.25, likelihood=0.20, decoding=0.15),
    "sglang": Shares(training=0.40, trainer=0.25, likelihood=0.20, decoding=0.50),
}
START_S = {"cpu": 8.0, "cuda": 60.0}
"""Of a worker that trains: imports, the model, the first compiled step."""
EVALUATION_START_S = {"cpu": 7.0, "cuda": 40.0}
SHORT_START_S = 2.0
"""Of a worker without a model."""
BYTES_A_CORE_S = 12e6
"""Text that the tokenizer's training takes in a second of a core; of an import, what is copied takes less."""
PACKED_TOKENS_S = 455_000
"""Tokens a second of a core that the data thread packs: below what a GPU takes, it sets the pace."""


def shares_of(machine: Machine, device: str, precision: str, engine: str = "embedded") -> Shares:
    """The shares for a device of a machine. engine: of the samplers."""
    return CPU_SHARES[machine.instruction_set][precision] if device == "cpu" else GPU_SHARES[engine]


def peak_of(machine: Machine, device: str, precision: str, *, ranks: int, threads: int = 1) -> float:
    """FLOPs a second of so many ranks, each with a GPU or with so many threads on cores of their own; 0 where the
    machine's GPU is not known."""
    if device == "cuda":
        peak = machine.gpu.peak if machine.gpu is not None else 0.0
        return ranks * peak * (1.0 if precision == "bf16" else GPU_FP32)
    cores = min(ranks * threads, machine.cores * machine.nodes)
    return cores * CPU_PEAKS[machine.instruction_set][precision]


def decoding_seconds(
    *,
    machine: Machine,
    device: str,
    precision: str,
    engine: str,
    samplers: int,
    threads: int,
    tokens: float,
    weight_bytes: float,
    cache_bytes: float,
    flops_per_token: float,
    at_once: int,
) -> float | None:
    """Seconds to decode so many tokens, shared out to so many samplers that decode at_once samples each.

    A GPU reads all weights and the samples' cache for each step; a CPU computes. cache_bytes: of one sample, on
    average. None where the machine's speed is not known.
    """
    share = shares_of(machine, device, precision, engine).decoding
    if device == "cpu":
        return tokens * flops_per_token / (share * peak_of(machine, device, precision, ranks=samplers, threads=threads))
    if machine.gpu is None or not machine.gpu.bandwidth or not machine.gpu.peak:
        return None
    step = (weight_bytes + at_once * cache_bytes) / machine.gpu.bandwidth + at_once * flops_per_token / machine.gpu.peak
    return tokens / (samplers * at_once) * step / share
