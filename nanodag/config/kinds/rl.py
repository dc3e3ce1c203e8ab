"""Reinforcement learning."""

from typing import Literal

from pydantic import Field, model_validator

from nanodag import registry as entries
from nanodag.config.rl_parts import CriticConfig, FilterConfig, GenerateConfig, SamplerConfig, TeacherConfig
from nanodag.config.section import Auto, Precision, Share, later, operational
from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig
from nanodag.errors.words import listed, said

# Advantages that compare the samples of a prompt with one another.
BY_GROUP = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")


BY_STEP = ("grpo", "gae")  # advantages that are defined where a reward scores the steps of a response


CODE_REWARD_S = 7.0  # nanodag.rewards.code gives up after 6


LOSS_SETTINGS = {"clip_low", "clip_high", "dual_clip", "sapo_positive", "sapo_negative"}


LOSS_OPTIONS: dict[str, set[str]] = {
    "ppo_clip": {"clip_low", "clip_high", "dual_clip"},
    "gspo": {"clip_low", "clip_high"},
    "cispo": {"clip_low", "clip_high"},
    "sapo": {"sapo_positive", "sapo_negative"},
    "reinforce": set(),
}


class RLStage(StageBase):
    """GRPO and its relatives. Input: `model`.

    data: prompts. prompts_per_step x samples_per_prompt rollouts train one step; over_sampling prompts are generated
    and the first that pass the filters, in prompt order, are kept. num_steps: rounds of rollouts (slime's
    `num_rollout`). updates_per_step: optimizer steps over one step's rollouts, each on a part of them; epochs_per_step:
    passes over all of them. bad_gradient: `stop` or `skip` at a gradient that is not finite, or whose norm before
    clipping is above gradient_limit, 0 for any.
    max_staleness: how many steps ahead of the trainer rollouts may be generated (nanodag.rl.control.schedule).
    partial_rollout_tokens: responses are written in segments of so many tokens; when a step has enough groups of those
    under way, over_sampling of them, the others go on in the next; 0 to finish each. partial_rollouts: tokens
    that older weights sampled than the newest of their step's rollouts are masked, whatever max_staleness is, or
    trained while it allows that, with rollouts then generated one step less ahead.
    curriculum_skip: share of the prompts that were always or never solved when they were tried last, and are passed
    over in a later pass.
    generate: how a response comes about, one turn of the sampler or a function (nanodag.rl.rollouts.turns).
    micro_batch_tokens: what one rank holds at once, or sequence_parallel ranks together, which share each row
    (nanodag.rl.trainer.sequence_parallel). placement: `shared` puts trainer and sampler on the same devices.
    sync: how weights reach the samplers; `disk`: safetensors, in memory where there is room; `distributed`: the
    trainer's rank 0 broadcasts them in a process group, sync_bucket_bytes at once, each within sync_timeout_s.
    sync_mode: of requests in flight: `finish`, they are waited for, so batches have one version; `in_place`,
    they continue with the new weights; `retract`, and are computed again up to there; `abort`, they end, and each
    is continued by a new request. sync_check_every: the first sync and
    every one of that number is verified tensor by tensor, 0 for none.
    reward, advantage, policy_loss: names of nanodag.registry, or functions of one's own as package.module:function;
    reward `auto` is what each prompt says; names with weights are summed; `process:` scores steps, with grpo and gae.
    max_failed_rewards: share of the rewards of a step, or of an evaluation, that may fail: raise, take too long, end
    their process. Above it the stage ends; below it these samples are left out, and above 1 % the log says so.
    critic: of the advantage gae. teacher: of on-policy distillation, on top of any advantage.
    clip_low, clip_high: of ppo_clip, gspo and cispo, whose bounds are 1 - clip_low and 1 + clip_high. dual_clip: of
    ppo_clip, 0 for none. sapo_positive, sapo_negative: sapo's temperatures. kl_in: KL in the loss, or its sum taken off
    each reward (with gae, each token's off its own); kl_unbiased: KL in the loss with its true gradient.
    reference_every: updates after which the current weights become the reference of the KL, 0 for never.
    correction_floor: of icepop and mis. opsm_limit: off-policy sequence masking, nats a token, 0 for none.
    overlong_buffer: the last tokens before max_new_tokens, over which up to overlong_penalty is taken off, 0 for none.
    lora_rank, lora_alpha: adapters on every matrix of the layers instead of training all weights (nanodag.model.lora);
    rank 0 for none. compile: compile the layers, as the supervised stages do.
    """

    kind: Literal["rl"]
    data: tuple[SourceConfig, ...] = Field(min_length=1)
    validation: tuple[SourceConfig, ...] = ()
    reward: str | dict[str, float] = "auto"
    generate: GenerateConfig = later(GenerateConfig())
    sampler: SamplerConfig = SamplerConfig()
    placement: Literal["shared"] = "shared"
    sync: Literal["disk", "distributed"] = operational("disk")
    sync_bucket_bytes: int = operational(64 << 20, ge=1)
    sync_timeout_s: float = operational(60.0, gt=0)
    sync_mode: Literal["finish", "abort", "retract", "in_place"] = "finish"
    sync_check_every: int = operational(20, ge=0)
    max_staleness: int = Field(0, ge=0)
    partial_rollout_tokens: int = Field(0, ge=0)
    partial_rollouts: Literal["mask", "correct"] = "mask"
    prompts_per_step: int = Field(32, ge=1)
    samples_per_prompt: int = Field(8, ge=1)
    over_sampling: int = Field(0, ge=0)
    curriculum_skip: float = later(0.0, ge=0, le=0.95)
    filters: tuple[FilterConfig, ...] = (FilterConfig(name="nonzero_spread"),)
    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    num_steps: int = Field(100, ge=1)
    updates_per_step: int = Field(1, ge=1)
    epochs_per_step: int = later(1, ge=1)
    advantage: str = "grpo"
    critic: CriticConfig = later(CriticConfig())
    teacher: TeacherConfig = later(TeacherConfig())
    policy_loss: str = "ppo_clip"
    aggregation: Literal["token", "sequence", "constant"] = "token"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float = Field(0.0, ge=0)
    sapo_positive: float = Field(1.0, gt=0)
    sapo_negative: float = Field(1.05, gt=0)
    kl_kind: Literal["k1", "k2", "k3", "low_var"] = "low_var"
    kl_coefficient: float = Field(0.0, ge=0)
    entropy_coefficient: float = Field(0.0, ge=0)
    kl_in: Literal["loss", "reward"] = "loss"
    kl_unbiased: bool = False
    reference_every: int = Field(0, ge=0)
    correction: Literal["none", "tis", "tis_sequence", "icepop", "mis"] = "none"
    correction_cap: float = Field(2.0, gt=0)
    correction_floor: float = Field(0.0, ge=0)
    opsm_limit: float = Field(0.0, ge=0)
    overlong_buffer: int = Field(0, ge=0)
    overlong_penalty: float = Field(1.0, gt=0)
    learning_rate: float = Field(1e-6, gt=0)
    betas: tuple[Share, Share] = (0.9, 0.98)
    weight_decay: float = Field(0.1, ge=0)
    warmup_steps: int = Field(0, ge=0)
    gradient_clipping: float = Field(1.0, ge=0)
    gradient_limit: float = later(0.0, ge=0)
    bad_gradient: Literal["stop", "skip"] = later("stop")
    lora_rank: int = later(0, ge=0)
    lora_alpha: float = later(32.0, gt=0)
    precision: Precision | Auto = "auto"
    zero_stage: Literal[1, 2, 3] = 3
    micro_batch_tokens: int = Field(9216, ge=16)
    sequence_parallel: int = later(1, ge=1)
    activation_checkpointing: bool = False
    compile: bool = operational(False)
    eval_every: int = Field(20, ge=1)
    eval_prompts: int = Field(128, ge=0)
    reward_timeout_s: float = Field(10.0, gt=0)
    max_failed_rewards: float = operational(0.25, ge=0, le=1)
    reward_processes: int = operational(1, ge=1)
    checkpoint_every: int = operational(20, ge=1)
    keep_checkpoints: int = operational(2, ge=1)

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
            self._check_in_flight()
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
        for kind, name in (("advantage", self.advantage), ("policy_loss", self.policy_loss)):
            entries.import_path(kind, name)
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
        if self.advantage == "gae":
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
            raise ValueError(f"critic means nothing to advantage {self.advantage}; leave it out, or use gae")
        if self.samples_per_prompt == 1 and self.generate.is_one_turn:
            if self.advantage in BY_GROUP:
                raise ValueError(
                    f"samples_per_prompt 1 leaves advantage {self.advantage} nothing to compare; raise it, or use gae "
                    "or reinforce_pp"
                )
            if any(one.name == "nonzero_spread" for one in self.filters):
                raise ValueError(
                    "samples_per_prompt 1: the filter nonzero_spread drops every group of one; set filters to []"
                )

    def _check_unused(self) -> None:
        """Refuse values, other than the defaults, that nothing would look at. What a loss of one's own looks at is seen
        when it is loaded (nanodag.rl.trainer.update)."""
        named = LOSS_OPTIONS.get(self.policy_loss, LOSS_SETTINGS)
        rules = [
            (LOSS_SETTINGS - named, f"policy_loss {self.policy_loss}"),
            (set() if self.kl_coefficient else {"kl_kind", "kl_unbiased"}, "kl_coefficient 0"),
            (set() if self.correction != "none" else {"correction_cap"}, "correction none"),
            (set() if self.overlong_buffer else {"overlong_penalty"}, "overlong_buffer 0"),
            (set() if self.lora_rank else {"lora_alpha"}, "lora_rank 0"),
            (set() if self.sync != "disk" else {"sync_bucket_bytes", "sync_timeout_s"}, "sync: disk"),
        ]
        for names, why in rules:
            for name in sorted(names):
                if (found := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} {found} means nothing with {why}; leave it out, or change the latter")

    def _check_in_flight(self) -> None:
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
        weights = {self.reward: 1.0} if isinstance(self.reward, str) else self.reward
        if not weights or not all(weights.values()):
            found = self.reward if isinstance(self.reward, str) else said(self.reward)
            raise ValueError(f"reward {found} has nothing to add up, or a weight of 0; name rewards with weights")
        for name in weights:
            if name != "auto":
                entries.import_path("reward", name)
        self._check_process_reward()
        if "code" in weights and self.reward_timeout_s < CODE_REWARD_S:
            raise ValueError(
                f"reward_timeout_s {self.reward_timeout_s:g} is below {CODE_REWARD_S:g}, what the reward code takes, "
                "so a program that hangs would fail instead of being wrong; raise it"
            )

    @property
    def has_process_reward(self) -> bool:
        """Whether the reward scores single steps of a response."""
        return isinstance(self.reward, str) and self.reward.startswith("process:")

    def _check_process_reward(self) -> None:
        if isinstance(self.reward, dict) and (found := [name for name in self.reward if name.startswith("process:")]):
            raise ValueError(
                f"reward {found[0]} scores steps, which cannot be added to other rewards; name it alone, without a "
                "weight, and let it score what the others would as steps"
            )
        if not self.has_process_reward:
            return
        if self.advantage not in BY_STEP:
            raise ValueError(
                f"advantage {self.advantage} is of whole responses, and the reward {self.reward} scores their steps; "
                f"use {' or '.join(BY_STEP)}"
            )
        if self.overlong_buffer:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} takes off a response's reward, and with {self.reward} its "
                "steps are trained; set it to 0, and let the function score the length as a step"
            )
        if self.kl_in == "reward" and self.advantage == "grpo":
            raise ValueError(
                f"kl_in: reward takes a sum off a response's reward, and with {self.reward} its steps are trained; use "
                "kl_in: loss, or advantage gae"
            )

    def _check_off_policy(self) -> None:
        if self.kl_in == "reward" and not self.kl_coefficient:
            raise ValueError("kl_in: reward takes nothing off while kl_coefficient is 0; raise it, or leave kl_in out")
        if self.reference_every and not self.kl_coefficient:
            raise ValueError("reference_every refreshes nothing while kl_coefficient is 0; raise it, or leave it out")
        if self.kl_in == "reward" and self.kl_unbiased:
            raise ValueError("kl_unbiased mends the gradient of a KL in the loss; kl_in: reward needs no mending")
        if self.correction_floor and self.correction not in ("icepop", "mis"):
            raise ValueError(
                f"correction_floor {self.correction_floor} means nothing to correction {self.correction}; use icepop "
                "or mis, or leave it out"
            )
        if self.correction_floor >= self.correction_cap:
            raise ValueError(
                f"correction_floor {self.correction_floor} is not below correction_cap {self.correction_cap}"
            )
        if self.overlong_buffer > self.max_new_tokens:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} is above max_new_tokens {self.max_new_tokens}; lower it"
            )
