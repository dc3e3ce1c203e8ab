"""What pipeline.yaml may say: one frozen class a stage kind, refused when a key is unknown.

Fields marked `operational` change how a stage is carried out, never what comes out; they are left out of its key.
`"auto"` is replaced by a derived number before anything starts (nanodag.config.resolve), so a worker never sees it.
"""

import math
import re
from ipaddress import ip_address
from socket import inet_aton
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nanodag import registry as entries
from nanodag.config.nightly import NightlyConfig
from nanodag.data.config import SourceConfig
from nanodag.errors.words import listed, nearest, said
from nanodag.inference.sglang_options import OWN_OPTIONS, ROUTERS_OWN_OPTIONS, check_options

# A constraint stands inside its branch: on the union it would be applied to "auto" too.
Auto = Literal["auto"]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["fp32", "bf16"]


def later(default: Any, **constraints: Any) -> Any:
    """A field that came later: at its default it stays out of a stage's key, so that older artifacts are found."""
    return Field(default, json_schema_extra={"later": True}, **constraints)


def operational(default: Any, **constraints: Any) -> Any:
    """A field that does not change a stage's result."""
    return Field(default, json_schema_extra={"operational": True}, **constraints)


class Section(BaseModel):
    """Base of every part of the config: frozen, keyword only, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Resources(Section):
    """Where a stage runs. num_ranks: processes, one a GPU, on all nodes together; threads: CPU threads a process.
    nodes: machines, this one and others of cluster.hostfile. gpus_per_node: num_ranks by node, 0 for not said.
    work_pool: Prefect's, whose worker carries the stage out; `none` for the machine of the run's flow.
    offload_optimizer: master weights and optimizer state stay in the host's memory, and are updated there (DeepSpeed's
    ZeRO-Offload); offload_param: weights at rest, too."""

    num_ranks: Positive | Auto = "auto"
    threads: Positive | Auto = "auto"
    device: Literal["cpu", "cuda"] | Auto = "auto"
    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(0, ge=0)
    work_pool: str = Field("none", pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.-]*$")
    offload_optimizer: Literal["none", "cpu"] = "none"
    offload_param: Literal["none", "cpu"] = "none"

    def check_offload(self, *, zero_stage: int, optimizer: str) -> None:
        """Raise ValueError for an offload that ZeRO's stage or the optimizer does not have."""
        if self.offload_optimizer != "none" and zero_stage == 0:
            raise ValueError("resources.offload_optimizer: cpu needs zero_stage 1, 2 or 3; found 0")
        if self.offload_optimizer != "none" and optimizer == "muon":
            raise ValueError(
                "resources.offload_optimizer: cpu with Muon would orthogonalise every matrix on the CPU; use "
                "optimizer.name: adamw"
            )
        if self.offload_param != "none" and (zero_stage != 3 or self.offload_optimizer == "none"):
            raise ValueError(
                f"resources.offload_param: cpu needs zero_stage 3 and offload_optimizer: cpu; found {zero_stage} and "
                f"{self.offload_optimizer}"
            )

    @model_validator(mode="after")
    def _ranks_fit_nodes(self) -> "Resources":
        if self.work_pool != "none" and self.device == "auto":
            raise ValueError(f"device auto is this machine's, not that of work_pool {self.work_pool}; say cpu or cuda")
        if self.gpus_per_node and self.device == "cpu":
            raise ValueError(f"gpus_per_node {self.gpus_per_node} means nothing on device cpu; set num_ranks")
        if self.num_ranks == "auto":
            return self
        if self.num_ranks % self.nodes:
            raise ValueError(f"num_ranks {self.num_ranks} is not a multiple of nodes {self.nodes}; each has as many")
        if self.gpus_per_node not in (0, self.num_ranks // self.nodes):
            raise ValueError(
                f"num_ranks {self.num_ranks} is not nodes {self.nodes} x gpus_per_node {self.gpus_per_node}; leave one "
                "of them out"
            )
        return self


class StageBase(Section):
    """What every stage has. inputs: input name -> stage name. timeout_s: a stage that takes longer is ended."""

    inputs: dict[str, str] = operational({})
    seed: Natural | Auto = "auto"
    resources: Resources = operational(Resources())
    timeout_s: float = operational(7 * 24 * 3600.0, gt=0)
    tracking: tuple[Literal["tensorboard", "wandb"], ...] = operational(("tensorboard",))


class ImportStage(StageBase):
    """A model that exists already, as a Hugging Face directory. model: `hub:owner/name[@revision]` or `file:folder`."""

    kind: Literal["import"]
    model: str


class TokenizerStage(StageBase):
    """Byte-level BPE trained on the first max_bytes of the mixture."""

    kind: Literal["tokenizer"]
    data: tuple[SourceConfig, ...] = Field(min_length=1)
    vocabulary: int = Field(32768, ge=512, le=262144)
    max_bytes: int = Field(2_000_000_000, ge=10_000)


class ShapeConfig(Section):
    """A model's shape; what is `auto` follows from depth (nanodag.config.dial). depth: 0 for the shape of inputs.model,
    where the stage begins at one."""

    depth: int = Field(0, ge=0, le=128)
    width: Annotated[int, Field(ge=16)] | Auto = "auto"
    num_heads: Positive | Auto = "auto"
    num_kv_heads: Positive | Auto = "auto"
    head_width: Annotated[int, Field(ge=8)] | Auto = "auto"
    mlp_width: Annotated[int, Field(ge=16)] | Auto = "auto"
    tied_embeddings: bool | Auto = "auto"
    rope_theta: float = Field(10_000.0, gt=0)
    max_positions: int = Field(2048, ge=16)


class OptimizerConfig(Section):
    """AdamW for all, or Muon for matrices and AdamW for the rest.

    learning_rate: AdamW's (with Muon: embeddings and head). matrix_lr: Muon's. Both are peaks of the schedule.
    """

    name: Literal["adamw", "muon"] = "muon"
    learning_rate: Rate | Auto = "auto"
    matrix_lr: Rate | Auto = "auto"
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.95, ge=0, lt=1)


class ScheduleConfig(Section):
    """Linear warm-up over the first fraction of steps, flat, then linear decay over the last fraction to final_fraction
    of the peak."""

    warmup_fraction: float = Field(0.02, ge=0, le=1)
    decay_fraction: float = Field(0.5, ge=0, le=1)
    final_fraction: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _fits(self) -> "ScheduleConfig":
        if self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"warmup_fraction {self.warmup_fraction} + decay_fraction {self.decay_fraction} exceed 1; lower one"
            )
        return self


class SupervisedStage(StageBase):
    """The one supervised loop. Tokens are counted over all ranks.

    data: the mixture. precision: `auto` for bf16 where the device multiplies it faster than fp32 (GPUs from compute
    capability 8, processors with AVX512-BF16 or AMX), else fp32. batch_tokens: a step's tokens. micro_batch_tokens:
    what one rank holds at once. horizon_tokens: where it ends (`auto`: pretrain takes the dial's, the others 0:
    num_epochs over the data). max_steps: ends earlier, 0 for never. gradient_clipping: largest global gradient norm, 0
    for none. patience: with evals of the validation loss, how many without a better one end the stage, the best weights
    being kept; 0 for never.
    """

    data: tuple[SourceConfig, ...] = Field(min_length=1)
    precision: Precision | Auto = "auto"
    zero_stage: Literal[0, 1, 2, 3] = 1
    sequence_length: int = Field(2048, ge=8)
    batch_tokens: Annotated[int, Field(ge=8)] | Auto = "auto"
    micro_batch_tokens: Annotated[int, Field(ge=8)] | Auto = "auto"
    horizon_tokens: Natural | Auto = "auto"
    max_steps: int = Field(0, ge=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    gradient_clipping: float = Field(1.0, ge=0)
    activation_checkpointing: bool = False
    compile: bool = operational(True)
    validation_tokens: int = Field(262_144, ge=0)
    validation_every: int = Field(100, ge=1)
    patience: int = Field(0, ge=0)
    checkpoint_every: int = operational(200, ge=1)
    keep_checkpoints: int = operational(2, ge=1)
    log_every: int = operational(10, ge=1)
    sample_prompts: tuple[str, ...] = operational(())

    @model_validator(mode="after")
    def _can_be_offloaded(self) -> "SupervisedStage":
        self.resources.check_offload(zero_stage=self.zero_stage, optimizer=self.optimizer.name)
        return self


class PretrainStage(SupervisedStage):
    """On documents: from random weights of a shape (input `tokenizer`), or from a model that there is (input `model`;
    continued pretraining: shape is left out, horizon_tokens given). tokens_per_parameter: the dial's horizon for each
    parameter in matrices and output head."""

    kind: Literal["pretrain"]
    shape: ShapeConfig = ShapeConfig()
    tokens_per_parameter: float = Field(10.5, gt=0)

    @property
    def continues(self) -> bool:
        """Whether it begins at the weights of another stage's model."""
        return self.shape.depth == 0

    def check_inputs(self) -> None:
        """Raise ValueError unless it begins at one thing, and says what that thing needs."""
        if ("tokenizer" in self.inputs) == ("model" in self.inputs):
            found = ", ".join(self.inputs) or "none"
            raise ValueError(
                f"inputs: found {found}; name either a tokenizer, to begin at random weights, or a model, to go on with"
            )
        if "tokenizer" in self.inputs:
            if self.continues:
                raise ValueError("shape.depth is missing: random weights need one, as in shape: {depth: 4}")
            return
        if self.shape != ShapeConfig():
            raise ValueError("shape is that of inputs.model; leave it out, or name a tokenizer to begin anew")
        if self.horizon_tokens in ("auto", 0):
            raise ValueError(
                f"horizon_tokens {self.horizon_tokens}: the dial's is for random weights; say for how many tokens the "
                "model of inputs.model goes on"
            )
        if self.tokens_per_parameter != type(self).model_fields["tokens_per_parameter"].default:
            raise ValueError("tokens_per_parameter means nothing to a model that goes on; leave it out")


class ChatStage(SupervisedStage):
    """From a model, on conversations, loss on assistant tokens, and beside them on documents (`adapter: text`), loss on
    every token. Validation is on held-out conversations; on documents, where no conversations are held out. Input:
    `model`.

    num_epochs: passes over the data when horizon_tokens is auto. overlong: what becomes of a conversation longer than
    sequence_length.
    """

    num_epochs: float = Field(1.0, gt=0)
    overlong: Literal["truncate", "drop"] = "truncate"


class MidtrainStage(ChatStage):
    """Chat format, multiple choice and tools, on a large mixture."""

    kind: Literal["midtrain"]


class SFTStage(ChatStage):
    """The last supervised stage."""

    kind: Literal["sft"]


class SamplerConfig(Section):
    """The servers that rollouts come from. max_batch: requests decoded at once, by all of them together. context:
    longest prompt plus answer. replicas: how many servers; `auto` for one, or as many as there are threads (4 at most)
    when they are deterministic. start_timeout_s: how long one may start without a sign of progress. health_timeout_s:
    one that does not answer for so long is killed and started again; most_losses: how often in a row one may be lost.

    engine: `embedded`, or `sglang`, which is never deterministic and lives in an environment of its own. For sglang
    alone: python: its interpreter, `auto` for what `nanodag sampler install` made; tensor_parallel: GPUs a server;
    memory_fraction: of a device's memory, for weights and cache; options: any other option of its server, by name;
    router: put sglang-router before several servers, router_options: any option of its, by name, as `policy`.
    """

    engine: Literal["embedded", "sglang"] = "embedded"
    precision: Precision | Auto = "fp32"
    max_batch: int = Field(64, ge=1)
    context: int = Field(1024, ge=8)
    deterministic: bool = True
    replicas: Positive | Auto = operational("auto")
    start_timeout_s: float = operational(120.0, gt=0)
    request_timeout_s: float = operational(600.0, gt=0)
    health_timeout_s: float = operational(60.0, gt=0)
    most_losses: int = operational(3, ge=0)
    python: str = operational("auto", min_length=1)
    tensor_parallel: int = operational(1, ge=1)
    memory_fraction: float = operational(0.3, gt=0, lt=1)
    options: dict[str, bool | int | float | str] = {}
    router: bool = operational(True)
    router_options: dict[str, bool | int | float | str] = operational({})

    @model_validator(mode="before")
    @classmethod
    def _sglang_is_not_deterministic(cls, found: Any) -> Any:
        if isinstance(found, dict) and found.get("engine") == "sglang":
            return {"deterministic": False, "start_timeout_s": 900.0, **found}
        return found

    @model_validator(mode="after")
    def _fits_its_engine(self) -> "SamplerConfig":
        if self.engine == "sglang":
            if self.deterministic:
                raise ValueError(
                    "sampler.deterministic: true needs engine embedded; SGLang's samples depend on what runs beside "
                    "them. Set it to false, or leave it out"
                )
            check_options("options", self.options, OWN_OPTIONS)
            check_options("router_options", self.router_options, ROUTERS_OWN_OPTIONS)
            if self.router_options and not self.router:
                raise ValueError("sampler.router_options mean nothing with sampler.router: false; leave them out")
            return self
        for name in ("python", "tensor_parallel", "memory_fraction", "options", "router", "router_options"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"sampler.{name} means something to engine sglang only; leave it out")
        return self


class FilterConfig(Section):
    """A filter of groups: a name of nanodag.registry or a function of one's own. A bare name means no options."""

    name: str
    options: dict[str, float] = {}

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exists(self) -> "FilterConfig":
        entries.import_path("filter", self.name)
        if self.name in entries.names("filter"):
            entries.load_filter(self.name, self.options)
            if self.options.get("lowest", -math.inf) > self.options.get("highest", math.inf):
                raise ValueError(
                    f"filter {self.name}: lowest {self.options['lowest']:g} is above highest "
                    f"{self.options['highest']:g}, so every group would be dropped; swap them"
                )
        return self


class GenerateConfig(Section):
    """How a response comes about. name: `one_turn`, a name of nanodag.registry (`calculator`, `python`) or a function
    of one's own; a bare name means no options. timeout_s: how long it may take without asking the sampler."""

    name: str = "one_turn"
    options: dict[str, bool | int | float | str] = {}
    timeout_s: float = Field(300.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exists(self) -> "GenerateConfig":
        if self.name == "one_turn":
            for name in ("options", "timeout_s"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"generate.{name} means nothing to one_turn; leave it out, or name a function")
        else:
            entries.import_path("generate", self.name)
            if self.name in entries.names("generate"):
                entries.load_generate(self.name, self.options)
        return self

    @property
    def is_one_turn(self) -> bool:
        """Whether the sampler's answer to the prompt is the response."""
        return self.name == "one_turn"


class CriticConfig(Section):
    """PPO's critic. model: what it begins as, `policy` for the policy's own weights, `input` for the stage's input
    `critic`, or the absolute path of a Hugging Face directory; with the same tokenizer. warmup_steps: at the beginning,
    in which only the critic is trained. epochs: passes over each step's rollouts, of updates_per_step updates each.
    value_clip: how far a value may go from that at the step's start, 0 for none. gamma, gae_lambda: of the
    advantage."""

    model: str = "policy"
    learning_rate: float = Field(1e-5, gt=0)
    warmup_steps: int = Field(0, ge=0)
    epochs: int = Field(1, ge=1)
    value_clip: float = Field(0.2, ge=0)
    gamma: float = Field(1.0, gt=0, le=1)
    gae_lambda: float = Field(1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _model_is_a_folder(self) -> "CriticConfig":
        if self.model not in ("policy", "input") and not self.model.startswith("/"):
            raise ValueError(f"critic.model {self.model!r} is neither policy, input nor the absolute path of a folder")
        return self


class TeacherConfig(Section):
    """On-policy distillation. model: `none`, `input` for the stage's input `teacher`, or the absolute path of a Hugging
    Face directory; with the same tokenizer. url: of a server in its place (nanodag.rl.trainer.teacher_server), or
    `none`. coefficient: by which each token's log-probability there, less the policy's, is added to its advantage."""

    model: str = "none"
    url: str = later("none")
    coefficient: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _model_is_a_folder(self) -> "TeacherConfig":
        if self.model.startswith(("http://", "https://")):
            raise ValueError(f"teacher.model {self.model} is a folder's setting; name a server as teacher.url")
        if self.model not in ("none", "input") and not self.model.startswith("/"):
            raise ValueError(f"teacher.model {self.model!r} is neither none, input nor the absolute path of a folder")
        if self.url != "none" and self.model != "none":
            raise ValueError(f"teacher.model {self.model} and teacher.url {self.url} are two teachers; leave one out")
        if self.url != "none" and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"teacher.url {self.url!r} must begin with http:// or https://, or be none")
        if self.model == self.url == "none" and self.coefficient != type(self).model_fields["coefficient"].default:
            raise ValueError(f"teacher.coefficient {self.coefficient} means nothing without teacher.model or .url")
        return self


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
    sync_mode: what becomes of requests under way: `finish`, they are waited for, whole harvests at a time; `in_place`,
    they go on with the new weights; `retract`, and are computed anew up to there; `abort`, they end, and what they have
    is asked to be gone on with. sync_check_every: the first sync and
    every one of that number is verified tensor by tensor, 0 for none.
    reward, advantage, policy_loss: names of nanodag.registry, or functions of one's own as package.module:function;
    reward `auto` is what each prompt says; names with weights are summed; `process:` scores steps, with grpo and gae.
    most_failed_rewards: share of the rewards of a step, or of an evaluation, that may fail: raise, take too long, end
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
    most_failed_rewards: float = operational(0.25, ge=0, le=1)
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


class BenchmarkConfig(Section):
    """One lm-eval task. name: what it is called in results. form: how it is asked, one of those shipped in
    nanodag/evaluation/benchmarks (`auto`: the one called like the benchmark), a YAML file of lm-eval's format by path,
    or lm-eval's own as `lm_eval:folder/file.yaml`. source: where its items come from. limit: that many items, drawn at
    random by the stage's seed; 0 for all. fewshot: where worked examples come from, with num_fewshot."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    form: str = "auto"
    source: SourceConfig | None = None
    num_fewshot: int = Field(0, ge=0)
    fewshot: SourceConfig | None = None
    limit: int = Field(0, ge=0)


class EvalStage(StageBase):
    """Scores of a checkpoint. Input: `model`. chat: prompts go through the chat template (not for a base model). bos:
    whether other texts begin with the tokenizer's bos token; `auto` where the tokenizer itself puts it there, as
    lm-eval does and as ours do."""

    kind: Literal["eval"]
    benchmarks: tuple[BenchmarkConfig, ...] = Field(min_length=1)
    precision: Precision | Auto = "fp32"
    batch_size: int = operational(64, ge=1)
    chat: bool = True
    bos: Literal["auto", "always", "never"] = "auto"
    max_new_tokens: int = Field(256, ge=1)
    sample_prompts: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> "EvalStage":
        names = [benchmark.name for benchmark in self.benchmarks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two benchmarks are called {twice[0]!r}; give each a name and say what it is with `form`")
        return self


class ReportStage(StageBase):
    """report.md and report.html over its inputs. contamination: benchmark sources whose 13-grams are looked for in the
    training sources. price_per_hour: of one device, in any currency; 0 leaves prices out."""

    kind: Literal["report"]
    contamination: tuple[SourceConfig, ...] = ()
    price_per_hour: float = Field(0.0, ge=0)


AnyStage = Annotated[
    ImportStage | TokenizerStage | PretrainStage | MidtrainStage | SFTStage | RLStage | EvalStage | ReportStage,
    Field(discriminator="kind"),
]

_STAGE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")

REQUIRED_INPUTS: dict[str, tuple[str, ...]] = {
    "import": (),
    "tokenizer": (),
    "pretrain": (),  # `tokenizer` or `model`, see its check_inputs
    "midtrain": ("model",),
    "sft": ("model",),
    "rl": ("model",),
    "eval": ("model",),
    "report": (),
}


_MODELS = ("import", "pretrain", "midtrain", "sft", "rl")  # kinds whose result is a model
INPUT_KINDS: dict[str, tuple[str, ...]] = {
    "tokenizer": ("tokenizer",),
    "model": _MODELS,
    "critic": _MODELS,
    "teacher": _MODELS,
}
TRAINING_KINDS = ("pretrain", "midtrain", "sft", "rl")


class ClusterConfig(Section):
    """Other machines, for stages with resources.nodes above 1. hostfile: DeepSpeed's, with lines as `worker-2 slots=8`;
    one of them is this machine. reach: the command that runs another one on {host}, without asking for a password."""

    hostfile: str = "none"
    reach: str = "ssh -o BatchMode=yes -o ServerAliveInterval=15 {host}"

    @model_validator(mode="after")
    def _names_the_host(self) -> "ClusterConfig":
        if "{host}" not in self.reach:
            raise ValueError(f"reach {self.reach!r} does not say where {{host}} stands, as in: ssh {{host}}")
        return self


class StoreConfig(Section):
    """url: a local path or an fsspec URL. local: workspaces and cache when the store is remote, `auto` for
    ~/.cache/nanodag. Relative paths begin at the pipeline file's folder, in overrides at the working directory.
    mirror_checkpoints: copy those of stages under way to a remote store, so that another machine can go on."""

    url: str = Field("store", min_length=1)
    local: str = Field("auto", min_length=1)
    mirror_checkpoints: bool = False

    @field_validator("url")
    @classmethod
    def _names_a_place(cls, url: str) -> str:
        scheme, separator, rest = url.partition("://")
        if separator and not rest.strip("/"):
            raise ValueError(f"{url!r} names no place after {scheme}://; give one, as in s3://bucket/folder")
        return url

    @model_validator(mode="after")
    def _has_somewhere_to_mirror(self) -> "StoreConfig":
        if self.mirror_checkpoints and ("://" not in self.url or self.url.startswith("file://")):
            raise ValueError(f"mirror_checkpoints needs a remote store; in {self.url} checkpoints are there already")
        return self


class ServerConfig(Section):
    """Prefect's server. host: the address or name that it listens on. password_file: a file with `user:password`, which
    it then asks for. database: `sqlite`, below the store's local folder, or postgresql+asyncpg://user@host/name; its
    password is PGPASSWORD's, or that of ~/.pgpass. proxy_names: host names under which a proxy offers it; all others
    but its own are refused. start_timeout_s: how long a process of it may start without a sign of progress."""

    port: int = Field(4200, ge=1024, le=65535)
    start_timeout_s: float = Field(120.0, gt=0)
    host: str = Field("127.0.0.1", min_length=1)
    proxy_names: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+$")], ...] = ()
    password_file: str = "none"
    database: str = "sqlite"

    @model_validator(mode="after")
    def _is_safe(self) -> "ServerConfig":
        if ":" in self.host:
            raise ValueError(f"host {self.host!r} is of IPv6, which is not built; use 127.0.0.1, or an IPv4 address")
        if _is_unspecified(self.host):
            raise ValueError(f"host {self.host!r} is every interface; name the one that others reach")
        if not _is_loopback(self.host) and self.password_file == "none":
            raise ValueError(
                f"host {self.host!r} can be reached from other machines, and whoever reaches Prefect's server runs "
                "commands here; set server.password_file"
            )
        if self.database != "sqlite":
            found = urlsplit(self.database)
            if found.scheme != "postgresql+asyncpg" or not found.hostname or not found.path.strip("/"):
                kind = found.scheme or "no scheme"
                raise ValueError(f"database ({kind}) is neither sqlite nor postgresql+asyncpg://user@host/name")
            if found.password or "password" in found.query:
                raise ValueError(
                    "database holds a password, which every run's record would show; leave it out and give it by "
                    "PGPASSWORD or ~/.pgpass"
                )
        return self


def _is_unspecified(host: str) -> bool:
    try:
        return inet_aton(host) == bytes(4)  # which reads `0` as the system does
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Pipeline(Section):
    """One resolved pipeline: the DAG as a table, and what is common to all stages.

    mirror: a folder laid out as `<hub name>/<config>/<split>.parquet` that hub sources are read from, `none` for the
    hub. Relative paths as in StoreConfig. trusted_modules: modules and packages whose functions may be named beside
    those next to the pipeline file; set in that file alone. unchecked: names of numbers that are meant though they look
    like slips, as rl.temperature (nanodag.config.ranges).
    """

    preset: str
    description: str = ""
    seed: int = Field(0, ge=0)
    mirror: str = "none"
    trusted_modules: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    store: StoreConfig = StoreConfig()
    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    nightly: NightlyConfig = NightlyConfig()
    stages: dict[str, AnyStage] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_a_dag(self) -> "Pipeline":
        for name, stage in self.stages.items():
            if not _STAGE_NAME.fullmatch(name) or name in type(self).model_fields:
                settings = ", ".join(type(self).model_fields)
                raise ValueError(f"stage name {name!r}: use small letters, digits, '-' and '_', and none of {settings}")
            self._check_inputs(name, stage)
            if isinstance(stage, PretrainStage):
                try:
                    stage.check_inputs()
                except ValueError as error:
                    raise ValueError(f"stages.{name}.{error}") from error
            self._check_machines(name, stage)
        order_of(self)
        return self

    def _check_inputs(self, name: str, stage: AnyStage) -> None:
        if missing := [label for label in REQUIRED_INPUTS[stage.kind] if label not in stage.inputs]:
            found = listed(stage.inputs)
            raise ValueError(f"stages.{name} of kind {stage.kind} needs the input {missing[0]}; found {found}")
        for label, source in stage.inputs.items():
            if source not in self.stages:
                near = nearest(source, self.stages) or f" The stages are {listed(self.stages)}."
                raise ValueError(f"stages.{name}.inputs.{label}: there is no stage {source!r}.{near}")
            if stage.kind == "report":  # over whatever there is
                continue
            if label not in INPUT_KINDS:
                near = nearest(label, INPUT_KINDS) or f" Inputs are {listed(INPUT_KINDS)}."
                raise ValueError(f"stages.{name}.inputs: there is no input {label!r}.{near}")
            if (kind := self.stages[source].kind) not in INPUT_KINDS[label]:
                fitting = [n for n, s in self.stages.items() if s.kind in INPUT_KINDS[label] and n != name]
                what = "a tokenizer" if label == "tokenizer" else "a model"
                raise ValueError(
                    f"stages.{name}.inputs.{label}: stage {source}, of kind {kind}, is not {what}; name one of "
                    f"{listed(fitting)}"
                )

    def _check_machines(self, name: str, stage: AnyStage) -> None:
        if (pool := stage.resources.work_pool) != "none" and self.server.database == "sqlite":
            raise ValueError(
                f"stages.{name}.resources.work_pool {pool!r} needs server.database on Postgres: in Prefect 3.8.8 the "
                "workers of a pool make the API time out on SQLite"
            )
        if pool != "none" and "://" in self.store.url:
            raise ValueError(
                f"stages.{name}.resources.work_pool {pool!r} needs a store in a folder that all machines share: of "
                f"{self.store.url} each has a copy of the run's record, and they would overwrite one another's"
            )
        for offload in ("offload_optimizer", "offload_param"):
            if getattr(stage.resources, offload) != "none" and stage.kind not in TRAINING_KINDS:
                raise ValueError(f"stages.{name}.resources.{offload}: a stage of kind {stage.kind} trains nothing")
        nodes = stage.resources.nodes
        if nodes > 1 and stage.kind not in TRAINING_KINDS:
            raise ValueError(f"stages.{name}.resources.nodes {nodes}: a stage of kind {stage.kind} runs on one machine")
        if nodes > 1 and stage.kind == "rl" and stage.sync == "distributed":
            raise ValueError(
                f"stages.{name}.sync: distributed broadcasts on this machine, and resources.nodes is {nodes}; use disk"
            )
        if nodes > 1 and self.cluster.hostfile == "none":
            raise ValueError(f"stages.{name}.resources.nodes {nodes} needs cluster.hostfile to say which machines")


def order_of(pipeline: Pipeline) -> list[str]:
    """Stage names so that inputs come first; otherwise in the file's order. Raises ValueError at a cycle."""
    order: list[str] = []
    while len(order) < len(pipeline.stages):
        ready = [
            n
            for n, s in pipeline.stages.items()
            if n not in order and all(source in order for source in s.inputs.values())
        ]
        if not ready:
            rest = sorted(set(pipeline.stages) - set(order))
            raise ValueError(f"stages {listed(rest)} wait for each other; a DAG has no cycle")
        order.append(ready[0])
    return order
