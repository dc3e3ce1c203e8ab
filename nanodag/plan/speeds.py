"""Speed of machines: FLOPs and bytes over what the machine's devices can do, times the share of it that each kind
of work reaches. Peaks stand in nanodag.host.machine, measured of CPUs, stated of GPUs.

The shares of CPUs were read off runs of `pocket` and `small` on two cores, ranks that wait for one another included:
models as small as theirs move more than they multiply, so bf16 gains less than its peak says. The shares of GPUs, and
how fast weights and states move, are what such software usually reaches; none was measured with this code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanodag.config.model_size import ModelSize
from nanodag.host.machine import FP32_SHARE, Machine
from nanodag.inference.number_formats import width_of
from nanodag.inference.weight_bodies import largest_bucket


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
    **dict.fromkeys(("sglang", "vllm"), PeakShares(training=0.40, trainer=0.25, likelihood=0.20, decoding=0.50)),
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
RL_STEP_S = {"cuda": 0.5, "cpu": 0.15}
"""Seconds of an RL step beside sampling and training: rewards and the optimizer's step; on a CPU new weights too."""
WEIGHTS_BYTES_S = {"disk": 0.7e9, "gloo": 1e9, "ipc": 10e9, "nccl": 20e9}
"""Bytes a second of new weights by their way, gathering them included. disk: written by one process, read by each
sampler. ipc: through what the samplers of a machine share with rank 0."""
CALL_S = 0.18e-3
"""Seconds of a call to one sampler: measured."""
PCIE_BYTES_S = 25e9
"""Bytes a second between a GPU and pinned memory of its host, one way."""
HOST_ADAMW_S = 1.6e-9
"""Seconds a parameter of an AdamW step on a GPU's host: 28 bytes of memory at 20 GB/s, and 6 over PCIe."""
PACKED_TOKENS_S = 455_000
"""Tokens a second of a core that the data thread packs: below what a GPU takes, it sets the pace."""
PARSED_BYTES_S = 100e6
"""Bytes of a JSON file that are read as a whole, in a second of a core."""


@dataclass(frozen=True)
class Asked:
    """Samples that are asked for together. times: how often; answer, longest: tokens of one, on average and at most.
    lag: how often they are asked for ahead, so that samples of several times take each other's places."""

    times: int
    samples: float
    answer: float
    longest: float
    lag: int = 0

    def steps(self, count: int, at_once: int) -> float:
        """Forward passes of each of so many samplers with at_once places. Each time is done when its longest answer is,
        and before that samples wait for a place; with a lag, places stay full."""
        each = self.samples / count
        if self.lag:
            return self.times * each * self.answer / max(1.0, min(at_once, each * (1 + self.lag)))
        return self.times * (self.longest + max(0.0, each / at_once - 1) * self.answer)


@dataclass(frozen=True, kw_only=True)
class PlannedDevices:
    """GPUs, or cores, that some work is spread over. count: of them, on all nodes. gpus_each: that share one model
    where a sampler is split, so that one of the count is so many GPUs."""

    machine: Machine
    device: str
    precision: str
    count: int
    engine: str = "embedded"
    gpus_each: int = 1

    @property
    def shares(self) -> PeakShares:
        """The shares of their peak that work reaches."""
        return GPU_SHARES[self.engine] if self.device == "cuda" else CPU_SHARES[self.precision.replace("fp8", "bf16")]

    @property
    def peak(self) -> float:
        """FLOPs a second of all of them; 0 where the machine's GPU is not known."""
        gpu, is_bf16 = self.machine.gpu, self.precision != "fp32"
        if self.device == "cuda":
            return self.count * self.gpus_each * gpu.peak * (1.0 if is_bf16 else FP32_SHARE) if gpu is not None else 0.0
        return self.count * self.machine.core_flops("bf16" if is_bf16 else "fp32")

    def decoding_s(self, model: ModelSize, asked: Sequence[Asked], *, context: int, at_once: int) -> float | None:
        """Seconds to decode samples whose tokens see a context, with a sampler on each device of at_once places.

        A GPU reads all weights for each step of a sampler, and for each token its sample's cache; a CPU multiplies.
        None where the machine's speed is not known.
        """
        flops, share, width = model.forward_flops(context), self.shares.decoding, width_of(self.precision)
        tokens = sum(each.times * each.samples * each.answer for each in asked)
        if self.device == "cpu":
            return tokens * flops / (share * self.peak)
        gpu = self.machine.gpu
        if gpu is None or not gpu.bandwidth or not gpu.peak:
            return None
        steps = sum(each.steps(self.count, at_once) for each in asked)
        read = steps * width * model.total + tokens / self.count * context * model.token_bytes(width)
        return (read / gpu.bandwidth + tokens / self.count * flops / gpu.peak) / (share * self.gpus_each)


def weights_s(num_bytes: int, way: str, *, bucket_bytes: int, samplers: int) -> float:
    """Seconds until samplers have new weights of so many bytes. way: of WEIGHTS_BYTES_S; all but `disk` go in buckets,
    each with a call to every sampler. bucket_bytes: 0 by the model's size."""
    calls = samplers * (1 if way == "disk" else math.ceil(num_bytes / (bucket_bytes or largest_bucket(num_bytes))))
    return num_bytes / WEIGHTS_BYTES_S[way] + calls * CALL_S


def overlapped_s(sampling: float, training: float, steps: int) -> float:
    """Seconds of so many steps whose sampling and training run at the same time: of the longer one, and of the first
    or last step of the other, which has nothing beside it."""
    return max(sampling, training) + min(sampling, training) / steps
