"""Best of n: answers of a model that a reward chose, as conversations for SFT."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError, model_validator

from nanodag.config.derive_hardware import Derived
from nanodag.config.kind import CONVERSATIONS, MODEL, Kind
from nanodag.config.kinds.rl import RLStage
from nanodag.config.model_size import ModelSize
from nanodag.config.rl_entries import EntryConfig
from nanodag.config.rl_sections import SamplingSection
from nanodag.config.sampled_stage import SampledStage
from nanodag.errors import ConfigError


class SelectStage(SampledStage):
    """Rejection sampling (input `model`): rollout.samples_per_prompt answers to each prompt, of which the best are
    kept. An `sft` stage reads them as `input:conversations`."""

    plan_formula: ClassVar[str] = "nanodag.plan.rl:SELECT"

    rollout: SamplingSection = SamplingSection()
    """Which answers are generated."""
    best: int = Field(1, ge=1)
    """Different answers that are kept of each prompt, those with the highest rewards; of equal ones the first."""
    lowest_reward: float = 1.0
    """The least reward of an answer that is kept."""

    @model_validator(mode="after")
    def _can_be_sampled(self) -> "SelectStage":
        self.as_rl()
        return self

    def as_rl(self) -> RLStage:
        """The RL stage that its worker runs: it samples and scores, and trains nothing. Raises ValueError for settings
        that make none."""
        context, sampler = self.sampler.context, self.sampler
        has_own_place = sampler.nodes > 0 or sampler.gpus not in ("auto", ())
        try:
            return RLStage.of(
                **self.model_dump(exclude={"kind", "best", "lowest_reward"}),
                kind="rl",
                only="rollouts",
                placement="separate" if has_own_place else "beside",
                advantage="reinforce_pp",  # compares no groups, which may be of one answer here
                lends_states=False,
                order="prompt",
                eval_prompts=0,
                precision=sampler.precision,
                micro_batch_tokens="auto" if context == "auto" else max(16, context),
                activation_checkpointing=False,
                compile=False,
                sync_check_every=0,
                mismatch_limit=1.0,
            )
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error

    def load_entry(self, entry: EntryConfig) -> Callable[..., Any]:
        return entry.load()

    def num_gpus(self, available: int) -> int:
        return self.as_rl().num_gpus(available)

    def after_ranks(self, model: ModelSize | None, derived: Derived) -> Self:
        """The stage without any `auto`. Raises ConfigError for what its resources cannot do."""
        try:
            stage = self.as_rl()
        except ValueError as error:  # of what this machine makes of it
            raise ConfigError(f"stages.{derived.name}.{error}.") from error
        return self.model_copy(update={"sampler": stage.before_ranks(derived).after_ranks(model, derived).sampler})


KIND = Kind(
    name="select",
    config=SelectStage,
    module="nanodag.select",
    code_version=4,
    makes=CONVERSATIONS,
    needs={"model": MODEL},
    order=55,
    less_memory="sampler.max_batch=16",
)
