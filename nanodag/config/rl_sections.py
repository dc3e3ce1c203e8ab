"""The sections of an RL stage: what a person would look for together."""

from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import Field

from nanodag import registry
from nanodag.config import rl_parts as parts
from nanodag.config.kinds.evaluation import BenchmarkConfig, different_names
from nanodag.config.section import WHOLE, Auto, Natural, Positive, Precision, Seconds, Share, StageSection, operational
from nanodag.data.config import SourceConfig
from nanodag.errors import ConfigError

HELD_OUT = "eval_reward"
"""What the evaluation on held-out prompts is called where benchmarks are called by their names."""
SAMPLERS = "samplers"
"""The source of rollouts that are generated."""


class SamplingSection(StageSection):
    """Responses: how many are generated, which are kept, and what is taken off their rewards."""

    prompts_per_step: int = Field(32, ge=1, le=100_000_000)
    """Groups that train one step."""
    samples_per_prompt: int = Field(8, ge=1, le=1_000_000)
    """Responses of a group."""
    over_sampling: int = Field(0, ge=0, le=100_000_000)
    """Prompts generated for a step; the first prompts_per_step groups that pass the filters, in prompt order, are
    trained. 0 generates just these."""
    filters: tuple[parts.FilterConfig, ...] = (parts.FilterConfig(name="nonzero_spread"),)
    """Filters that drop whole groups."""
    curriculum_skip: float = Field(0.0, ge=0, le=0.95)
    """Share of the prompts that were always or never solved last time and are skipped in a later pass."""
    max_new_tokens: int = Field(256, ge=1, le=100_000_000)
    """Longest response, in tokens."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    """Texts that end a turn, beside the chat format's own end. The token that completes one is its last, and all that
    was sampled is trained and seen by the reward. Special tokens are no text: name them in stop_token_ids."""
    stop_token_ids: tuple[Natural, ...] = ()
    """Token ids that end a turn, beside the chat format's own. The reward does not see such a token."""
    template_options: dict[str, bool | int | float | str] = {}
    """Switches of the model's chat template, such as {enable_thinking: false}, for all prompts; a source's own
    template_options come first."""
    temperature: float = Field(1.0, ge=1e-3, le=10)
    """Sampling temperature. There is no top-p or top-k: the trainer scores the whole distribution."""
    overlong_buffer: int = Field(0, ge=0)
    """Last tokens before max_new_tokens over which the length penalty grows; 0 for no penalty."""
    overlong_penalty: float = Field(1.0, gt=0, le=100)
    """The largest length penalty."""
    reward_timeout_s: Seconds = 10.0
    """Seconds that a reward may take for one response."""
    reward_processes: int = operational(1, ge=1, le=1024)
    """Processes that compute rewards."""
    max_failed_rewards: float = operational(0.25, ge=0, le=1)
    """Share of the rewards of a step, or of an evaluation, that may fail: raise, take too long, end their process; and
    of the samples whose function, environment or agent does. Above it the stage stops; below it they are left out."""


class RolloutSection(SamplingSection):
    """Source and age of the rollouts that are trained."""

    generate: parts.GenerateConfig = parts.GenerateConfig()
    """How a response is made: one turn of the sampler, or turns and tools."""
    source: str = Field(SAMPLERS, pattern="^(samplers|file:/.+)$")
    """Where the rollouts that are trained come from: the `samplers`, or `file:PATH`, JSON lines that exist. A stage's
    records and `nanodag rollouts --export` have such lines. PATH is a file, a pattern as `/runs/*/rollouts.jsonl`, or
    the folder `rollouts` of a stage's records, whose steps are trained as they were. With files, samplers serve
    evaluations alone, and settings of generation mean nothing."""
    clone: parts.CloneConfig = parts.CloneConfig()
    """Imitation of the best answers in the files of `source`."""
    order: Literal["prompt", "arrival"] | Auto = "auto"
    """Which groups a step trains. `prompt`: the next ones in the data, which each run repeats. `arrival`: the first
    that are done and pass, while others stay in flight; none waits longer than max_staleness steps, and none is dropped
    for being slow. `auto`: `arrival` where sync_mode leaves requests in flight, without over_sampling and
    partial_rollout_tokens; else `prompt`."""
    partial_rollout_tokens: int = Field(0, ge=0)
    """Tokens after which a response pauses; it goes on in the next step when enough groups are done. 0 finishes each
    response."""
    partial_rollouts: Literal["mask", "correct"] = "mask"
    """Tokens that older weights sampled: `mask` leaves them out of the loss, `correct` trains them while max_staleness
    allows it."""
    max_staleness: int = Field(0, ge=0, le=100_000_000)
    """Steps that rollouts may be generated ahead of the trainer."""
    router_replay: bool = parts.later(False)
    """Whether the trainer routes tokens to the experts that the sampler chose, in a mixture of experts."""

    @property
    def is_sampled(self) -> bool:
        """True where the rollouts that are trained are generated."""
        return self.source == SAMPLERS


class AlgorithmSection(StageSection):
    """Advantages and the loss."""

    advantage: parts.AdvantageConfig = parts.AdvantageConfig(name="grpo")
    """The advantage estimator, by name or as package.module:function."""
    policy_loss: parts.PolicyLossConfig = parts.PolicyLossConfig(name="ppo_clip")
    """The policy loss, by name or as package.module:function."""
    aggregation: parts.AggregationConfig = parts.AggregationConfig(name="token")
    """The mean over the loss: by `token`, by `sequence`, or divided by a `constant` (Dr. GRPO)."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Lower clip of ppo_clip, gspo and cispo; the bound is 1 - clip_low. No effect while updates_per_step and
    epochs_per_step are both 1, as the ratio is then exactly 1."""
    clip_high: float = Field(0.2, gt=0, le=100)
    """Upper clip of ppo_clip, gspo and cispo; the bound is 1 + clip_high. No effect while updates_per_step and
    epochs_per_step are both 1, as the ratio is then exactly 1."""
    dual_clip: float = Field(0.0, ge=0, le=1000)
    """Bound of ppo_clip for negative advantages; 0 for none. No effect while updates_per_step and epochs_per_step are
    both 1, as the ratio is then exactly 1."""
    sapo_positive: float = Field(1.0, gt=0, le=1000)
    """SAPO's temperature for positive advantages."""
    sapo_negative: float = Field(1.05, gt=0, le=1000)
    """SAPO's temperature for negative advantages."""
    kl_kind: parts.KLConfig = parts.KLConfig(name="low_var")
    """The estimator of the KL to the reference model."""
    kl_coefficient: float = Field(0.0, ge=0, le=100)
    """Weight of the KL to the reference model; 0 for none, and no reference model unless kl_metric is true."""
    kl_metric: bool = False
    """Whether the KL is computed and logged at kl_coefficient 0 too. The ranks then hold a reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL counts: in the `loss`, or taken off each `reward`."""
    kl_unbiased: bool = False
    """Whether the KL in the loss has its unbiased gradient."""
    reference: parts.ReferenceConfig = parts.ReferenceConfig()
    """The model that the KL is measured from."""
    reference_every: int = Field(0, ge=0)
    """Updates after which the current weights become the reference; 0 for never."""
    entropy_coefficient: float = Field(0.0, ge=0, le=100)
    """Weight of the entropy bonus."""
    correction: parts.CorrectionConfig = parts.CorrectionConfig(name="none")
    """Importance correction for rollouts of older weights or of another engine."""
    correction_cap: float = Field(2.0, gt=0, le=1000)
    """Upper bound of the correction's ratio."""
    correction_floor: float = Field(0.0, ge=0)
    """Lower bound of the correction's ratio: tis and tis_sequence raise a smaller one to it, others leave it out."""
    correction_veto: float = Field(0.0, ge=0, lt=1)
    """Ratio of old to sampler probability below which one token leaves its whole response out, whatever the correction;
    0 for none. Usually 1e-4."""
    opsm_limit: float = Field(0.0, ge=0, le=1000)
    """Off-policy sequence masking: largest mean of sampler less trainer log-probability, in nats a token, of a response
    with a negative advantage; 0 for none."""
    critic: parts.CriticConfig = parts.CriticConfig()
    """PPO's critic, for the advantage `gae`."""
    teacher: parts.TeacherConfig = parts.TeacherConfig()
    """The teacher of on-policy distillation, on top of any advantage."""

    @property
    def has_reference(self) -> bool:
        """True where the ranks hold a reference model: under ZeRO-3 a share each, else all of it each."""
        return self.kl_coefficient > 0 or self.kl_metric

    @property
    def has_critic(self) -> bool:
        """True where the advantage asks a critic."""
        traits = self.advantage.traits
        return traits is not None and traits.needs_critic

    def load(self, chosen: parts.EntryConfig) -> Callable[..., Any]:
        """A function with its options and the settings that it takes. Raises ConfigError for one of the user's own that
        does not name a setting other than the default."""
        options = dict(chosen.options)
        taken = registry.options_taken(chosen.kind, chosen.name)
        for option, name in sorted(chosen.settings.items()):
            value = attrgetter(name)(self)
            if taken is None or option in taken:
                options[option] = value
            elif value != attrgetter(name)(AlgorithmSection()):
                raise ConfigError(f"{chosen.kind} {chosen.name} does not name {option} {value}; leave {name} out.")
        return registry.load(chosen.kind, chosen.name, options)


class OptimizerSection(StageSection):
    """The trainer's steps and its number format."""

    learning_rate: float = Field(1e-6, gt=0, le=1)
    """AdamW's learning rate, the peak of its schedule."""
    learning_rate_decay: Literal["none", "linear", "cosine"] = "none"
    """How the rate falls from the warm-up's end to the last step. The critic's rate stays."""
    learning_rate_minimum: float = Field(0.0, ge=0, le=1)
    """The rate that a decay ends at, one step after the last."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0, le=0.1)
    """AdamW's term against division by zero."""
    weight_decay: float = Field(0.1, ge=0, le=10)
    """AdamW's decoupled weight decay."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    gradient_clipping: float = Field(1.0, ge=0, le=1_000_000)
    """Largest global gradient norm; 0 for no clipping."""
    gradient_limit: float = Field(0.0, ge=0)
    """Gradient norm before clipping above which a gradient counts as bad; 0 for no limit."""
    bad_gradient: Literal["stop", "skip"] = "stop"
    """What a bad or non-finite gradient does: `stop` ends the stage, `skip` leaves the update out."""
    updates_per_step: int = Field(1, ge=1, le=100_000_000)
    """Optimizer steps over one step's rollouts, each on a part of them."""
    epochs_per_step: int = Field(1, ge=1, le=1_000_000)
    """Passes over one step's rollouts."""
    lora_rank: int = Field(0, ge=0, le=8192)
    """Rank of LoRA adapters on every matrix of the layers; 0 trains all weights."""
    lora_alpha: float = Field(32.0, gt=0, le=100_000)
    """LoRA's scale, divided by the rank."""
    lora_save: Literal["merged", "adapter"] = parts.later("merged")
    """What the stage leaves: the merged model, or the adapters alone, which are merged where the model is asked for."""
    precision: Precision | Auto = "auto"
    """Number format of the trainer's weights and products; `auto` as in the supervised stages."""
    zero_stage: Annotated[Literal[1, 2, 3], WHOLE] = 3
    """DeepSpeed's ZeRO stage."""
    micro_batch_tokens: Annotated[int, Field(ge=16, le=10**12)] | Auto = "auto"
    """Tokens that one rank holds at once, or sequence_parallel ranks together. `auto`: what fits beside the samplers,
    and a whole rollout at least."""
    sequence_parallel: int = Field(1, ge=1, le=1024)
    """Ranks that share each row (Ulysses)."""
    activation_checkpointing: bool | Auto = "auto"
    """Whether activations are computed again in the backward pass instead of kept; `auto` as in the supervised
    stages."""
    compile: bool | Auto = operational("auto")
    """Whether torch.compile compiles the layers. `auto`: on GPUs, and on CPUs in bf16, as in the supervised stages."""


class WeightsSection(StageSection):
    """New weights' way to the samplers."""

    sync: Literal["disk", "distributed", "ipc"] | Auto = operational("auto")
    """How weights reach the samplers: `disk`, a folder, in memory where there is room; `distributed`, a broadcast from
    rank 0, to samplers on any machine; `ipc`, memory that the trainer shares with samplers of its machine, on GPUs each
    rank with those on its GPU. `auto`: `ipc` on shared GPUs; `distributed` by NCCL to samplers with GPUs of their own;
    else, and on CPUs, `disk`."""
    lora_sync: Literal["merged", "adapter"] = parts.later("merged")
    """What the samplers get of a policy with LoRA: `merged` weights, or the `adapter` alone. Embedded samplers merge it
    onto the model that they were started with; vLLM, and SGLang on GPUs, add it to their products."""
    sync_mode: Literal["finish", "retract", "in_place"] = "finish"
    """What happens to requests in flight when weights change. `finish` waits for them; `in_place` continues them with
    the new weights; `retract` also computes again what is cached."""
    sync_bucket_bytes: int = operational(0, ge=0, le=10**12)
    """Bytes given at once by `distributed` and `ipc`; a larger tensor goes alone. 0: a sixteenth of the model, from
    64 MiB to 1 GiB, as each bucket costs a request to every sampler."""
    sync_address: str = operational("auto", min_length=1)
    """Address or network interface of this machine on which rank 0 listens for samplers, with `distributed`. `auto`:
    loopback, or with samplers on other machines the address from which this machine reaches them."""
    sync_backend: Literal["gloo", "nccl"] = operational("gloo")
    """What carries `distributed`: `gloo`, through host memory, or `nccl`, between GPUs that trainer and samplers do not
    share."""
    sync_timeout_s: Seconds = operational(60.0)
    """Seconds that one bucket may take."""
    sync_check_every: Natural | Auto = operational("auto")
    """The first sync and every one of that number is verified tensor by tensor; 0 for none. `auto`: 20, and 0 where
    weights cannot be verified yet: with SGLang on a GPU, or split over GPUs."""
    mismatch_limit: Annotated[float, Field(gt=0, le=1000)] | Auto = operational("auto")
    """Mean size of old less sampler log-probability, in nats a token, above which a step on fresh rollouts ends the
    stage: the sampler then does not have the weights that it says. `auto`: 0.01 in fp32, 0.3 in bf16."""
    stale_mismatch_limit: float = operational(2.0, gt=0, le=1000)
    """The same for a step with stale rollouts, in which is also what the policy learned since."""


class PolicyBenchmarkConfig(BenchmarkConfig):
    """A benchmark that the policy is asked while it trains: an entry as eval stages have it, with an interval."""

    every: Positive | Auto = "auto"
    """Steps between evaluations on it. `auto`: eval_every."""


class EvaluationSection(StageSection):
    """The policy's own evaluation on held-out prompts and on benchmarks, while it trains."""

    validation: tuple[SourceConfig, ...] = ()
    """Held-out prompts that evaluate the policy."""
    eval_every: int = Field(20, ge=1)
    """Steps between evaluations on held-out prompts."""
    eval_prompts: int = Field(128, ge=0)
    """Held-out prompts of an evaluation; 0 for none."""
    eval_temperature: float = Field(0.0, ge=0, le=10)
    """Sampling temperature of an evaluation; at 0 each token is the likeliest one."""
    eval_samples: int = Field(1, ge=1, le=1_000_000)
    """Answers to each held-out prompt."""
    patience: int = Field(0, ge=0)
    """Evaluations in a row without a better score, by the metric of `keep: best:METRIC`, after which the stage ends and
    leaves the best weights; 0 for never."""
    eval_at_start: bool = True
    """Whether the weights that the stage begins with are evaluated, too."""
    benchmarks: tuple[PolicyBenchmarkConfig, ...] = ()
    """Benchmarks that are asked as a chat and answered in writing, each with its own sampling and interval. Here `auto`
    as max_new_tokens is that of rollouts. Items that do not fit into sampler.context count as wrong, as `too_long`."""

    def check_settings(self) -> None:
        if HELD_OUT in different_names(self.benchmarks):
            raise ValueError(f"{HELD_OUT} is the reward on held-out prompts; give the benchmark another name")
        if core := [benchmark.name for benchmark in self.benchmarks if benchmark.is_core]:
            raise ValueError(f"benchmark {core[0]!r} is scored by likelihood; only an eval stage can ask it")

    def is_time(self, name: str, step: int, *, num_steps: int) -> bool:
        """True where the weights of a step are evaluated on a benchmark, or on the held-out prompts."""
        own = {benchmark.name: int(benchmark.every) for benchmark in self.benchmarks if benchmark.every != "auto"}
        return self.eval_at_start if step == 0 else step % own.get(name, self.eval_every) == 0 or step == num_steps
