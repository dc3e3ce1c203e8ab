"""The policy that is trained, a decoder that scores packed rollouts; and the frozen one that it is compared with."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nanodag.config.kinds.rl import RLStage
from nanodag.config.supervised import OptimizerConfig
from nanodag.errors import ConfigError
from nanodag.errors.words import counted
from nanodag.model.architecture import read_checkpoint
from nanodag.model.attention import group_attention, on_device
from nanodag.model.folder import CausalModel, load
from nanodag.model.headers import faults_of_config
from nanodag.rl.rollouts.rollout import Rollout
from nanodag.rl.trainer.rows import MicroBatch
from nanodag.tokenizer.encoding import Encoding
from nanodag.train.deepspeed_engine import FrozenModel, TrainEngine
from nanodag.train.lent_memory import LentMemory
from nanodag.train.sequence_parallel import ALONE, SequenceGroup, Share


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A micro-batch on the device, 45 bytes a token without routes. Shapes as in MicroBatch; host: where it is from."""

    token_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    targets: Tensor
    mask: Tensor
    sampler_logprobs: Tensor
    sequence_ids: Tensor
    rollouts: Tensor
    routes: Tensor
    host: MicroBatch


Parts = Sequence[Sequence[Rollout]]
"""The rollouts of each part of a step; a part is an update's."""
Rows = Sequence[Sequence[DeviceRow]]
"""This rank's rows of each part."""
ByRow = list[list[Tensor]]
"""(N,) of each row of each part."""


def to_row(batch: MicroBatch, device: torch.device) -> DeviceRow:
    """Move a micro-batch to the device."""
    names = [name for name in DeviceRow.__slots__ if name != "host"]
    return DeviceRow(host=batch, **{name: on_device(getattr(batch, name), device) for name in names})


def hidden_states(decoder: CausalModel, row: DeviceRow, group: SequenceGroup) -> tuple[Tensor, Share]:
    """(1, N, W), of the tokens before those that this rank scores, and which those are."""
    share = group.share_of(row.token_ids, row.position_ids, row.predictors, row.targets)
    attend = group.attention(group_attention(row.host.prompts, row.host.responses), len(row.token_ids))
    options = {"routes": row.routes} if getattr(decoder, "routing", None) is not None else {}
    hidden = decoder(share.token_ids, share.position_ids, attend=attend, want="hidden", **options)
    # A prompt's last token predicts the first token of each of its responses, so places repeat.
    return hidden.index_select(1, share.predictors), share


def trained_decoder(folder: Path, config: RLStage) -> CausalModel:
    """The decoder in a Hugging Face directory, in float32 on CPU; under ZeRO-3 its weights are not read yet."""
    return load(
        folder,
        compiled=config.optimizer.compile is True,
        activation_checkpointing=config.optimizer.activation_checkpointing is True,
        is_deferred=config.optimizer.zero_stage == 3,
    )


class Policy(nn.Module):
    """Wraps a decoder; calling it scores one row. temperature: the one that the sampler samples at. group: of the ranks
    that share a row."""

    def __init__(self, decoder: CausalModel, *, temperature: float, group: SequenceGroup = ALONE) -> None:
        super().__init__()
        group.check(decoder.architecture)
        self.decoder, self.temperature, self._group = decoder, temperature, group

    def forward(self, row: DeviceRow) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the row's targets at the temperature, and the entropies: (N,) float32 both."""
        hidden, share = hidden_states(self.decoder, row, self._group)
        logprobs, entropies = self.decoder.lm_head(hidden, share.targets, "all_logprobs", self.temperature)
        num_tokens = len(row.targets)
        return self._group.whole(logprobs, share, num_tokens), self._group.whole(entropies, share, num_tokens)


class Reference:
    """The frozen policy that KL is measured from: the model that the stage began with, or a later one; in the training
    precision, under ZeRO-3 in shares. A refreshed one is part of a checkpoint. Calling it scores one row."""

    def __init__(self, model_path: Path, *, temperature: float, engine: TrainEngine, group: SequenceGroup) -> None:
        decoder = load(model_path, is_deferred=engine.zero_stage == 3)
        policy = Policy(decoder, temperature=temperature, group=group)
        self.model = FrozenModel(policy, beside=engine, leaf_modules=policy.decoder.leaf_modules)
        self._rank = engine.rank
        self.lent = LentMemory(self.model.shares.values(), device=engine.device)

    def __call__(self, row: DeviceRow) -> tuple[Tensor, Tensor]:
        return self.model(row)

    def save(self, folder: Path) -> None:
        """Write this rank's share of it into a checkpoint; rank 0 alone where every rank has all of it."""
        if self._rank == 0 or self.model.is_spread:
            shares = {name: self.lent.readable(share).cpu().contiguous() for name, share in self.model.shares.items()}
            save_file(shares, folder / f"reference-{self._rank:05d}.safetensors")

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, by any number of ranks; every rank must call it."""
        with ExitStack() as stack:
            paths = sorted(folder.glob("reference*.safetensors"))  # without a number: whole, of before
            files = [stack.enter_context(safe_open(str(path), framework="pt")) for path in paths]
            names = self.model.shares
            self.model.take((name, torch.cat([f.get_tensor(name).flatten() for f in files])) for name in names)


def engine_of(
    model: nn.Module, decoder: CausalModel, config: RLStage, *, learning_rate: float, device: str
) -> TrainEngine:
    """A model around a decoder, under the stage's ZeRO, precision, AdamW and clipping: the policy, or its critic."""
    assert config.optimizer.precision != "auto"  # derived
    return TrainEngine(
        model,
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=learning_rate,
            **config.optimizer.model_dump(include={"betas", "eps", "weight_decay"}),
        ),
        zero_stage=config.optimizer.zero_stage,
        precision=config.optimizer.precision,
        gradient_clipping=config.optimizer.gradient_clipping,
        gradient_limit=config.optimizer.gradient_limit or math.inf,
        skips_bad_gradients=config.optimizer.bad_gradient == "skip",
        device=device,
        leaf_modules=decoder.leaf_modules,
        offload=config.resources,
    )


def check_tokens(what: str, tokens: Mapping[str, int], policys: Mapping[str, int]) -> None:
    """Raise ConfigError when two vocabularies differ. what: the setting and its value."""
    if tokens != policys:
        differing = sorted({token for token, _ in tokens.items() ^ policys.items()})
        raise ConfigError(
            f"{what} has another tokenizer than the policy: it differs in {counted(len(differing), 'token')}, "
            f"the first is {differing[0]!r}."
        )


def check_beside(what: str, folder: Path, policy: Path, *, context: int) -> None:
    """Raise ConfigError when a model cannot read the policy's rollouts. what: the setting that names its folder."""
    with faults_of_config():
        own, others = read_checkpoint(folder).architecture, read_checkpoint(policy).architecture
    tokens = Encoding(folder).token_ids()
    check_tokens(f"{what} {folder}", tokens, Encoding(policy).token_ids())
    if own.vocab_size <= max(tokens.values()):
        raise ConfigError(f"{what} {folder} has {own.vocab_size} embeddings for {max(tokens.values()) + 1} token ids.")
    if own.max_positions < min(context, others.max_positions):
        raise ConfigError(
            f"{what} {folder} has {own.max_positions} positions, fewer than sampler.context {context}; lower it."
        )
