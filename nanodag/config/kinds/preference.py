"""Training on preferences, pairs of a chosen and a rejected answer to one prompt: of a policy, or of a reward model."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from nanodag.config.rl_parts import EntryConfig
from nanodag.config.section import later
from nanodag.config.stage_base import answer
from nanodag.config.supervised import ChatStage


class PreferenceLossConfig(EntryConfig):
    """The loss of a pair, or of its answers one by one."""

    kind: ClassVar[str] = "preference_loss"

    @property
    def needs_reference(self) -> bool:
        """True where it asks for the log-probabilities of the weights that the stage begins with."""
        return self.traits is None or self.traits.needs_reference

    @property
    def judges_alone(self) -> bool:
        """True where it learns from answers without another one to compare with."""
        return self.traits is not None and self.traits.judges_alone


class PreferenceStage(ChatStage):
    """Training of a model (input `model`) on pairs of answers: DPO and its relatives; by the loss kto on single answers
    too. The loss of a step is the mean over its pairs, of kto over answers, and a pair's prompt is computed once."""

    objective: ClassVar[str] = "nanodag.train.preference:Preference"
    scores_tokens: ClassVar[bool] = True

    loss: PreferenceLossConfig = PreferenceLossConfig(name="dpo")
    """The loss of a pair: a shipped one with its options, or a function of the user's own."""
    sft_weight: float = Field(0.0, ge=0, le=1000)
    """Weight of -log p a token of the chosen answers, which is added to the loss (RPO)."""

    def check_settings(self) -> None:
        super().check_settings()
        options: dict[str, Any] = {} if self.loss.traits is None else self.loss.options
        if not 0 <= (share := options.get("label_smoothing", 0)) < 0.5:
            raise ValueError(f"loss.options.label_smoothing {share}: a share of swapped pairs is at least 0, below 0.5")
        if (beta := options.get("beta", 1)) <= 0:
            raise ValueError(f"loss.options.beta {beta} would learn nothing, or the rejected answers; set it above 0")
        for name in ("desirable_weight", "undesirable_weight"):
            if not (weight := options.get(name, 1)) > 0:
                raise ValueError(f"loss.options.{name} {weight} would learn nothing of such answers; set it above 0")

    record_kind = answer(lambda stage: "judgement" if stage.loss.judges_alone else "preference")
    passes_before = answer(lambda stage: 1.0 if stage.loss.needs_reference else 0.0)


class RewardModelStage(ChatStage):
    """Training of a reward model, which begins as a model (input `model`) with a scalar head at 0, on pairs of answers,
    or on answers whose steps are right or wrong.
    A Hugging Face directory for AutoModelForSequenceClassification with one label; RL takes it as the input
    `reward_model`."""

    judges: Literal["pairs", "steps"] = later("pairs")
    """Lesson of a row: which of two answers is better, or which `steps` of an answer are right."""
    step_separator: str = later("\n\n", min_length=1)
    """Text between the steps of an answer, for judges: steps."""
    centring: float = Field(0.0, ge=0, le=1000)
    """Weight of the square of a pair's summed scores, which keeps scores around 0."""
    margin_weight: float = Field(0.0, ge=0, le=1_000_000)
    """Factor of how much better the chosen answer is by its data's scores, by which its score must lead."""

    def check_settings(self) -> None:
        super().check_settings()
        for name in ("sample_prompts", "core_every", "benchmarks"):
            if getattr(self, name):
                raise ValueError(f"{name} means nothing to a reward model, which writes no text; leave it out")
        if self.precision == "fp8":
            raise ValueError("precision fp8 is not for reward models; set it to bf16")
        if self.judges == "steps" and (self.centring or self.margin_weight):
            raise ValueError("centring and margin_weight are of pairs, and judges: steps has none; leave them out")

    record_kind = answer(lambda stage: "preference" if stage.judges == "pairs" else "stepwise")
    objective = answer(
        lambda stage: f"nanodag.train.preference:{'PairwiseReward' if stage.judges == 'pairs' else 'StepReward'}"
    )

    @property
    def packing(self) -> dict[str, Any]:
        separator = {} if self.judges == "pairs" else {"step_separator": self.step_separator}
        return {**super().packing, "scores_ends": True, **separator}
