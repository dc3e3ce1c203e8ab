"""Speed of machines: FLOPs and bytes over what the machine's devices can do, times the share of it that each kind
of work reaches, `speeds.yaml`. Peaks stand in nanodag.host.machine, measured of CPUs, stated of GPUs.

The shares of CPUs were read off runs of `pocket` and `small` on two cores, ranks that wait for one another included:
models as small as theirs move more than they multiply, so bf16 gains less than its peak says. The shares of GPUs, and
how fast weights and states move, are what such software usually reaches; none was measured with this code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanodag.config.model_size import ModelSize
from nanodag.host.beside import table_beside
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


SPEEDS: dict[str, Any] = table_beside(__file__)
GPU_SHARES = {engine: PeakShares(**shares) for engine, shares in SPEEDS["gpu_shares"].items()}
CPU_SHARES = {precision: PeakShares(**shares) for precision, shares in SPEEDS["cpu_shares"].items()}


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
    """Seconds until samplers have new weights of so many bytes. way: of weights_bytes; all but `disk` go in buckets,
    each with a call to every sampler. bucket_bytes: 0 by the model's size."""
    calls = samplers * (1 if way == "disk" else math.ceil(num_bytes / (bucket_bytes or largest_bucket(num_bytes))))
    return num_bytes / SPEEDS["weights_bytes"][way] + calls * SPEEDS["call"]


def overlapped_s(sampling: float, training: float, steps: int) -> float:
    """Seconds of so many steps whose sampling and training run at the same time: of the longer one, and of the first
    or last step of the other, which has nothing beside it."""
    return max(sampling, training) + min(sampling, training) / steps
