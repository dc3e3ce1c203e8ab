"""Training on preferences: pairs of a chosen and a rejected answer to one prompt."""

from typing import ClassVar

from pydantic import Field, model_validator

from nanodag.config.kind import MODEL
from nanodag.config.kinds.training import OF_CONVERSATIONS
from nanodag.config.rl_parts import EntryConfig
from nanodag.config.supervised import ChatStage, SupervisedKind
from nanodag.data.records import Wanted


class PreferenceLossConfig(EntryConfig):
    """The loss of a pair."""

    kind: ClassVar[str] = "preference_loss"

    @property
    def needs_reference(self) -> bool:
        """True where it asks for the log-probabilities of the weights that the stage begins with."""
        return self.traits is None or self.traits.needs_reference


class PreferenceStage(ChatStage):
    """Training of a model (input `model`) on pairs of answers: DPO and its relatives. The loss of a step is the mean
    over its pairs, and a pair's prompt is computed once."""

    record_kind: ClassVar[Wanted | None] = "preference"
    objective: ClassVar[str] = "nanodag.train.preference:Preference"
    scores_tokens: ClassVar[bool] = True

    loss: PreferenceLossConfig = PreferenceLossConfig(name="dpo")
    """The loss of a pair: a shipped one with its options, or a function of the user's own."""
    sft_weight: float = Field(0.0, ge=0, le=1000)
    """Weight of -log p a token of the chosen answers, which is added to the loss (RPO)."""

    @model_validator(mode="after")
    def _smooths_less_than_half(self) -> "PreferenceStage":
        share = self.loss.options.get("label_smoothing", 0.0)
        if self.loss.traits is not None and not (isinstance(share, int | float) and 0 <= share < 0.5):
            raise ValueError(f"loss.options.label_smoothing {share}: a share of swapped pairs is at least 0, below 0.5")
        return self

    @property
    def passes_before(self) -> float:
        return 1.0 if self.loss.needs_reference else 0.0


KINDS = (
    SupervisedKind(
        name="preference",
        config=PreferenceStage,
        code_version=1,
        needs={"model": MODEL},
        may_take=OF_CONVERSATIONS,
        label="DPO",
        order=57,
        lower_rate="optimizer.learning_rate=1e-6",
    ),
)
