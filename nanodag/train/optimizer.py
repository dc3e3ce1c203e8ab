"""AdamW and Muon over flat, possibly sharded, master weights, with the global gradient norm taken before any update.

DeepSpeed's ZeRO hands an optimizer one flat float32 tensor that holds this rank's pieces of many parameters. Segments
say which piece of which parameter lies where, so that one optimizer serves every ZeRO stage:

1. the norm is that of the whole gradient over all ranks, and clipping scales the gradient before Muon's momentum and
   before AdamW's moments see it;
2. AdamW runs on slices of the flat tensor, as few as the order of parameters allows;
3. Muon orthogonalises whole matrices (nanodag.train.muon), those that lie on several ranks after an exchange.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from nanodag.config.supervised import OptimizerConfig
from nanodag.errors import TrainingDiverged
from nanodag.train.muon import muon_updates

Kind = Literal["matrix", "decayed", "plain"]
ORDER: tuple[Kind, ...] = ("matrix", "decayed", "plain")


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
class _Run:
    """Neighbouring segments of one kind. second: AdamW's second moment, empty for matrices."""

    kind: Kind
    flat: int
    where: slice
    second: Tensor


def kind_of(name: str, shape: Sequence[int], config: OptimizerConfig) -> Kind:
    """How a parameter is updated: `matrix` by Muon; `decayed` by AdamW with weight decay; `plain` by AdamW without.

    Muon is for matrices inside the layers; embeddings and head stay with AdamW. Norms and biases are never decayed.
    """
    if len(shape) < 2:
        return "plain"
    is_table = "embed" in name or "lm_head" in name
    return "matrix" if config.name == "muon" and not is_table else "decayed"


class SegmentedOptimizer(torch.optim.Optimizer):
    """One parameter group for everything; does nothing until `attach` says where the parameters lie.

    named: parameter name -> parameter; shapes: their full shapes (under ZeRO-3 a parameter at rest is empty).
    clip: largest global gradient norm, 0 for none. gradient_norm: of the last step, before clipping. limit: above it a
    gradient is as bad as one that is not finite; skips: a bad one changes nothing, else it is an error.

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
        self._rates = (0.0, 0.0)
        self._num_updates = 0

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
        which matrices are orthogonalised and exchanged. device: on which ranks talk; masters may be offloaded.
        """
        self.masters, self.segments = masters, segments
        self._sharded, self._dtype, self._device = sharded, dtype, device
        self._first = [torch.zeros_like(master, requires_grad=False).view(-1) for master in masters]
        self._runs = []
        for kind, flat, where in _merged(segments, self.kinds):
            size = 0 if kind == "matrix" else where.stop - where.start
            self._runs.append(_Run(kind=kind, flat=flat, where=where, second=self._first[flat].new_zeros(size)))
        self._adamw, self._views = self._make_adamw()

    def set_rates(self, *, adamw: float, matrix: float) -> None:
        """Learning rates of the next step."""
        self._rates = (adamw, matrix)

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
        self._step_matrices(gradients)
        self._step_adamw(pieces)
        self._num_updates += 1

    def _norm(self, pieces: list[Tensor]) -> float:
        # float64: a sum of squares of 1e9 elements keeps its digits, and the number of ranks does not show.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if pieces:
            total += torch.stack(torch._foreach_norm(pieces)).double().square().sum().to(self._device)
        if self._sharded:
            dist.all_reduce(total)
        return math.sqrt(float(total))

    def _make_adamw(self) -> tuple[torch.optim.AdamW | None, list[tuple[nn.Parameter, int]]]:
        groups, views = [], []
        for kind, decay in (("decayed", self.config.weight_decay), ("plain", 0.0)):
            chosen = [(index, run) for index, run in enumerate(self._runs) if run.kind == kind]
            parameters = [nn.Parameter(self.masters[run.flat].detach().view(-1)[run.where]) for _, run in chosen]
            views += [(p, index) for p, (index, _) in zip(parameters, chosen, strict=True)]
            if parameters:
                groups.append({"params": parameters, "weight_decay": decay})
        if not groups:
            return None, []
        adamw = torch.optim.AdamW(groups, lr=0.0, betas=self.config.betas, eps=self.config.eps, fused=True)
        for view, index in views:
            run = self._runs[index]
            adamw.state[view] = {
                "step": torch.zeros((), dtype=torch.float32, device=view.device),
                "exp_avg": self._first[run.flat][run.where],
                "exp_avg_sq": run.second,
            }
        return adamw, views

    def _step_adamw(self, pieces: list[Tensor]) -> None:
        if self._adamw is None:
            return
        for view, index in self._views:
            view.grad = pieces[index]
        for group in self._adamw.param_groups:
            group["lr"] = self._rates[0]
        self._adamw.step()
        for view, _ in self._views:
            view.grad = None

    def _step_matrices(self, gradients: list[Tensor]) -> None:
        runs = [run for run in self._runs if run.kind == "matrix"]
        names = [name for name, kind in self.kinds.items() if kind == "matrix"]
        if not names:
            return
        config, rate = self.config, self._rates[1]
        slices = [gradients[run.flat][run.where] for run in runs]
        momenta = [self._first[run.flat][run.where] for run in runs]
        if runs:
            torch._foreach_lerp_(momenta, slices, 1 - config.momentum)
            torch._foreach_lerp_(slices, momenta, config.momentum)  # Nesterov's look ahead
        pieces = [(s, gradients[s.flat][s.where]) for s in self.segments if self.kinds[s.name] == "matrix"]
        muon_updates({n: self.shapes[n] for n in names}, pieces, sharded=self._sharded, dtype=self._dtype)
        weights = [self.masters[run.flat].detach().view(-1)[run.where] for run in runs]
        if runs and config.weight_decay:
            torch._foreach_mul_(weights, 1 - rate * config.weight_decay)
        if runs:
            torch._foreach_add_(weights, slices, alpha=-rate)

    def planes(self, of: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Iterator[tuple[str, Segment, Tensor]]:
        """Every tensor that a checkpoint needs: (`weights`, `first` or `second`, segment, a view that may be written
        to). of: where a whole tensor is to be read in place of itself."""
        masters = [of(master.detach()).view(-1) for master in self.masters]
        firsts = [of(first) for first in self._first]
        for segment in self.segments:
            yield "weights", segment, masters[segment.flat][segment.where]
            yield "first", segment, firsts[segment.flat][segment.where]
            here = segment.start
            run = next(r for r in self._runs if r.flat == segment.flat and r.where.start <= here < r.where.stop)
            if run.kind != "matrix":
                begin = segment.start - run.where.start
                yield "second", segment, of(run.second)[begin : begin + segment.length]

    def tensors(self) -> list[Tensor]:
        """Master weights and moments, whole."""
        return [*self.masters, *self._first, *(run.second for run in self._runs)]

    @property
    def num_updates(self) -> int:
        """Updates that were made: the same on every rank, whatever it holds. AdamW's bias correction uses it."""
        return self._num_updates

    @num_updates.setter
    def num_updates(self, value: int) -> None:
        self._num_updates = value
        if self._adamw is not None:
            for view, _ in self._views:
                self._adamw.state[view]["step"].fill_(value)


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
