"""Optimizers over flat, possibly sharded, master weights, with the global gradient norm taken before any update.

DeepSpeed's ZeRO hands an optimizer one flat float32 tensor that holds this rank's pieces of many parameters. Segments
say which piece of which parameter lies where, so that one class serves every ZeRO stage and every optimizer:

1. the norm is that of the whole gradient over all ranks, and clipping scales the gradient before any momentum sees it;
2. an optimizer, one file of nanodag.train.optimizers, updates slices of the flat tensor, as few as the order of
   parameters allows: all of them, or matrices in the layers alone, and AdamW the rest.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from nanodag import registry
from nanodag.config.supervised import OptimizerConfig
from nanodag.errors import TrainingDiverged

Kind = Literal["matrix", "decayed", "plain"]
ORDER: tuple[Kind, ...] = ("matrix", "decayed", "plain")
PLANES = ("first", "second", "third")  # of a checkpoint: an optimizer's states


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of a parameter in this rank's master weights.

    flat: which master tensor; start: first element in it; offset: first element within the parameter; length: elements.
    """

    name: str
    shape: tuple[int, ...]
    flat: int
    start: int
    offset: int
    length: int

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.length)


@dataclass(frozen=True, kw_only=True)
class SegmentRun:
    """Neighbouring segments of one kind. flat: which master tensor. weights: 1-D float32, a view of it. states: like
    weights, as many as the optimizer's traits say, zero at first."""

    kind: Kind
    flat: int
    where: slice
    weights: Tensor
    states: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Parameters that one optimizer updates, as this rank holds them.

    shapes: of all of them, in the same order on every rank. sharded: other ranks hold other elements. dtype: in which
    whole matrices are worked on and exchanged.
    """

    runs: Sequence[SegmentRun]
    segments: Sequence[Segment]
    shapes: Mapping[str, tuple[int, ...]]
    sharded: bool
    dtype: torch.dtype


class Optimizer(Protocol):
    """Interface of an entry of kind `optimizer`. It may write over gradients: one flat tensor a master tensor, clipped.
    num_updates: made before this one. Every rank calls it, also one that holds nothing. rows: what it keeps of rows, by
    the rows of a matrix, which a checkpoint needs."""

    rows: Sequence[tuple[Segment, Tensor]]

    def __init__(self, config: OptimizerConfig, held: Held) -> None: ...

    def step(self, gradients: Sequence[Tensor], *, rate: float, num_updates: int) -> None: ...


def kind_of(name: str, shape: Sequence[int], config: OptimizerConfig) -> Kind:
    """Kind of a parameter: `matrix` for an optimizer of matrices; `decayed` with weight decay; `plain` without.

    Matrices are those inside the layers, not embeddings and head. Norms and biases are never decayed.
    """
    if len(shape) < 2:
        return "plain"
    is_table = "embed" in name or "lm_head" in name
    return "decayed" if config.traits.takes_all or is_table else "matrix"


class SegmentedOptimizer(torch.optim.Optimizer):
    """One parameter group for everything; does nothing until `attach` says where the parameters lie.

    named: parameter name -> parameter; shapes: their full shapes (under ZeRO-3 a parameter at rest is empty).
    clip: largest global gradient norm, 0 for none. gradient_norm: of the last step, before clipping. limit: above it a
    gradient is as bad as one that is not finite; skips: a bad one changes nothing, else it is an error.

    num_updates: that were made, those before a checkpoint was loaded among them; the same on every rank, whatever it
    holds. num_skipped: that were not made because their gradient was bad, so far in this process.

    DeepSpeed takes a step with zero gradients while it starts: without segments that step changes nothing.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        shapes: dict[str, tuple[int, ...]],
        config: OptimizerConfig,
        *,
        clip: float,
        limit: float = math.inf,
        skips: bool = False,
    ) -> None:
        self.limit, self.skips, self.num_skipped = limit, skips, 0
        self.kinds = {name: kind_of(name, shape, config) for name, shape in shapes.items()}
        ordered = sorted(named, key=lambda pair: ORDER.index(self.kinds[pair[0]]))
        super().__init__([parameter for _, parameter in ordered], {"lr": 0.0})
        self.config = config
        self.clip = clip
        self.shapes = shapes
        self.gradient_norm: float | None = None
        self.masters: list[Tensor] = []
        self.segments: list[Segment] = []
        self.num_updates = 0

    def attach(
        self,
        masters: list[Tensor],
        segments: list[Segment],
        *,
        sharded: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Say where the parameters lie, and make the optimizer's state.

        masters: float32 tensors that `step` finds gradients on. sharded: other ranks hold other elements. dtype: in
        which whole matrices are worked on and exchanged. device: on which ranks talk; masters may be offloaded.
        """
        self.masters, self.segments = masters, segments
        self._sharded, self._device = sharded, device
        of_rest = self.config.name if self.config.traits.takes_all else "adamw"
        names: dict[Kind, str] = {"matrix": self.config.name, "decayed": of_rest, "plain": of_rest}
        self._runs = []
        for kind, flat, where in _merged(segments, self.kinds):
            weights = masters[flat].detach().view(-1)[where]
            states = tuple(torch.zeros_like(weights) for _ in range(registry.optimizer_named(names[kind]).states))
            self._runs.append(SegmentRun(kind=kind, flat=flat, where=where, weights=weights, states=states))
        self._optimizers: dict[str, Optimizer] = {}
        for name in dict.fromkeys(names[kind] for kind in self.kinds.values()):
            held = Held(
                runs=[run for run in self._runs if names[run.kind] == name],
                segments=[segment for segment in segments if names[self.kinds[segment.name]] == name],
                shapes={n: self.shapes[n] for n, kind in self.kinds.items() if names[kind] == name},
                sharded=sharded,
                dtype=dtype,
            )
            self._optimizers[name] = registry.load("optimizer", name)(self.config, held)

    def set_rates(self, *, learning_rate: float, matrix_lr: float) -> None:
        """Learning rates of the next step. matrix_lr: of an optimizer of matrices alone."""
        is_of_all = {name: registry.optimizer_named(name).takes_all for name in self._optimizers}
        self._rates = {name: learning_rate if is_all else matrix_lr for name, is_all in is_of_all.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # a closure is not evaluated
        """One update from the gradients on the master weights. Raises TrainingDiverged, before any weight changes, when
        the norm of the gradient is not finite or above the limit, and such are not to be skipped."""
        if not self.masters:
            return
        gradients = [torch.zeros_like(m).view(-1) if m.grad is None else m.grad.view(-1) for m in self.masters]
        pieces = [gradients[run.flat][run.where] for run in self._runs]
        self.gradient_norm = norm = self._norm(pieces)
        if not math.isfinite(norm) or norm > self.limit:
            if self.skips:
                self.num_skipped += 1
                return
            above = f", above gradient_limit {self.limit}" if math.isfinite(norm) else ""
            raise TrainingDiverged(f"The global gradient norm is {norm}{above}.")
        if self.clip and norm > self.clip:
            torch._foreach_mul_(pieces, self.clip / norm)
        for name, optimizer in self._optimizers.items():
            optimizer.step(gradients, rate=self._rates[name], num_updates=self.num_updates)
        self.num_updates += 1

    def _norm(self, pieces: list[Tensor]) -> float:
        # float64: a sum of squares of 1e9 elements keeps its digits, and the number of ranks does not show.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if pieces:
            total += torch.stack(torch._foreach_norm(pieces)).double().square().sum().to(self._device)
        if self._sharded:
            dist.all_reduce(total)
        return math.sqrt(float(total))

    def planes(self, of: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Iterator[tuple[str, Segment, Tensor]]:
        """Yield every tensor that a checkpoint needs: (`weights` or one of PLANES, segment, a view that may be written
        to). of: where a whole tensor is to be read in place of itself."""
        masters = [of(master.detach()).view(-1) for master in self.masters]
        states = [[of(state) for state in run.states] for run in self._runs]
        for segment in self.segments:
            yield "weights", segment, masters[segment.flat][segment.where]
            for run, whole in zip(self._runs, states, strict=True):
                begin = segment.start - run.where.start
                if run.flat == segment.flat and 0 <= begin < run.weights.numel():
                    for plane, state in zip(PLANES, whole, strict=False):
                        yield plane, segment, state[begin : begin + segment.length]
        for optimizer in self._optimizers.values():
            yield from (("rows", owned, state) for owned, state in optimizer.rows)

    def tensors(self) -> list[Tensor]:
        """Master weights and states, whole."""
        return [*self.masters, *(state for run in self._runs for state in run.states)]


def _merged(segments: Sequence[Segment], kinds: dict[str, Kind]) -> list[tuple[Kind, int, slice]]:
    """Segments that touch and are of one kind, merged."""
    runs: list[tuple[Kind, int, slice]] = []
    for segment in sorted(segments, key=lambda s: (s.flat, s.start)):
        kind = kinds[segment.name]
        if runs and runs[-1][:2] == (kind, segment.flat) and runs[-1][2].stop == segment.start:
            runs[-1] = (kind, segment.flat, slice(runs[-1][2].start, segment.where.stop))
        else:
            runs.append((kind, segment.flat, segment.where))
    return runs
