"""Settings of stages that sample responses to prompts and reward them: RL, and the choice of the best."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nanodag.config.rl_entries import RewardConfig
from nanodag.config.rl_parts import SamplerConfig
from nanodag.config.section import Positive, operational
from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig
from nanodag.data.records import Wanted


def _one_or_names_with_weights(value: Any) -> Any:
    if isinstance(value, dict) and "name" not in value:
        value = [{"name": name, "weight": weight} for name, weight in value.items()]
    if isinstance(value, str | dict | RewardConfig):
        value = [value]
    return tuple(value) if isinstance(value, list) else value  # strict: after this it is no JSON, where a list does


class SampledStage(StageBase):
    """Responses of a model (input `model`) to prompts, and their rewards."""

    record_kind: ClassVar[Wanted | None] = "prompt"
    curves: ClassVar[Literal["", "loss", "rollouts"]] = "rollouts"
    makes_rollouts: ClassVar[bool] = True

    data: tuple[SourceConfig, ...] = Field(min_length=1)
    """The prompts."""
    reward: Annotated[tuple[RewardConfig, ...], BeforeValidator(_one_or_names_with_weights)] = (
        RewardConfig(name="auto"),
    )
    """A reward by name, a function as package.module:function, or names with weights, which are summed. `auto` takes
    what each prompt names; `process:package.module:function` scores single steps."""
    sampler: SamplerConfig = SamplerConfig()
    """The servers that rollouts come from."""
    num_steps: int = Field(100, ge=1)
    """Rounds of rollouts (slime's num_rollout)."""
    num_epochs: float = Field(0.0, ge=0, le=1_000_000)
    """Passes over the prompts, in the place of num_steps: as many steps as their prompts fill. A step asks
    prompts_per_step of them, less those of the groups that rollout.replay trains again. 0 for num_steps."""
    log_responses: int = operational(0, ge=0)
    """Responses of each step that metrics.jsonl and trackers get as a table, with prompt, text and reward: the first
    one of each group in turn, then the second, each with its branches. 0 for none."""
    profile_steps: tuple[Positive, ...] = operational(())
    """Steps whose traces are written into records/profile: torch's of each trainer rank and of each sampler, and the
    step's timeline."""
    checkpoint_every: int = operational(20, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = operational(2, ge=1)
    """Newest checkpoints that are kept while the stage runs."""

    @property
    def learned_sources(self) -> tuple[SourceConfig, ...]:
        return self.data

    @property
    def has_samplers(self) -> bool:
        """True where anything is sampled."""
        return True

    @property
    def sglang(self) -> SamplerConfig | None:
        return self.sampler if self.has_samplers and self.sampler.engine == "sglang" else None

    @property
    def machines(self) -> dict[str, int]:
        return super().machines | ({"sampler.nodes": self.sampler.nodes} if self.sampler.nodes else {})
