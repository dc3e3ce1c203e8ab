"""PPO's critic: a decoder with a value head, and an optimizer of its own, trained beside the policy.

The head begins at 0, so before its first update every value is 0, and nothing is drawn at random.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanodag.config.kinds.rl import RLStage
from nanodag.errors import TrainingDiverged
from nanodag.model.folder import CausalModel
from nanodag.rl.advantages import gae
from nanodag.rl.trainer.policy import ByRow, DeviceRow, Rows, engine_of, hidden_states, trained_decoder
from nanodag.rl.trainer.update import DeviceSums
from nanodag.train.sequence_parallel import ALONE, SequenceGroup

FOLDER = "critic"


class ValueHead(nn.Module):
    """Hidden states (..., W) to values (...) float32. Its weights are used inside `forward` only, for ZeRO-3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


class ValueModel(nn.Module):
    """Wraps a decoder, whose output head goes; calling it values one row."""

    def __init__(self, decoder: CausalModel, group: SequenceGroup = ALONE) -> None:
        super().__init__()
        group.check(decoder.architecture)
        del decoder.lm_head
        self.decoder = decoder
        self._group = group
        self.head = ValueHead(decoder.architecture.hidden_size)

    def forward(self, row: DeviceRow) -> Tensor:
        """The value before each of the row's targets was sampled, (N,) float32."""
        hidden, share = hidden_states(self.decoder, row, self._group)
        return self._group.whole(self.head(hidden)[0], share, len(row.targets))


class Critic:
    """The critic of one stage on this rank. folder: of the model that it begins as. group: as for the policy."""

    def __init__(self, config: RLStage, folder: Path, *, device: str, group: SequenceGroup) -> None:
        self._own, self._group = config.algorithm.critic, group
        decoder = trained_decoder(folder, config)
        model = ValueModel(decoder, group)
        self.engine = engine_of(model, decoder, config, learning_rate=self._own.learning_rate, device=device)

    def step(self, step: int, rows: Rows, rewards: ByRow, num_tokens: Sequence[int]) -> tuple[ByRow, dict[str, Any]]:
        """Advantages of the tokens of each row, float32, by the critic as it is at the start of a step, from which
        it then learns; and what is reported of that.

        rewards: float64, of each token. num_tokens: by part, trained ones on all ranks. Every rank must call it.
        """
        with torch.no_grad():
            values = [[self.engine(row) for row in part] for part in rows]
        options = {"gamma": self._own.gamma, "gae_lambda": self._own.gae_lambda}
        pairs = [
            [
                gae(row_rewards, before, row.mask, row.sequence_ids, **options)
                for row, before, row_rewards in zip(*part, strict=True)
            ]
            for part in zip(rows, values, rewards, strict=True)
        ]
        advantages, returns = ([[pair[n] for pair in part] for part in pairs] for n in (0, 1))
        sums, norm = self._learn(step, rows, values, returns, num_tokens)

        def summed(*numbers: float) -> list[float]:
            return self.engine.summed(*self._group.counted(*numbers))

        report = (sums if self._group.is_first else DeviceSums()).read()
        return whitened(advantages, rows, summed), {"critic": report, "critic_gradient_norm": norm}

    def _learn(
        self, step: int, rows: Rows, values: ByRow, returns: ByRow, num_tokens: Sequence[int]
    ) -> tuple[DeviceSums, float]:
        """Pass over the step as often as the config says, with an update for each part. Returns sums for
        metrics.critic_metrics and the largest gradient norm. Raises TrainingDiverged when a gradient is not finite."""
        sums, largest = DeviceSums(), 0.0
        for part, old, part_returns in zip(rows, values, returns, strict=True):
            for place, row in enumerate(part):
                sums.add(_quality(row, old[place].double(), part_returns[place]))
        for _ in range(self._own.epochs):
            for number, part in enumerate(rows):
                for place, row in enumerate(part):
                    predictions = self.engine(row)
                    losses, clipped = value_loss(
                        predictions, values[number][place], returns[number][place].float(), clip=self._own.value_clip
                    )
                    loss = torch.where(row.mask, losses, 0.0).sum() / max(num_tokens[number], 1)
                    sums.add(DeviceSums({"value_loss": loss.detach(), "clipped": (clipped & row.mask).sum()}))
                    self.engine.backward(loss, last=place == len(part) - 1)
                try:
                    norm = self.engine.step(learning_rate=self._own.learning_rate)
                except TrainingDiverged as error:
                    raise TrainingDiverged(
                        f"{error} RL step {step}, the critic. Lower critic.learning_rate or gradient_clipping; the "
                        "last checkpoint is from before."
                    ) from error
                if math.isfinite(norm):  # else it was skipped
                    largest = max(largest, norm)
        return sums, largest

    def save(self, folder: Path) -> None:
        """Write this rank's share of a checkpoint."""
        (folder / FOLDER).mkdir(exist_ok=True)
        self.engine.save(folder / FOLDER)

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote."""
        self.engine.load(folder / FOLDER)


def whitened(advantages: ByRow, rows: Rows, summed: Callable[..., list[float]]) -> ByRow:
    """(A - mean) / sqrt(variance + 1e-8) over the trained tokens of all rows on all ranks, the variance unbiased.

    summed: adds numbers up over ranks. Source: verl's masked_whiten; OpenRLHF divides by n and takes max(variance,
    1e-8).
    """
    pairs = [pair for tensors, part in zip(advantages, rows, strict=True) for pair in zip(tensors, part, strict=True)]
    trained = torch.cat([advantage[row.mask] for advantage, row in pairs])
    count, total = summed(len(trained), float(trained.sum()))
    mean = total / max(count, 1.0)
    (squares,) = summed(float((trained - mean).square().sum()))
    scale = (squares / max(count - 1.0, 1.0) + 1e-8) ** -0.5
    return [[((tensor - mean) * scale).float() for tensor in tensors] for tensors in advantages]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 of each token, and where the bound acts.

    values: (T,) float32, with gradient. old_values: of the critic at the start of the step. returns: what to predict.
    clip c: 0 for none. Returns (T,) float32 and (T,) bool. Source: openai/baselines ppo2; verl's compute_value_loss,
    TRL's PPOTrainer, OpenRLHF's ValueLoss.
    """
    plain = (values - returns).square()
    if not clip:
        return plain / 2, torch.zeros_like(values, dtype=torch.bool)
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(plain, bounded) / 2, bounded > plain


def _quality(row: DeviceRow, values: Tensor, returns: Tensor) -> DeviceSums:
    """Sums over the trained tokens of a row: how well values of before the step say the returns."""
    values, returns = (torch.where(row.mask, tensor, 0.0) for tensor in (values, returns))
    errors = returns - values
    return DeviceSums(
        {
            "tokens": row.mask.sum(),
            "value": values.sum(),
            "return": returns.sum(),
            "error": errors.sum(),
            "return_squared": returns.square().sum(),
            "error_squared": errors.square().sum(),
        }
    )
