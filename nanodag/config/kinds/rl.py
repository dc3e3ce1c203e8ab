"""Reinforcement learning."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from nanodag import registry
from nanodag.config.derive_hardware import Derived, fit_rl, own_gpus, placed, rl_precision, rl_ranks_on_cpu
from nanodag.config.derive_sampler import derive_sampler
from nanodag.config.derive_schedule import model_of, width_from_scratch
from nanodag.config.hardware_rules import ROOM_IN_TURNS
from nanodag.config.kind import MODEL, Kind
from nanodag.config.kinds.evaluation import BenchmarkConfig, EvalStage
from nanodag.config.model_size import ModelSize
from nanodag.config.ranges import check_lora
from nanodag.config.rl_entries import EntryConfig, RewardConfig
from nanodag.config.rl_evaluation import HELD_OUT, EvaluationSection
from nanodag.config.rl_parts import OF_POLICY_LOSSES, CriticConfig, SamplerConfig, TeacherConfig
from nanodag.config.rl_sections import AlgorithmSection, OptimizerSection, RolloutSection, WeightsSection
from nanodag.config.section import Auto, Positive, operational, refuse_unused
from nanodag.config.stage_base import ExternalInput, TrainedStage
from nanodag.data.config import SourceConfig, mixes_by_epochs
from nanodag.data.records import Wanted
from nanodag.errors import ConfigError
from nanodag.errors.words import listed
from nanodag.inference.addresses import parse_address


class RLStage(TrainedStage):
    """GRPO and its relatives (input `model`)."""

    record_kind: ClassVar[Wanted | None] = "prompt"
    curves: ClassVar[Literal["", "loss", "rollouts"]] = "rollouts"
    plan_formula: ClassVar[str] = "nanodag.plan.rl:RL"
    makes_rollouts: ClassVar[bool] = True
    asks_policy: ClassVar[bool] = True
    scores_tokens: ClassVar[bool] = True

    data: tuple[SourceConfig, ...] = Field(min_length=1)
    """The prompts."""
    reward: tuple[RewardConfig, ...] = (RewardConfig(name="auto"),)
    """A reward by name, a function as package.module:function, or names with weights, which are summed. `auto` takes
    what each prompt names; `process:package.module:function` scores single steps."""
    sampler: SamplerConfig = SamplerConfig()
    """The servers that rollouts come from."""
    placement: Literal["beside", "shared", "separate"] | Auto = operational("auto")
    """Where samplers lie. `beside`: on the trainer's GPUs, at the same time, each with a share of the memory. `shared`:
    on them in turns, and who does not work lends its memory; max_staleness must be 0. `separate`: on GPUs or nodes of
    their own (sampler.gpus, sampler.nodes). `auto`: `beside`, but `shared` where only that keeps the optimizer on a
    GPU."""
    lends_states: bool | Auto = operational("auto")
    """With `shared`: whether the trainer's weights, optimizer states and gradients wait in host memory while samplers
    work. `auto`: on GPUs."""
    num_steps: int = Field(100, ge=1)
    """Rounds of rollouts (slime's num_rollout)."""
    num_epochs: float = Field(0.0, ge=0)
    """Passes over the prompts, in the place of num_steps: as many steps as their prompts fill. A step asks
    prompts_per_step of them, less those of the groups that rollout.replay trains again. 0 for num_steps."""
    only: Literal["both", "rollouts"] = "both"
    """`rollouts`: responses are generated and scored, and nothing is trained; the stage leaves the model that it began
    with. To train without generating, name files as rollout.source."""
    rollout: RolloutSection = RolloutSection()
    """Which responses are generated and kept."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """Advantages and the loss."""
    optimizer: OptimizerSection = OptimizerSection()
    """The trainer's steps."""
    weights: WeightsSection = WeightsSection()
    """How new weights reach the samplers."""
    evaluation: EvaluationSection = EvaluationSection()
    """Evaluation on held-out prompts and benchmarks."""
    keep: str = Field("last", pattern="^(last|best:.+)$")
    """The weights that the stage leaves: the `last` ones, or those of the evaluation that was `best` by a metric, the
    earliest of equal ones. `best:eval_reward` is the reward on held-out prompts. `best:NAME` is the main metric of that
    benchmark of `evaluation`."""
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
    keep_weights_every: int = operational(0, ge=0)
    """The weights of each step that this number divides are kept as a Hugging Face folder in the artifact's records,
    weights/step-STEP; 0 for none."""

    @field_validator("reward", mode="before")
    @classmethod
    def _one_or_names_with_weights(cls, value: Any) -> Any:
        if isinstance(value, dict) and "name" not in value:
            value = [{"name": name, "weight": weight} for name, weight in value.items()]
        if isinstance(value, str | dict | RewardConfig):
            value = [value]
        return tuple(value) if isinstance(value, list) else value  # strict: after this it is no JSON, where a list does

    @model_validator(mode="after")
    def _combination(self) -> "RLStage":
        rollout, optimizer = self.rollout, self.optimizer
        if optimizer.updates_per_step > rollout.prompts_per_step:
            raise ValueError(
                f"optimizer.updates_per_step {optimizer.updates_per_step} is above rollout.prompts_per_step "
                f"{rollout.prompts_per_step}; each update trains at least one prompt's group"
            )
        self.resources.check_offload(zero_stage=optimizer.zero_stage, optimizer="adamw")
        self.check_resources()
        self._check_reward()
        self._check_models()
        self._check_advantage()
        self._check_keep()
        self._check_epochs()
        self._check_steps()
        self._check_only()
        self._check_earlier()
        return self

    @property
    def best_metric(self) -> str:
        """HELD_OUT or the name of the benchmark that says which weights are left; empty for the last ones."""
        return self.keep.partition(":")[2]

    def _check_epochs(self) -> None:
        if self.num_epochs and self.num_steps != type(self).model_fields["num_steps"].default:
            raise ValueError(
                f"num_epochs {self.num_epochs:g} and num_steps {self.num_steps} both say how long the stage is; leave "
                "one of them out"
            )
        if self.num_epochs and not self.rollout.is_sampled:
            raise ValueError(
                f"num_epochs {self.num_epochs:g} with rollout.source {self.rollout.source}: it counts passes over "
                "prompts that are sampled; set num_steps, and the stage's log says how many passes these are"
            )
        if self.num_epochs and not mixes_by_epochs(self.data):
            raise ValueError(
                f"num_epochs {self.num_epochs:g}: passes over a mixture by weights have no meaning, as it has no end; "
                "set num_steps, or leave out the weights"
            )

    def _check_steps(self) -> None:
        """Of steps that a setting names: they come. With num_epochs the stage looks when it has counted its prompts."""
        named = {
            "optimizer.warmup_steps": self.optimizer.warmup_steps,
            "profile_steps": max(self.profile_steps, default=0),
        }
        for name, step in named.items():
            if step > self.num_steps and not self.num_epochs:
                raise ValueError(
                    f"{name} {step} is above num_steps {self.num_steps}, so that step never comes; lower it, or raise "
                    "num_steps"
                )

    def _check_only(self) -> None:
        if self.only == "rollouts" and self.best_metric:
            raise ValueError(f"keep {self.keep} with only: rollouts, where nothing changes the weights; use keep: last")
        if self.only == "rollouts" and not self.rollout.is_sampled:
            raise ValueError(
                f"only: rollouts with rollout.source {self.rollout.source}: nothing would be generated or trained; "
                "leave one of them out"
            )

    def _check_earlier(self) -> None:
        """Of rollouts that were not made for their step."""
        algorithm, rollout = self.algorithm, self.rollout
        if rollout.replay.share and self.only == "rollouts":
            raise ValueError(f"rollout.replay.share {rollout.replay.share:g} with only: rollouts; leave it out")
        if rollout.replay.share and algorithm.correction.name == "none":
            raise ValueError(
                f"rollout.replay.share {rollout.replay.share:g} trains what older weights sampled, and "
                "algorithm.correction is none; choose one, as tis or mis_geometric"
            )
        if not rollout.clone.best:
            return
        what = f"rollout.clone.best {rollout.clone.best}"
        refuse_unused(algorithm, OF_POLICY_LOSSES, what)
        refuse_unused(rollout, ["filters"] if rollout.filters else [], what)
        if algorithm.kl_in == "reward" or algorithm.teacher != TeacherConfig():
            raise ValueError(f"{what} has no advantages, which kl_in: reward and a teacher change; leave them out")

    @property
    def evaluated(self) -> list[str]:
        """What policies are evaluated on: names of benchmarks, HELD_OUT for held-out prompts."""
        has_prompts = self.evaluation.validation or any(source.held_out for source in self.data)
        names = [benchmark.name for benchmark in self.evaluation.benchmarks]
        return [*names, *[HELD_OUT] * bool(self.evaluation.eval_prompts and has_prompts)]

    def _check_keep(self) -> None:
        names = self.evaluated
        if self.evaluation.patience and not self.best_metric:
            raise ValueError(
                f"evaluation.patience {self.evaluation.patience} waits for a better score, and keep is {self.keep}; "
                f"set keep to best:{HELD_OUT} or to best:NAME of a benchmark"
            )
        if self.best_metric and self.best_metric not in names:
            known = f"what is evaluated is {listed(names)}" if names else "nothing is evaluated"
            raise ValueError(
                f"keep {self.keep}: {known}; name one of these, or add {self.best_metric} to evaluation.benchmarks"
            )

    def _check_context(self) -> None:
        context, most, held = self.sampler.context, self.rollout.max_new_tokens, self.optimizer.micro_batch_tokens
        if context == "auto":
            return
        if context <= most:
            raise ValueError(
                f"sampler.context {context} leaves no room for a prompt beside rollout.max_new_tokens {most}; raise "
                "the one or lower the other"
            )
        for benchmark in self.evaluation.benchmarks:
            if benchmark.max_new_tokens != "auto" and context <= benchmark.max_new_tokens:
                raise ValueError(
                    f"sampler.context {context} leaves no room for a prompt beside max_new_tokens "
                    f"{benchmark.max_new_tokens} of benchmark {benchmark.name}; raise the one or lower the other"
                )
        if held != "auto" and held < context:
            raise ValueError(
                f"optimizer.micro_batch_tokens {held} cannot hold one rollout of sampler.context {context} tokens; "
                "raise the one or lower the other"
            )

    def _check_in_flight(self) -> None:
        """Of weights that come while rollouts are in flight."""
        rollout, mode = self.rollout, self.weights.sync_mode
        if mode == "finish":
            if rollout.order == "arrival":
                raise ValueError(
                    "rollout.order: arrival keeps groups in flight while weights change, and weights.sync_mode: finish "
                    "waits for them; set sync_mode to retract, in_place or abort, or leave order out"
                )
            return
        if self.sampler.deterministic is True or not rollout.max_staleness:
            raise ValueError(
                f"weights.sync_mode {mode} is for weights that come while rollouts are in flight: it needs "
                f"rollout.max_staleness above 0 (found {rollout.max_staleness}) and sampler.deterministic: false "
                f"(found {str(self.sampler.deterministic).lower()}); use finish"
            )
        if mode == "abort" and rollout.stop:
            raise ValueError(
                "weights.sync_mode abort ends answers and asks for the rest: a text of rollout.stop "
                f"{list(rollout.stop)} that stands across that place would be missed; use retract or in_place, or "
                "rollout.stop_token_ids"
            )
        if rollout.partial_rollout_tokens and (rollout.partial_rollouts == "mask" or rollout.max_staleness < 2):
            raise ValueError(
                f"weights.sync_mode {mode} with rollout.partial_rollout_tokens {rollout.partial_rollout_tokens} needs "
                f"partial_rollouts: correct (found {rollout.partial_rollouts}; mask would leave out whatever the "
                f"newest weights did not sample) and max_staleness 2 at least (found {rollout.max_staleness}); use "
                "finish"
            )

    def _check_placement(self) -> None:
        sampler, placement = self.sampler, self.placement
        if placement == "shared" and self.rollout.is_sampled and self.rollout.max_staleness:
            raise ValueError(
                f"placement: shared with rollout.max_staleness {self.rollout.max_staleness}: samplers that generate "
                "ahead of the trainer need memory while it works; use beside or separate, or set max_staleness to 0"
            )
        if placement == "shared" and sampler.has_others:
            raise ValueError(
                "placement: shared with sampler.urls or urls_file: servers of others have memory of their own; use "
                "beside, or separate"
            )
        if placement not in ("shared", "auto") and self.lends_states is True:
            raise ValueError(f"lends_states: true with placement: {placement}, where nobody takes turns; leave it out")
        for name in ("gpus", "nodes") if placement not in ("separate", "auto") else ():
            if (value := getattr(sampler, name)) not in ("auto", 0, ()):
                raise ValueError(f"sampler.{name} {value} with placement: {placement}; set placement to separate")
        if sampler.nodes and sampler.gpus not in ("auto", ()):
            raise ValueError(
                f"sampler.nodes {sampler.nodes} and sampler.gpus {sampler.gpus}: samplers have whole nodes, or GPUs of "
                "the trainer's; leave one of them out"
            )
        if placement == "separate" and self.resources.device == "cpu" and not sampler.nodes:
            raise ValueError(
                "placement: separate on CPUs without sampler.nodes: processes of one machine share its cores; use "
                "beside, or give samplers nodes"
            )

    def check_resources(self) -> None:
        """Raise ValueError for what resources and samplers cannot do; asked again when nothing is `auto`."""
        weights, sampler, ranks = self.weights, self.sampler, self.resources.num_ranks
        self._check_context()
        self._check_in_flight()
        self._check_placement()
        if ranks != "auto" and ranks % self.optimizer.sequence_parallel:
            raise ValueError(
                f"optimizer.sequence_parallel {self.optimizer.sequence_parallel} ranks share each row, and "
                f"resources.num_ranks {ranks} is not a multiple of it; change one of them"
            )
        if sampler.deterministic is True and self.resources.device == "cuda":
            raise ValueError(
                "sampler.deterministic: true on a GPU, whose sums have another order with each batch; set it to "
                "false, or leave it out"
            )
        if weights.sync_backend == "nccl" and self.resources.device == "cpu":
            raise ValueError("weights.sync_backend: nccl needs GPUs, and resources.device is cpu; use gloo")
        if weights.sync_backend == "nccl" and self.placement in ("beside", "shared") and not sampler.has_others:
            raise ValueError(
                f"weights.sync_backend: nccl with placement: {self.placement}, and NCCL refuses two processes on one "
                "GPU; use gloo, or placement: separate"
            )
        gpus = [number for number in (ranks, sampler.replicas, sampler.tensor_parallel) if number != "auto"]
        if weights.sync == "ipc" and self.resources.device == "cuda" and max(gpus) > 1:
            raise ValueError(
                f"weights.sync: ipc with {max(gpus)} GPUs: rank 0 shares memory of its own GPU, which samplers on "
                "others cannot open; use disk or distributed"
            )
        if weights.sync == "ipc" and (why := self._why_elsewhere()):
            raise ValueError(
                f"weights.sync: ipc with {why}, which cannot open the memory that rank 0 shares; use disk or "
                "distributed"
            )
        if self.only == "rollouts" and sampler.has_others and weights.sync != "disk":
            raise ValueError(
                f"weights.sync: {weights.sync} with only: rollouts and servers of others: they take the input model "
                "from its folder, as there is no trainer to give it; use disk"
            )
        if weights.sync_check_every in ("auto", 0):
            return
        if sampler.tensor_parallel > 1:
            raise ValueError(
                f"weights.sync_check_every {weights.sync_check_every}: weights cannot be verified yet where they are "
                f"split over GPUs (sampler.tensor_parallel {sampler.tensor_parallel}); leave it out"
            )
        if sampler.engine == "sglang" and self.resources.device == "cuda":
            raise ValueError(
                f"weights.sync_check_every {weights.sync_check_every}: SGLang fingerprints weights in another way on a "
                "GPU, which is not verified yet; leave it out. The difference of log-probabilities is still looked at "
                "in each step"
            )

    def _why_elsewhere(self) -> str:
        """What puts samplers on another machine, or on another GPU than rank 0's; empty for nothing."""
        sampler = self.sampler
        if sampler.nodes:
            return f"sampler.nodes {sampler.nodes}, samplers of other machines"
        if self.placement == "separate" and self.resources.device == "cuda":
            return "placement: separate, samplers on other GPUs"
        away = [url for url in map(parse_address, sampler.urls) if not url.is_here]
        return f"sampler.urls {away[0].url}, a sampler of another machine" if away else ""

    def _check_models(self) -> None:
        algorithm = self.algorithm
        for label, model in (
            ("critic", algorithm.critic.model),
            ("reference", algorithm.reference.model),
            ("teacher", algorithm.teacher.model),
        ):
            if (model == "input") != (label in self.inputs):
                way = f"name a stage as inputs.{label}" if model == "input" else f"set {label}.model to input"
                labels = listed(self.inputs)
                raise ValueError(f"algorithm.{label}.model {model!r} and inputs ({labels}) do not fit together; {way}")
        if algorithm.teacher.url != "none" and self.rollout.temperature != 1.0:
            raise ValueError(
                f"algorithm.teacher.url with rollout.temperature {self.rollout.temperature}: servers score a prompt at "
                "temperature 1; set it to 1.0, or use teacher.model"
            )

    def _check_advantage(self) -> None:
        algorithm, rollout, critic = self.algorithm, self.rollout, self.algorithm.critic
        if algorithm.has_critic:
            if critic.warmup_steps >= self.num_steps and not self.num_epochs:
                raise ValueError(
                    f"algorithm.critic.warmup_steps {critic.warmup_steps} leaves the policy untrained in all num_steps "
                    f"{self.num_steps}; lower it"
                )
            is_updated_once = self.optimizer.updates_per_step * critic.epochs == 1
            if is_updated_once and critic.value_clip != CriticConfig.model_fields["value_clip"].default:
                raise ValueError(
                    f"algorithm.critic.value_clip {critic.value_clip} bounds nothing while a step updates the critic "
                    "once; raise critic.epochs or optimizer.updates_per_step, or leave it out"
                )
        traits = algorithm.advantage.traits
        is_alone = rollout.samples_per_prompt == 1 and rollout.generate.is_one_turn and not rollout.clone.best
        if is_alone and traits is not None and traits.compares_groups:
            raise ValueError(
                f"rollout.samples_per_prompt 1 leaves advantage {algorithm.advantage} nothing to compare; raise it, or "
                "use gae or reinforce_pp"
            )

    def mixtures(self) -> Iterator[tuple[str, tuple[SourceConfig, ...]]]:
        """Its prompts, and those of its evaluation."""
        yield "data", self.data
        yield "evaluation.validation", self.evaluation.validation

    def external_inputs(self) -> Iterator[ExternalInput]:
        """Models beside the policy from folders, a teacher's server, and saved rollouts."""
        algorithm, rollout = self.algorithm, self.rollout
        for label in ("teacher", "critic", "reference"):
            if (model := getattr(algorithm, label).model).startswith("/"):
                yield ExternalInput(f"algorithm.{label}.model", "model", model)
        if algorithm.teacher.url != "none":
            yield ExternalInput("algorithm.teacher.url", "server", algorithm.teacher.url)
        if not rollout.is_sampled:
            yield ExternalInput("rollout.source", "rollouts", rollout.source, self.num_steps)

    def load_entry(self, entry: EntryConfig) -> Callable[..., Any]:
        """The function that an entry names, with its options and the settings that it takes."""
        return self.algorithm.load(entry)

    @property
    def learned_sources(self) -> tuple[SourceConfig, ...]:
        """The prompts that its model is trained on."""
        return self.data

    @property
    def lora_rank(self) -> int:
        """Rank of the adapters that are trained in the place of all weights; 0 without."""
        return self.optimizer.lora_rank

    @property
    def sglang(self) -> SamplerConfig | None:
        """The section of samplers that run SGLang; None without such."""
        return self.sampler if self.has_samplers and self.sampler.engine == "sglang" else None

    @property
    def measures_held_out(self) -> bool:
        """Whether rows that its data hold out are read."""
        return self.evaluation.eval_prompts > 0 and not self.evaluation.validation

    @property
    def machines(self) -> dict[str, int]:
        """Settings that take other machines -> how many machines each names."""
        return super().machines | ({"sampler.nodes": self.sampler.nodes} if self.sampler.nodes else {})

    def num_gpus(self, available: int) -> int:
        """GPUs of a node, once nothing is `auto`: as many as its ranks, or as all its samplers where that is more;
        embedded ones do with the `available` ones where these are fewer. Where samplers have GPUs of their own, both
        together."""
        ranks = super().num_gpus(available)
        if self.placement == "separate":
            assert isinstance(self.sampler.gpus, tuple)  # derived
            own = self.sampler.gpus
            return max([ranks + len(own), *(number + 1 for number in own)])  # a number counts from the node's first
        gpus = int(self.sampler.replicas) * self.sampler.tensor_parallel if self.has_samplers else 0
        return max(ranks, gpus if self.sampler.engine == "sglang" else min(gpus, available))

    @property
    def trainer(self) -> OptimizerSection:
        """The section with precision, zero_stage, micro_batch_tokens and activation_checkpointing."""
        return self.optimizer

    @property
    def held_models(self) -> tuple[int, int]:
        """Policy and critic; reference and teacher, which each rank holds whole (nanodag.rl.trainer.trainer)."""
        algorithm = self.algorithm
        return 1 + algorithm.has_critic, algorithm.has_reference + (algorithm.teacher.model != "none")

    @property
    def room_share(self) -> float:
        """Share of a rank's memory that samplers leave to it."""
        if not self.shares_memory:
            return 1.0
        if self.placement == "shared" and self.lends_states is not False:
            return ROOM_IN_TURNS
        return 1 - float(self.sampler.memory_fraction)

    @property
    def step_size(self) -> tuple[int, int, int, int]:
        """Tokens of a step, tokens of a row; rows go to ranks in any way, and some ranks share each row."""
        rollout = self.rollout
        tokens = rollout.prompts_per_step * rollout.samples_per_prompt * rollout.max_new_tokens
        return tokens, rollout.max_new_tokens, 0, self.optimizer.sequence_parallel

    @property
    def own_gpus(self) -> int:
        """GPUs of a node that its ranks leave to samplers."""
        return len(self.sampler.gpus) if isinstance(self.sampler.gpus, tuple) else 0

    def before_ranks(self, found: Derived) -> Self:
        """The stage with the trainer's precision, and the GPUs that samplers have to themselves."""
        return own_gpus(rl_precision(self, model_of(found.pipeline, found.name), found), found)

    def ranks_on_cpu(self, model: ModelSize | None, found: Derived) -> list[int]:
        """How many ranks a node without GPUs may have beside its samplers."""
        return rl_ranks_on_cpu(found)

    def after_ranks(self, model: ModelSize | None, found: Derived) -> Self:
        """The stage without any `auto`. Raises ConfigError for what its resources cannot do."""
        stage = derive_sampler(found.name, placed(self, model, found), found.machine, model, found.origins)
        stage = fit_rl(stage, model, found)
        try:
            stage.check_resources()
        except ValueError as error:
            raise ConfigError(f"stages.{found.name}.{error}.") from error
        if stage.lora_rank and (width := width_from_scratch(found.pipeline, found.name)):
            check_lora(found.name, stage.lora_rank, width, found.pipeline.unchecked)
        return stage

    def own_evaluation(self, name: str) -> EvalStage | None:
        """The benchmarks that it asks its policy, as an eval stage with the same items, samples and seeds."""
        fields = set(BenchmarkConfig.model_fields)
        asked = [benchmark.model_dump(mode="json", include=fields) for benchmark in self.evaluation.benchmarks]
        made = {"kind": "eval", "inputs": {"model": name}, "benchmarks": asked, "seed": self.seed}
        return EvalStage.model_validate(made | {"max_new_tokens": self.rollout.max_new_tokens}) if asked else None

    @property
    def has_trainer(self) -> bool:
        """Whether anything is trained."""
        return self.only != "rollouts"

    @property
    def has_samplers(self) -> bool:
        """Whether anything is sampled: to be trained, or in an evaluation."""
        return self.rollout.is_sampled or bool(self.evaluated)

    @property
    def shares_memory(self) -> bool:
        """Whether the trainer's devices hold samplers too."""
        is_alone = not self.has_samplers or (self.sampler.has_others and self.sampler.replicas in ("auto", 0))
        return self.placement != "separate" and not is_alone

    @property
    def has_process_reward(self) -> bool:
        """Whether the reward scores single steps of a response."""
        return any(reward.traits is not None and reward.traits.scores_steps for reward in self.reward)

    def _check_reward(self) -> None:
        if not self.reward or not all(reward.weight for reward in self.reward):
            weights = listed(f"{reward.name} {reward.weight:g}" for reward in self.reward)
            raise ValueError(f"reward ({weights}) has nothing to add up, or a weight of 0; name rewards with weights")
        names = [reward.name for reward in self.reward]
        for source in (*self.data, *self.evaluation.validation):
            if source.reward != "auto" and "auto" not in names:
                raise ValueError(
                    f"reward {listed(names)} judges every prompt, so the reward {source.reward} of {source.url} means "
                    "nothing; leave out one of them"
                )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"reward {twice[0]} stands twice; name it once, with the sum of the weights")
        for reward in self.reward:
            if (traits := reward.traits) is not None and traits.is_of_generate and self.rollout.generate.is_one_turn:
                raise ValueError(
                    f"reward {reward.name} is what a function that generates says, and generate one_turn says none; "
                    "name another reward, or a function as rollout.generate"
                )
            if traits is None:
                continue
            if traits.scores_steps:
                self._check_process_reward(reward)
            if self.rollout.reward_timeout_s < traits.least_timeout_s:
                raise ValueError(
                    f"rollout.reward_timeout_s {self.rollout.reward_timeout_s:g} is below {traits.least_timeout_s:g}, "
                    f"what the reward {reward.name} takes, so a program that hangs would fail instead of being wrong; "
                    "raise it"
                )

    def _check_process_reward(self, reward: RewardConfig) -> None:
        if self.rollout.generate.name.partition(":")[0] in ("agent", "verifiers"):
            raise ValueError(
                f"reward {reward.name} scores the steps of a response, and what generate {self.rollout.generate.name} "
                "answers has no place in the tokens; name a reward of whole answers"
            )
        if len(self.reward) > 1 or reward.weight != 1.0:
            raise ValueError(
                f"reward {reward.name} scores steps, which cannot be added to other rewards; name it alone, without a "
                "weight, and let it score what the others would as steps"
            )
        traits = self.algorithm.advantage.traits
        if traits is None or not traits.takes_steps:
            fitting = [name for name, entry in registry.entries_of("advantage").items() if entry.takes_steps]
            raise ValueError(
                f"algorithm.advantage {self.algorithm.advantage} is of whole responses, and the reward {reward.name} "
                f"scores their steps; use {' or '.join(sorted(fitting, reverse=True))}"
            )
        if self.rollout.overlong_buffer:
            raise ValueError(
                f"rollout.overlong_buffer {self.rollout.overlong_buffer} takes off a response's reward, and with "
                f"{reward.name} its steps are trained; set it to 0, and let the function score the length as a step"
            )
        if self.algorithm.kl_in == "reward" and not traits.needs_critic:
            raise ValueError(
                f"algorithm.kl_in: reward takes a sum off a response's reward, and with {reward.name} its steps are "
                "trained; use kl_in: loss, or advantage gae"
            )


KIND = Kind(
    name="rl",
    config=RLStage,
    module="nanodag.rl",
    code_version=3,
    makes=MODEL,
    needs={"model": MODEL},
    may_take={"critic": MODEL, "reference": MODEL, "teacher": MODEL},
    trains=True,
    label="RL",
    order=60,
    lower_rate="learning_rate=5e-7",
    less_memory="micro_batch_tokens=2048",
)
