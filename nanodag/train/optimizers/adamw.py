"""AdamW, on slices of flat master weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nanodag.config.supervised import OptimizerConfig
from nanodag.registry import entry
from nanodag.train.optimizer import Held


@entry("optimizer", "adamw", takes_all=True, states=2, dial_divisor=10, offloads=True)
class AdamW:
    """AdamW for all weights; norms and biases are not decayed."""

    def __init__(self, config: OptimizerConfig, held: Held) -> None:
        self._runs, self.rows = held.runs, ()
        self._views = [nn.Parameter(run.weights) for run in held.runs]
        groups = []
        for kind, decay in (("decayed", config.weight_decay), ("plain", 0.0)):
            if views := [view for view, run in zip(self._views, held.runs, strict=True) if run.kind == kind]:
                groups.append({"params": views, "weight_decay": decay})
        self._adamw = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True) if groups else None

    def step(self, gradients: Sequence[Tensor], *, rate: float, num_updates: int) -> None:
        """Update the weights; bias correction counts num_updates, which a checkpoint keeps."""
        if self._adamw is None:
            return
        for view, run in zip(self._views, self._runs, strict=True):
            view.grad = gradients[run.flat][run.where]
            first, second = run.states
            step = torch.full((), float(num_updates), dtype=torch.float32, device=view.device)
            self._adamw.state[view] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        for view in self._views:
            view.grad = None
