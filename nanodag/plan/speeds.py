"""Speed of machines: FLOPs and bytes over what the machine's devices can do, times the share of it that each kind
of work reaches. Peaks stand in nanodag.host.machine, measured of CPUs, stated of GPUs.

The shares of CPUs were read off runs of `pocket` and `small` on two cores, ranks that wait for one another included:
models as small as theirs move more than they multiply, so bf16 gains less than its peak says. The shares of GPUs are
what such software usually reaches; none was measured with this code.
"""

from dataclasses import dataclass

from nanodag.config.model_size import ModelSize
from nanodag.host.machine import Machine
from nanodag.inference.number_formats import width_of


@dataclass(frozen=True, kw_only=True)
class PeakShares:
    """Share of the peak that a kind of work reaches. training: a compiled supervised step. trainer: of RL. likelihood:
    forward passes. decoding: of what memory bandwidth allows on a GPU, of the peak on a CPU."""

    training: float
    trainer: float
    likelihood: float
    decoding: float


GPU_SHARES = {
    "embedded": PeakShares(training=0.40, trainer=0.25, likelihood=0.20, decoding=0.15),
    "sglang": PeakShares(training=0.40, trainer=0.25, likelihood=0.20, decoding=0.50),
}
CPU_SHARES = {
    "fp32": PeakShares(training=0.52, trainer=0.60, likelihood=0.65, decoding=0.70),
    "bf16": PeakShares(training=0.37, trainer=0.45, likelihood=0.45, decoding=0.35),
}
START_S = {"cuda": 60.0, "cpu": 8.0}
"""Seconds to start a worker that trains: imports, the model, the first step, which a GPU's compiles."""
EVALUATION_START_S = {"cuda": 40.0, "cpu": 3.5}
"""Seconds to start an evaluation."""
SGLANG_START_S = 60.0
"""Seconds to start SGLang's servers, once in an evaluation."""
RL_STEP_S = {"cuda": 2.0, "cpu": 0.15}
"""Seconds of an RL step beside sampling and training: rewards, the optimizer's step, new weights."""
PACKED_TOKENS_S = 455_000
"""Tokens a second of a core that the data thread packs: below what a GPU takes, it sets the pace."""
PARSED_BYTES_S = 100e6
"""Bytes of a JSON file that are read as a whole, in a second of a core."""


@dataclass(frozen=True, kw_only=True)
class PlannedDevices:
    """GPUs, or cores, that some work is spread over. count: of them, on all nodes."""

    machine: Machine
    device: str
    precision: str
    count: int
    engine: str = "embedded"

    @property
    def shares(self) -> PeakShares:
        """The shares of their peak that work reaches."""
        return GPU_SHARES[self.engine] if self.device == "cuda" else CPU_SHARES[self.precision]

    @property
    def peak(self) -> float:
        """FLOPs a second of all of them; 0 where the machine's GPU is not known."""
        if self.device == "cuda":
            return self.count * self.machine.gpu.peak_in(self.precision) if self.machine.gpu is not None else 0.0
        core = self.machine.core
        return self.count * (core.bf16 if self.precision == "bf16" else core.fp32)

    def decoding_s(self, model: ModelSize, tokens: float, *, context: int, at_once: int) -> float | None:
        """Seconds to decode so many tokens, with a sampler on each device, which decodes at_once samples of a context.

        A GPU reads all weights and the samples' cache for each step. None where the machine's speed is not known.
        """
        flops, share, width = model.forward_flops(context), self.shares.decoding, width_of(self.precision)
        if self.device == "cpu":
            return tokens * flops / (share * self.peak)
        gpu = self.machine.gpu
        if gpu is None or not gpu.bandwidth or not gpu.peak:
            return None
        read = width * model.total + at_once * context * model.token_bytes(width)
        return tokens / (self.count * at_once) * (read / gpu.bandwidth + at_once * flops / gpu.peak) / share
