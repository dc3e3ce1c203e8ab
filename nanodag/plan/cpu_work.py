"""Seconds of one core that work takes on a CPU: the sum of its parts, each by what bounds it.

Peaks stand in nanodag.host.machine. The constants were measured on two cores with AVX512-BF16 (docs/LOG.md). Those of
products, activations, logits, caches and text come from parts that were measured alone; STEP_S, RANKS_BUSY and OVERLAP
were read off a run of `pocket`.

- matrix products run at 0.8 of the peak of square ones: a pretraining step of 4,096 tokens at depth 3 took 192 ms in
  bfloat16 and 623 in float32, which differ in their products alone;
- attention multiplies in float32, whatever the precision of the model is;
- what lies between products moves activations through memory: written, read again, and their gradients;
- an optimizer step has a part that does not grow with its tokens.
"""

from dataclasses import dataclass

from nanodag.config.footprint import layer_activations
from nanodag.config.model_size import ModelSize
from nanodag.host.machine import Machine

PRODUCTS = 0.8
"""Share of the peak that products reach in training and in scoring."""
DECODED = {"fp32": 0.9, "bf16": 0.4}
"""Share of the peak that a sampler's products reach, of 64 rows and more."""
MOVED_BYTES_S = 14e9
"""Bytes of memory that one core moves in a second."""
CACHED_BYTES_S = 50e9
"""Bytes a second of a sampler's cache, which the processor's own caches hold in part."""
LOGIT_S = 1e-9
"""Seconds of one logit: its exponential, and in training its gradient."""
STEP_S = 0.02
"""Seconds of an optimizer step on each rank beside its tokens: DeepSpeed, the exchange of ranks, the optimizer."""
TOKEN_S = 1.4e-6
"""Seconds of a token of text that is tokenised and packed."""
RANKS_BUSY = 0.75
"""Share of the time in which ranks compute; the rest they wait for one another."""
OVERLAP = 0.85
"""Share of the cores' time that trainer and samplers fill together."""


@dataclass(frozen=True)
class CpuWork:
    """Seconds of one core. shared: in which all threads of a process take part. alone: in which one does."""

    shared: float = 0.0
    alone: float = 0.0

    def __add__(self, other: "CpuWork") -> "CpuWork":
        return CpuWork(self.shared + other.shared, self.alone + other.alone)

    def times(self, factor: float) -> "CpuWork":
        """Multiply both parts by a factor."""
        return CpuWork(factor * self.shared, factor * self.alone)

    @property
    def total(self) -> float:
        """CPU-seconds."""
        return self.shared + self.alone

    def on(self, threads: int) -> float:
        """Seconds by the clock, on so many threads."""
        return self.shared / threads + self.alone


@dataclass(frozen=True, kw_only=True)
class Core:
    """One core that computes in a precision. peak: FLOPs a second; attention_peak: of attention, in float32."""

    precision: str
    peak: float
    attention_peak: float

    def training(self, model: ModelSize, tokens: float, length: int, *, checkpointing: bool = False) -> CpuWork:
        """Forward and backward of so many tokens, in rows of a length."""
        again = 4 / 3 if checkpointing else 1.0
        products = model.training_flops(0)
        attention = model.training_flops(length) - products
        of_token = again * (products / self.peak + attention / self.attention_peak) / PRODUCTS
        moved = 3 * again * model.shape.depth * layer_activations(model.shape, self.precision)
        return CpuWork(of_token, moved / MOVED_BYTES_S + model.vocabulary * LOGIT_S).times(tokens)

    def reading(self, model: ModelSize, tokens: float, length: int, *, scored: float = 1.0) -> CpuWork:
        """A forward pass of so many tokens. scored: share of them whose logits are computed."""
        head = 2 * model.vocabulary * model.shape.width
        products = model.forward_flops(0) - (1 - scored) * head
        attention = model.forward_flops(length) - model.forward_flops(0)
        of_token = (products / self.peak + attention / self.attention_peak) / PRODUCTS
        moved = model.shape.depth * layer_activations(model.shape, self.precision)
        return CpuWork(of_token, moved / MOVED_BYTES_S + scored * model.vocabulary * LOGIT_S).times(tokens)

    def decoding(self, model: ModelSize, tokens: float, *, cached_bytes: float) -> CpuWork:
        """Tokens that a sampler of one thread draws. cached_bytes: of a sample's cache, on average."""
        of_token = model.forward_flops(0) / (DECODED[self.precision] * self.peak) + cached_bytes / CACHED_BYTES_S
        return CpuWork(0.0, of_token).times(tokens)

    def share(self, flops: float | None, cpu_seconds: float | None) -> float | None:
        """Share of the peak that FLOPs in CPU-seconds reach; None where either is not known."""
        return flops / (cpu_seconds * self.peak) if flops and cpu_seconds else None


def core_of(machine: Machine, precision: str) -> Core:
    """A core of a machine."""
    peak = machine.core.bf16 if precision == "bf16" else machine.core.fp32
    return Core(precision=precision, peak=peak, attention_peak=machine.core.attention)
