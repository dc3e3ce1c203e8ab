"""Reinforcement learning."""

from collections.abc import Callable
from functools import reduce
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from nanodag import registry
from nanodag.config.rl_entries import (
    AdvantageConfig,
    AggregationConfig,
    CorrectionConfig,
    EntryConfig,
    FilterConfig,
    GenerateConfig,
    KLConfig,
    PolicyLossConfig,
    RewardConfig,
)
from nanodag.config.rl_parts import CriticConfig, SamplerConfig, TeacherConfig
from nanodag.config.section import Auto, Precision, Share, operational
from nanodag.config.stage import StageBase
from nanodag.data.config import SourceConfig
from nanodag.errors import ConfigError
from nanodag.errors.words import listed


class RLStage(StageBase):
    """GRPO and its relatives (input `model`)."""

    kind: Literal["rl"]
    data: tuple[SourceConfig, ...] = Field(min_length=1)
    """The prompts."""
    validation: tuple[SourceConfig, ...] = ()
    """Held-out prompts that evaluate the policy."""
    reward: tuple[RewardConfig, ...] = (RewardConfig(name="auto"),)
    """A reward by name, a function as package.module:function, or names with weights, which are summed. `auto` takes
    what each prompt names; `process:package.module:function` scores single steps."""
    generate: GenerateConfig = GenerateConfig()
    """How a response is made: one turn of the sampler, or turns and tools."""
    sampler: SamplerConfig = SamplerConfig()
    """The servers that rollouts come from."""
    placement: Literal["shared"] = "shared"
    """`shared` puts trainer and samplers on the same devices."""
    sync: Literal["disk", "distributed"] = operational("disk")
    """How weights reach the samplers: `disk`, a folder, in memory where there is room, or `distributed`, a broadcast
    from rank 0."""
    sync_bucket_bytes: int = operational(64 << 20, ge=1)
    """Bytes broadcast at once."""
    sync_timeout_s: float = operational(60.0, gt=0)
    """Seconds that one bucket may take."""
    sync_mode: Literal["finish", "abort", "retract", "in_place"] = "finish"
    """What happens to requests in flight when weights change. `finish` waits for them; `in_place` continues them with
    the new weights; `retract` also computes again what is cached; `abort` ends them and asks for the rest."""
    sync_check_every: int = operational(20, ge=0)
    """The first sync and every one of that number is verified tensor by tensor; 0 for none."""
    max_staleness: int = Field(0, ge=0)
    """Steps that rollouts may be generated ahead of the trainer."""
    partial_rollout_tokens: int = Field(0, ge=0)
    """Tokens after which a response pauses; it goes on in the next step when enough groups are done. 0 finishes each
    response."""
    partial_rollouts: Literal["mask", "correct"] = "mask"
    """Tokens that older weights sampled: `mask` leaves them out of the loss, `correct` trains them while max_staleness
    allows it."""
    prompts_per_step: int = Field(32, ge=1)
    """Groups that train one step."""
    samples_per_prompt: int = Field(8, ge=1)
    """Responses of a group."""
    over_sampling: int = Field(0, ge=0)
    """Prompts generated for a step; the first prompts_per_step groups that pass the filters, in prompt order, are
    trained. 0 generates just these."""
    curriculum_skip: float = Field(0.0, ge=0, le=0.95)
    """Share of the prompts that were always or never solved last time and are skipped in a later pass."""
    filters: tuple[FilterConfig, ...] = (FilterConfig(name="nonzero_spread"),)
    """Filters that drop whole groups."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest response, in tokens."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 only, because the trainer scores the whole distribution."""
    top_k: int = Field(-1, ge=-1)
    """Top-k sampling; -1 only, because the trainer scores the whole distribution."""
    num_steps: int = Field(100, ge=1)
    """Rounds of rollouts (slime's num_rollout)."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps over one step's rollouts, each on a part of them."""
    epochs_per_step: int = Field(1, ge=1)
    """Passes over one step's rollouts."""
    advantage: AdvantageConfig = AdvantageConfig(name="grpo")
    """The advantage estimator, by name or as package.module:function."""
    critic: CriticConfig = CriticConfig()
    """PPO's critic, for the advantage `gae`."""
    teacher: TeacherConfig = TeacherConfig()
    """The teacher of on-policy distillation, on top of any advantage."""
    policy_loss: PolicyLossConfig = PolicyLossConfig(name="ppo_clip")
    """The policy loss, by name or as package.module:function."""
    aggregation: AggregationConfig = AggregationConfig(name="token")
    """The mean over the loss: by `token`, by `sequence`, or divided by a `constant` (Dr. GRPO)."""
    clip_low: float = Field(0.2, gt=0)
    """Lower clip of ppo_clip, gspo and cispo; the bound is 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clip of ppo_clip, gspo and cispo; the bound is 1 + clip_high."""
    dual_clip: float = Field(0.0, ge=0)
    """Bound of ppo_clip for negative advantages; 0 for none."""
    sapo_positive: float = Field(1.0, gt=0)
    """SAPO's temperature for positive advantages."""
    sapo_negative: float = Field(1.05, gt=0)
    """SAPO's temperature for negative advantages."""
    kl_kind: KLConfig = KLConfig(name="low_var")
    """The estimator of the KL to the reference model."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model; 0 for none, and no reference model."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL counts: in the `loss`, or taken off each `reward`."""
    kl_unbiased: bool = False
    """Whether the KL in the loss has its unbiased gradient."""
    reference_every: int = Field(0, ge=0)
    """Updates after which the current weights become the reference; 0 for never."""
    correction: CorrectionConfig = CorrectionConfig(name="none")
    """Importance correction for rollouts of older weights or of another engine."""
    correction_cap: float = Field(2.0, gt=0)
    """Upper bound of the correction's ratio."""
    correction_floor: float = Field(0.0, ge=0)
    """Lower bound of the ratio, for icepop and mis."""
    opsm_limit: float = Field(0.0, ge=0)
    """Off-policy sequence masking: largest mean of sampler less trainer log-probability, in nats a token, of a response
    with a negative advantage; 0 for none."""
    overlong_buffer: int = Field(0, ge=0)
    """Last tokens before max_new_tokens over which the length penalty grows; 0 for no penalty."""
    overlong_penalty: float = Field(1.0, gt=0)
    """The largest length penalty."""
    learning_rate: float = Field(1e-6, gt=0)
    """AdamW's learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """AdamW's decoupled weight decay."""
    warmup_steps: int = Field(0, ge=0)
    """Updates over which the learning rate rises from 0."""
    gradient_clipping: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 for no clipping."""
    gradient_limit: float = Field(0.0, ge=0)
    """Gradient norm before clipping above which a gradient counts as bad; 0 for no limit."""
    bad_gradient: Literal["stop", "skip"] = "stop"
    """What a bad or non-finite gradient does: `stop` ends the stage, `skip` leaves the update out."""
    lora_rank: int = Field(0, ge=0)
    """Rank of LoRA adapters on every matrix of the layers; 0 trains all weights."""
    lora_alpha: float = Field(32.0, gt=0)
    """LoRA's scale, divided by the rank."""
    precision: Precision | Auto = "auto"
    """Number format of the trainer's weights and products; `auto` as in the supervised stages."""
    zero_stage: Literal[1, 2, 3] = 3
    """DeepSpeed's ZeRO stage."""
    micro_batch_tokens: int = Field(9216, ge=16)
    """Tokens that one rank holds at once, or sequence_parallel ranks together."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that share each row (Ulysses)."""
    activation_checkpointing: bool = False
    """Whether activations are computed again in the backward pass instead of kept."""
    compile: bool = operational(False)
    """Whether torch.compile compiles the layers."""
    eval_every: int = Field(20, ge=1)
    """Steps between evaluations on held-out prompts."""
    eval_prompts: int = Field(128, ge=0)
    """Held-out prompts of an evaluation; 0 for none."""
    reward_timeout_s: float = Field(10.0, gt=0)
    """Seconds that a reward may take for one response."""
    most_failed_rewards: float = operational(0.25, ge=0, le=1)
    """Share of the rewards of a step, or of an evaluation, that may fail: raise, take too long, end their process.
    Above it the stage stops; below it these samples are left out."""
    reward_processes: int = operational(1, ge=1)
    """Processes that compute rewards."""
    checkpoint_every: int = operational(20, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = operational(2, ge=1)
    """Newest checkpoints that are kept while the stage runs."""

    @field_validator("reward", mode="before")
    @classmethod
    def _one_or_names_with_weights(cls, value: Any) -> Any:
        if isinstance(value, dict) and "name" not in value:
            return tuple({"name": name, "weight": weight} for name, weight in value.items())
        return (value,) if isinstance(value, str | dict | RewardConfig) else value

    @model_validator(mode="after")
    def _combination(self) -> "RLStage":
        if self.over_sampling and self.over_sampling < self.prompts_per_step:
            raise ValueError(
                f"over_sampling {self.over_sampling} is below prompts_per_step {self.prompts_per_step}; "
                "raise it, or set it to 0 to generate just what is trained"
            )
        if self.top_p < 1 or self.top_k > 0:
            raise ValueError(
                f"top_p {self.top_p} and top_k {self.top_k} sample from a truncated distribution that the trainer does "
                "not score; use top_p: 1.0 and top_k: -1"
            )
        if self.sampler.context <= self.max_new_tokens:
            raise ValueError(
                f"sampler.context {self.sampler.context} leaves no room for a prompt beside max_new_tokens "
                f"{self.max_new_tokens}; raise the one or lower the other"
            )
        if self.micro_batch_tokens < self.sampler.context:
            raise ValueError(
                f"micro_batch_tokens {self.micro_batch_tokens} cannot hold one rollout of sampler.context "
                f"{self.sampler.context} tokens; raise the one or lower the other"
            )
        if self.sync_mode != "finish":
            self._check_midway()
        if self.sync == "distributed" and self.lora_rank:
            raise ValueError(
                f"sync: distributed with lora_rank {self.lora_rank}: adapters are merged where weights are written, "
                "not yet where they are broadcast; use sync: disk"
            )
        if self.sync_check_every and self.sampler.tensor_parallel > 1:
            raise ValueError(
                f"sync_check_every {self.sync_check_every}: weights cannot be verified yet where they are split over "
                f"GPUs (sampler.tensor_parallel {self.sampler.tensor_parallel}); set it to 0"
            )
        self.check_resources()
        self.resources.check_offload(zero_stage=self.zero_stage, optimizer="adamw")
        if self.curriculum_skip and self.samples_per_prompt == 1:
            raise ValueError(
                f"curriculum_skip {self.curriculum_skip} compares a prompt's samples, and samples_per_prompt is 1; "
                "raise the latter"
            )
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"updates_per_step {self.updates_per_step} is above prompts_per_step {self.prompts_per_step}; "
                "each update trains at least one prompt's group"
            )
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip} must be above 1 (usually 3), or 0 for none")
        self._check_off_policy()
        self._check_unused()
        if self.partial_rollout_tokens and not self.over_sampling:
            raise ValueError(
                f"partial_rollout_tokens {self.partial_rollout_tokens} needs over_sampling: the groups that are under "
                f"way at once, more than prompts_per_step {self.prompts_per_step}"
            )
        if self.partial_rollout_tokens and not self.generate.is_one_turn:
            raise ValueError(
                f"partial_rollout_tokens {self.partial_rollout_tokens} cuts one turn into segments, and generate "
                f"{self.generate.name} has turns of its own; leave one of them out"
            )
        if self.partial_rollouts == "correct" and not (self.partial_rollout_tokens and self.max_staleness):
            raise ValueError(
                f"partial_rollouts: correct trains tokens of earlier steps: it needs partial_rollout_tokens (found "
                f"{self.partial_rollout_tokens}) and max_staleness (found {self.max_staleness}) above 0"
            )
        self._check_reward()
        self._check_critic()
        return self

    def _check_critic(self) -> None:
        for label, model in (("critic", self.critic.model), ("teacher", self.teacher.model)):
            if (model == "input") != (label in self.inputs):
                way = f"name a stage as inputs.{label}" if model == "input" else f"set {label}.model to input"
                found = listed(self.inputs)
                raise ValueError(f"{label}.model {model!r} and inputs ({found}) do not fit together; {way}")
        if self.teacher.url != "none" and self.temperature != 1.0:
            raise ValueError(
                f"teacher.url with temperature {self.temperature}: servers score a prompt at temperature 1; set it to "
                "1.0, or use teacher.model"
            )
        traits = self.advantage.traits
        if traits is not None and traits.needs_critic:
            if self.critic.warmup_steps >= self.num_steps:
                raise ValueError(
                    f"critic.warmup_steps {self.critic.warmup_steps} leaves the policy untrained in all num_steps "
                    f"{self.num_steps}; lower it"
                )
            is_updated_once = self.updates_per_step * self.critic.epochs == 1
            if is_updated_once and self.critic.value_clip != CriticConfig.model_fields["value_clip"].default:
                raise ValueError(
                    f"critic.value_clip {self.critic.value_clip} bounds nothing while a step updates the critic once; "
                    "raise critic.epochs or updates_per_step, or leave it out"
                )
        elif self.critic != CriticConfig():
            raise ValueError(f"critic means nothing to advantage {self.advantage.name}; leave it out, or use gae")
        if self.samples_per_prompt == 1 and self.generate.is_one_turn:
            if traits is not None and traits.compares_groups:
                raise ValueError(
                    f"samples_per_prompt 1 leaves advantage {self.advantage.name} nothing to compare; raise it, or use "
                    "gae or reinforce_pp"
                )
            if any(one.name == "nonzero_spread" for one in self.filters):
                raise ValueError(
                    "samples_per_prompt 1: the filter nonzero_spread drops every group of one; set filters to []"
                )

    def _check_unused(self) -> None:
        """Refuse values, other than the defaults, that nothing would look at. What a function of one's own looks at is
        seen when it is loaded."""
        rules = [
            (set() if self.kl_coefficient else {"kl_kind", "kl_unbiased"}, "kl_coefficient 0"),
            (set() if self.overlong_buffer else {"overlong_penalty"}, "overlong_buffer 0"),
            (set() if self.lora_rank else {"lora_alpha"}, "lora_rank 0"),
            (set() if self.sync != "disk" else {"sync_bucket_bytes", "sync_timeout_s"}, "sync: disk"),
        ]
        for label in ("policy_loss", "correction"):
            chosen: EntryConfig = getattr(self, label)
            if (traits := chosen.traits) is not None:
                unseen = {name for option, name in chosen.settings.items() if option not in traits.options}
                rules.append((unseen, f"{label} {chosen.name}"))
        for names, why in rules:
            for name in sorted(names):
                if (found := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} {found} means nothing with {why}; leave it out, or change the latter")

    def load(self, chosen: EntryConfig) -> Callable[..., Any]:
        """A function with its options and the settings that it takes. Raises ConfigError for one of the user's own that
        does not name a setting other than the default."""
        options = dict(chosen.options)
        taken = registry.options_taken(chosen.kind, chosen.name)
        for option, name in sorted(chosen.settings.items()):
            value, default = self._setting(name)
            if taken is None or option in taken:
                options[option] = value
            elif value != default:
                raise ConfigError(f"{chosen.kind} {chosen.name} does not name {option} {value}; leave {name} out.")
        return registry.load(chosen.kind, chosen.name, options)

    def _setting(self, name: str) -> tuple[Any, Any]:
        """Value and default of a setting, `critic.gamma` being the critic's."""
        *parts, last = name.split(".")
        owner = reduce(getattr, parts, self)
        return getattr(owner, last), type(owner).model_fields[last].default

    def _check_midway(self) -> None:
        """Of weights that come while rollouts are under way."""
        if self.sampler.deterministic or not self.max_staleness:
            raise ValueError(
                f"sync_mode {self.sync_mode} is for weights that come while rollouts are under way: it needs "
                f"max_staleness above 0 (found {self.max_staleness}) and sampler.deterministic: false (found "
                f"{str(self.sampler.deterministic).lower()}); use finish"
            )
        if self.partial_rollout_tokens and (self.partial_rollouts == "mask" or self.max_staleness < 2):
            raise ValueError(
                f"sync_mode {self.sync_mode} with partial_rollout_tokens {self.partial_rollout_tokens} needs "
                f"partial_rollouts: correct (found {self.partial_rollouts}; mask would leave out whatever the newest "
                f"weights did not sample) and max_staleness 2 at least (found {self.max_staleness}); use finish"
            )

    def check_resources(self) -> None:
        """Raise ValueError for what the stage's resources cannot do; asked again when none of them is `auto`."""
        ranks = self.resources.num_ranks
        if ranks != "auto" and ranks % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel {self.sequence_parallel} ranks share each row, and num_ranks {ranks} is not a "
                "multiple of it; change one of them"
            )
        if self.sync == "distributed" and self.resources.device == "cuda":
            raise ValueError(
                "sync: distributed on a GPU: trainer and sampler share one, which NCCL refuses, and nothing else has "
                "been tried; use sync: disk"
            )
        if self.sampler.engine == "sglang" and self.sync_check_every and self.resources.device == "cuda":
            raise ValueError(
                f"sync_check_every {self.sync_check_every}: SGLang fingerprints weights in another way on a GPU, which "
                "is not verified yet; set it to 0. The difference of log-probabilities is still looked at in each step"
            )

    def _check_reward(self) -> None:
        if not self.reward or not all(one.weight for one in self.reward):
            found = listed(f"{one.name} {one.weight:g}" for one in self.reward)
            raise ValueError(f"reward ({found}) has nothing to add up, or a weight of 0; name rewards with weights")
        names = [one.name for one in self.reward]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"reward {twice[0]} stands twice; name it once, with the sum of the weights")
        for one in self.reward:
            traits = one.traits
            if traits is not None and traits.scores_steps:
                self._check_process_reward(one)
            if traits is not None and self.reward_timeout_s < traits.least_timeout_s:
                raise ValueError(
                    f"reward_timeout_s {self.reward_timeout_s:g} is below {traits.least_timeout_s:g}, what the reward "
                    f"{one.name} takes, so a program that hangs would fail instead of being wrong; raise it"
                )

    @property
    def has_process_reward(self) -> bool:
        """Whether the reward scores single steps of a response."""
        return any(one.traits is not None and one.traits.scores_steps for one in self.reward)

    def _check_process_reward(self, reward: RewardConfig) -> None:
        if len(self.reward) > 1 or reward.weight != 1.0:
            raise ValueError(
                f"reward {reward.name} scores steps, which cannot be added to other rewards; name it alone, without a "
                "weight, and let it score what the others would as steps"
            )
        traits = self.advantage.traits
        if traits is None or not traits.takes_steps:
            fitting = [name for name, one in registry.entries_of("advantage").items() if one.takes_steps]
            raise ValueError(
                f"advantage {self.advantage.name} is of whole responses, and the reward {reward.name} scores their "
                f"steps; use {' or '.join(fitting)}"
            )
        if self.overlong_buffer:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} takes off a response's reward, and with {reward.name} its "
                "steps are trained; set it to 0, and let the function score the length as a step"
            )
        if self.kl_in == "reward" and not traits.needs_critic:
            raise ValueError(
                f"kl_in: reward takes a sum off a response's reward, and with {reward.name} its steps are trained; use "
                "kl_in: loss, or advantage gae"
            )

    def _check_off_policy(self) -> None:
        if self.kl_in == "reward" and not self.kl_coefficient:
            raise ValueError("kl_in: reward takes nothing off while kl_coefficient is 0; raise it, or leave kl_in out")
        if self.reference_every and not self.kl_coefficient:
            raise ValueError("reference_every refreshes nothing while kl_coefficient is 0; raise it, or leave it out")
        if self.kl_in == "reward" and self.kl_unbiased:
            raise ValueError("kl_unbiased mends the gradient of a KL in the loss; kl_in: reward needs no mending")
        if self.correction_floor >= self.correction_cap:
            raise ValueError(
                f"correction_floor {self.correction_floor} is not below correction_cap {self.correction_cap}"
            )
        if self.overlong_buffer > self.max_new_tokens:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} is above max_new_tokens {self.max_new_tokens}; lower it"
            )
