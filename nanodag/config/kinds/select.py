"""Best of n: answers of a model that a reward chose, as conversations for SFT."""

from typing import Literal

from pydantic import Field, model_validator

from nanodag.config.kind import CONVERSATIONS, MODEL, Kind
from nanodag.config.kinds.rl import RLStage


class SelectStage(RLStage):
    """Rejection sampling (input `model`): rollout.samples_per_prompt answers to each prompt, of which the best are
    kept. An `sft` stage reads them as `input:conversations`. Nothing is trained; settings of the trainer mean
    nothing."""

    only: Literal["rollouts"] = "rollouts"
    """Answers are generated and scored."""
    best: int = Field(1, ge=1)
    """Different answers that are kept of each prompt, those with the highest rewards; of equal ones the first."""
    lowest_reward: float = 1.0
    """The least reward of an answer that is kept."""

    @model_validator(mode="after")
    def _answers_are_of_one_turn(self) -> "SelectStage":
        if not self.rollout.generate.is_one_turn:
            raise ValueError(
                f"rollout.generate {self.rollout.generate} writes text of tools into an answer, which kind select "
                "leaves out; use one_turn"
            )
        return self


KIND = Kind(
    name="select",
    config=SelectStage,
    module="nanodag.select",
    code_version=3,
    makes=CONVERSATIONS,
    needs={"model": MODEL},
    order=55,
    less_memory="sampler.max_batch=16",
)
