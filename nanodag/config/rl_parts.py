"""Parts of stages that sample and reward responses: functions that they name, samplers, critic and teacher; and what
all these stages have."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from nanodag import registry
from nanodag.config.section import Auto, Natural, Positive, Precision, Seconds, Section, later, operational
from nanodag.config.stage_base import StageBase, answer, from_setting
from nanodag.data.config import SourceConfig
from nanodag.data.records import Wanted
from nanodag.inference.addresses import parse_address
from nanodag.inference.engine_install import TITLES
from nanodag.inference.sglang_options import check_options

MAX_CALLS = 256  # of functions that generate, at once: each holds a thread and three file descriptors
# After _bare_name a table is no JSON any more, in which a list would stand for a tuple.
_Texts = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
PROGRAM_OPTIONS = ("command", "folder", "library", "python")
GUESTS_ONLY = ("python", "tensor_parallel", "options")


class EntryConfig(Section):
    """A function with its options. A bare name means no options.

    kind: of the entry. special: a name that stands for no function. settings: of its options those that are fields of
    their own, and where they stand in the algorithm section.
    """

    kind: ClassVar[str]
    special: ClassVar[str] = ""
    settings: ClassVar[Mapping[str, str]] = {}

    name: str
    """A name of those that nanodag ships, or a function of the user's own as package.module:function."""
    options: dict[str, bool | int | float | str] = {}
    """Keyword arguments of the function."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def check_settings(self) -> None:
        if self.name != self.special:
            registry.check_options(self.kind, self.name, self.options, self.settings)
        elif self.options:
            raise ValueError(f"options mean nothing to {self.kind} {self.name}; leave them out, or name a function")

    def __str__(self) -> str:
        """Name with options, for messages."""
        return f"{self.name} with {self.options}" if self.options else self.name

    @property
    def traits(self) -> registry.Entry | None:
        """Traits known without importing it; None of a user's own function."""
        return None if self.name == self.special else registry.find(self.kind, self.name)

    @property
    def own_function(self) -> str:
        """`module:function` of the user's own that it names; empty for ours."""
        return "" if self.name == self.special else registry.own_function(self.kind, self.name)

    def own(self, form: registry.Argument) -> str:
        """The argument of that form that it names: the user's `file` of `judge:`, a reward model's `folder`, the
        `module` that a guest loads for `verifiers:`; empty where there is none."""
        return "" if self.name == self.special else registry.own_argument(self.kind, self.name, form)

    def agents_path(self, option: Literal["folder", "library"]) -> str:
        """The user's folder that an agent's program runs in, whose files decide what it does, or the Python environment
        with whose packages it runs; empty where there is none."""
        return str(self.options.get(option, "")) if (self.kind, self.name) == ("generate", "agent") else ""

    def load(self) -> Callable[..., Any]:
        """The function with its options set."""
        return registry.load(self.kind, self.name, self.options)


class AdvantageConfig(EntryConfig):
    """The advantage estimator."""

    kind = "advantage"
    settings = {"gamma": "critic.gamma", "gae_lambda": "critic.gae_lambda"}


class PolicyLossConfig(EntryConfig):
    """The policy loss."""

    kind = "policy_loss"
    settings = {name: name for name in ("clip_low", "clip_high", "dual_clip", "sapo_positive", "sapo_negative")}


class AggregationConfig(EntryConfig):
    """Mean over token losses."""

    kind = "aggregation"


class KLConfig(EntryConfig):
    """The estimator of a token's KL to the reference model."""

    kind = "kl"


class CorrectionConfig(EntryConfig):
    """Importance correction for rollouts of older weights or of another engine."""

    kind = "correction"
    settings = {"floor": "correction_floor", "cap": "correction_cap"}


class RewardConfig(EntryConfig):
    """One reward; `auto` is what each prompt names."""

    kind = "reward"
    special = "auto"

    weight: float = Field(1.0, ge=-1_000_000, le=1_000_000)
    """Factor of the reward in the sum."""

    @property
    def from_input(self) -> str:
        """The input of the stage that is its reward model; empty where there is none."""
        folder = self.own("folder")
        return folder.removeprefix(registry.FROM_INPUT) if folder.startswith(registry.FROM_INPUT) else ""


class FilterConfig(EntryConfig):
    """A filter of groups."""

    kind = "filter"

    def check_settings(self) -> None:
        super().check_settings()
        lowest, highest = self.options.get("lowest", -math.inf), self.options.get("highest", math.inf)
        if self.traits is not None and float(lowest) > float(highest):
            raise ValueError(
                f"filter {self.name}: lowest {lowest:g} is above highest {highest:g}, so every group would be dropped; "
                "swap them"
            )


class GenerateConfig(EntryConfig):
    """A way to a response: `one_turn` of the sampler, or an async function with turns of its own."""

    kind = "generate"
    special = "one_turn"

    name: str = "one_turn"
    """How a response is made: `one_turn`, a shipped tool (`calculator`, `python`), an async function as
    package.module:function, or an agent: `agent:package.module:function`, or `agent` with the option `command`."""
    options: dict[str, bool | int | float | str | _Texts] = {}  # type: ignore[assignment]
    """Keyword arguments of the function; a program's `command` is a list of texts."""
    timeout_s: Seconds = 300.0
    """Seconds that the function may take without asking the sampler."""

    def check_settings(self) -> None:
        super().check_settings()
        if self.is_one_turn and self.timeout_s != type(self).model_fields["timeout_s"].default:
            raise ValueError("generate.timeout_s means nothing to one_turn; leave it out, or name a function")

    @property
    def programs(self) -> dict[str, Any]:
        """Options of an agent that say which program runs, and where."""
        is_agent = self.name.partition(":")[0] in ("agent", "verifiers")
        return {name: self.options[name] for name in PROGRAM_OPTIONS if is_agent and name in self.options}

    @property
    def is_one_turn(self) -> bool:
        """True where the sampler's answer to the prompt is the response."""
        return self.name == self.special


class EngineConfig(Section):
    """The engine of samplers. All but `engine` is for `sglang` and `vllm`; `engine: auto` leaves it out where it takes
    the embedded one."""

    engine: Literal["embedded", "sglang", "vllm"] | Auto = "auto"
    """`embedded`: the sampler of this package; `sglang`, `vllm`: SGLang or vLLM in an environment of its own, never
    deterministic. `auto`: SGLang on GPUs where it is installed."""
    python: str = operational("auto", min_length=1)
    """SGLang's or vLLM's Python interpreter; `auto` for what `nanodag sampler install` made."""
    tensor_parallel: int = operational(1, ge=1, le=1024)
    """GPUs of one such server. Above 1 it is refused where `engine: auto` takes the embedded one."""
    options: dict[str, bool | int | float | str] = {}
    """Other options of SGLang's server or vLLM's engine, by name."""

    def check_settings(self) -> None:
        for name in GUESTS_ONLY if self.engine == "embedded" else ():
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"sampler.{name} means something to engines sglang and vllm only; leave it out")
        check_options(self.options)


class SamplerConfig(EngineConfig):
    """The servers that rollouts come from."""

    precision: Precision | Auto = "auto"
    """Number format of the sampler's weights and products, on a GPU also of its cache. `auto`: the trainer's."""
    max_batch: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = "auto"
    """Requests decoded at once, by all replicas together. `auto`: a step's samples, as far as the cache holds them."""
    context: Annotated[int, Field(ge=8, le=100_000_000)] | Auto = "auto"
    """Longest prompt plus response, in tokens. `auto`: rollout.max_new_tokens and 1,024 for the prompt."""
    deterministic: bool | Auto = "auto"
    """Whether a request returns the same bits alone, among others, or admitted late. `auto`: where that is possible,
    with the embedded engine on a CPU."""
    replicas: Annotated[int, Field(ge=0, le=1024)] | Auto = operational("auto")
    """Sampler processes of the stage's own. `auto`: one a GPU; on a CPU one, or a process a thread (4 at most) where
    they are deterministic. With `urls` or `urls_file`: none."""
    urls: tuple[str, ...] = operational(())
    """Samplers that somebody else runs, as `http://node2:30000`, or `http://node2:30000 /path/of/its/key`. They are
    checked, given the stage's weights, and never stopped; `nanodag sampler serve` starts one. `deterministic: true`
    holds for them too: each must be a deterministic one on a processor of the same kind."""
    urls_file: str = operational("none", min_length=1)
    """A file of further ones, one a line, which may grow and shrink while the stage runs; `none` for none. It may name
    environment variables as `$NAME`."""
    gpus: Positive | tuple[Natural, ...] | Auto = operational("auto")
    """With `placement: separate`, GPUs of this node that samplers have to themselves: how many, the last ones, or their
    numbers from 0. `auto`: half of them, none with sampler.nodes."""
    nodes: int = operational(0, ge=0, le=10_000)
    """With `placement: separate`, nodes of cluster.hostfile that samplers have to themselves, after the trainer's."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | Auto = operational("auto")
    """Share of a device's whole memory that a sampler takes for weights and cache, whatever else is there. `auto`, of a
    GPU: 0.4 beside the trainer, 0.8 in turns with it, 0.9 alone; 0.25 of a CPU's memory for all replicas."""
    cache_bytes: Positive | Auto = operational("auto")
    """Bytes of one replica's keys and values. `auto`: what max_batch samples of `context` tokens take, as far as
    memory_fraction allows."""
    start_timeout_s: Seconds | Auto = operational("auto")
    """Seconds without a sign of progress after which a sampler's start has failed. `auto`: 120 for the
    embedded one, else 900."""
    request_timeout_s: Seconds = operational(3600.0)
    """Seconds that a request may take, its time in the queue among them; then its sampler counts as lost."""
    health_timeout_s: Seconds = operational(60.0)
    """Seconds without an answer after which a sampler is asked again; after as many again it is killed and started
    anew."""
    max_restarts: int = operational(3, ge=0)
    """How often in a row one sampler may be restarted."""

    def check_settings(self) -> None:
        super().check_settings()
        if self.engine in TITLES and self.deterministic is True:
            raise ValueError(
                f"sampler.deterministic: true needs engine embedded; samples of {self.engine} depend on what runs "
                "beside them. Set it to false, or leave it out"
            )
        urls = [parse_address(text).url for text in self.urls]
        if twice := [url for number, url in enumerate(urls) if url in urls[:number]]:
            raise ValueError(f"sampler.urls names {twice[0]} twice; name each server once")
        if self.replicas == 0 and not self.has_others:
            raise ValueError("sampler.replicas 0 needs servers of others: name some in sampler.urls or urls_file")

    @property
    def has_others(self) -> bool:
        """True where samplers are used that somebody else runs."""
        return bool(self.urls) or self.urls_file != "none"


_RewardsWritten = tuple[RewardConfig, ...] | RewardConfig | dict[str, float]
OF_POLICY_LOSSES = (
    "advantage", "policy_loss", "clip_low", "clip_high", "dual_clip", "sapo_positive", "sapo_negative", "correction",
    "correction_cap", "correction_floor", "correction_veto", "opsm_limit",
)  # fmt: skip
"""Settings of the algorithm section that mean nothing where answers are imitated."""


class CloneConfig(Section):
    """Imitation of the best answers in files: the mean of their tokens' negative log-likelihood, as in SFT, takes the
    place of advantages, policy loss, correction and filters. Only this can train records without log-probabilities."""

    best: int = Field(0, ge=0)
    """Different finished answers of each group that are imitated, those with the highest rewards; 0 for none."""
    lowest_reward: float = 1.0
    """The least reward of an answer that is imitated."""


class CriticConfig(Section):
    """PPO's critic."""

    model: str = "policy"
    """What the critic begins as: `policy`, `input` for the stage's input `critic`, or the path of a Hugging Face folder
    with the same tokenizer."""
    learning_rate: float = Field(1e-5, gt=0, le=1)
    """AdamW's learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """First steps, in which only the critic is trained."""
    epochs: int = Field(1, ge=1, le=1_000_000)
    """Passes over each step's rollouts, of updates_per_step updates each."""
    value_clip: float = Field(0.2, ge=0, le=1000)
    """How far a value may move from that at the step's start; 0 for no clip."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of later rewards."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """GAE's mix of short and long estimates of the advantage."""


class ReferenceConfig(Section):
    """The frozen model that the KL is measured from."""

    model: str = "policy"
    """The reference: `policy` for the model that the stage begins with, `input` for the stage's input `reference`, or
    the path of a Hugging Face folder with the same tokenizer."""


class TeacherConfig(Section):
    """A teacher of on-policy distillation."""

    model: str = "none"
    """The teacher: `none`, `input` for the stage's input `teacher`, or the path of a Hugging Face folder with the same
    tokenizer."""
    url: str = "none"
    """A teacher server's address (nanodag.rl.trainer.teacher_server), in place of model. `http://HOST:8000/v1#MODEL`: a
    model behind an OpenAI API that gives a prompt's log-probabilities. `none` for none."""
    coefficient: float = Field(1.0, gt=0, le=1000)
    """Factor of the teacher's log-probability less the policy's, added to each token's advantage."""


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
    reward: Annotated[
        tuple[RewardConfig, ...], BeforeValidator(_one_or_names_with_weights, json_schema_input_type=_RewardsWritten)
    ] = (RewardConfig(name="auto"),)
    """A reward by name, a function as package.module:function, or names with weights, which are combined. `auto` takes
    what each prompt names; `process:package.module:function` scores single steps."""
    combine_rewards: Literal["sum", "min"] = later("sum")
    """How weighted rewards become one: their sum, or the least of them, as of several reward models. One of weight 0 is
    never in it: it is scored and reported, as a check on what is trained."""
    sampler: SamplerConfig = SamplerConfig()
    """The servers that rollouts come from."""
    num_steps: int = Field(100, ge=1)
    """Rounds of rollouts (slime's num_rollout)."""
    num_epochs: float = Field(0.0, ge=0, le=1_000_000)
    """Passes over the prompts, in the place of num_steps: as many steps as their prompts fill. A step asks
    prompts_per_step of them. 0 for num_steps."""
    log_responses: int = operational(0, ge=0)
    """Responses of each step that metrics.jsonl and trackers get as a table, with prompt, text and reward: the first
    one of each group in turn, then the second, each with its branches. 0 for none."""
    profile_steps: tuple[Positive, ...] = operational(())
    """Steps whose traces are written into records/profile: torch's of each trainer rank and, but for order arrival, of
    each sampler, and the step's timeline."""
    checkpoint_every: int = operational(20, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = operational(2, ge=1)
    """Newest checkpoints that are kept while the stage runs."""

    learned_sources = from_setting("data")
    guest = answer(lambda stage: stage.sampler if stage.has_samplers and stage.sampler.engine in TITLES else None)

    @property
    def has_samplers(self) -> bool:
        """True where anything is sampled."""
        return True

    @property
    def machines(self) -> dict[str, int]:
        return super().machines | ({"sampler.nodes": self.sampler.nodes} if self.sampler.nodes else {})
