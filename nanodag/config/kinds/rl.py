"""Reinforcement learning; and best of n: answers of a model that a reward chose, as conversations for SFT."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError

from nanodag.config import derive
from nanodag.config import rl_sections as sections
from nanodag.config.derive_sampler import SHARE_BESIDE_TRAINER, derive_sampler
from nanodag.config.kinds.evaluation import EvalStage, asked_in_training
from nanodag.config.model_size import ModelSize, model_of, pretrain_of
from nanodag.config.rl_checks import check, check_lora
from nanodag.config.rl_parts import EntryConfig, SampledStage
from nanodag.config.section import Auto, later, operational
from nanodag.config.stage_base import ExternalInput, TrainedStage, answer, from_setting
from nanodag.data.config import SourceConfig
from nanodag.errors import ConfigError
from nanodag.host.machine import Machine


class RLStage(SampledStage, TrainedStage):
    """GRPO and its relatives (input `model`)."""

    plan_formula: ClassVar[str] = "nanodag.plan.rl:RL"
    asks_policy: ClassVar[bool] = True
    scores_tokens: ClassVar[bool] = True

    placement: Literal["beside", "shared", "separate"] | Auto = operational("auto")
    """Where samplers lie. `beside`: on the trainer's GPUs, at the same time, each with a share of the memory. `shared`:
    on them in turns, and who does not work lends its memory; max_staleness must be 0. `separate`: on GPUs or nodes of
    their own (sampler.gpus, sampler.nodes). `auto`: `beside`, but `shared` where only that keeps the optimizer on a
    GPU."""
    lends_states: bool | Auto = operational("auto")
    """With `shared`: whether the trainer's weights, optimizer states and gradients wait in host memory while samplers
    work. `auto`: on GPUs."""
    only: Literal["both", "rollouts"] = "both"
    """`rollouts`: responses are generated and scored, and nothing is trained; the stage leaves the model that it began
    with. To train without generating, name files as rollout.source."""
    rollout: sections.RolloutSection = sections.RolloutSection()
    """Which responses are generated and kept."""
    algorithm: sections.AlgorithmSection = sections.AlgorithmSection()
    """Advantages and the loss."""
    optimizer: sections.OptimizerSection = sections.OptimizerSection()
    """The trainer's steps."""
    weights: sections.WeightsSection = sections.WeightsSection()
    """How new weights reach the samplers."""
    evaluation: sections.EvaluationSection = sections.EvaluationSection()
    """Evaluation on held-out prompts and benchmarks."""
    keep: str = Field("last", pattern="^(last|best:.+)$")
    """The weights that the stage leaves: the `last` ones, or those of the evaluation that was `best` by a metric, the
    earliest of equal ones. `best:eval_reward` is the reward on held-out prompts. `best:NAME` is the main metric of that
    benchmark of `evaluation`."""
    keep_weights_every: int = operational(0, ge=0)
    """The weights of each step that this number divides are kept as a Hugging Face folder in the artifact's records,
    weights/step-STEP; 0 for none."""

    def check_settings(self) -> None:
        self.resources.check_offload(zero_stage=self.optimizer.zero_stage, optimizer="adamw")
        check(self)

    @property
    def best_metric(self) -> str:
        """HELD_OUT or the name of the benchmark that says which weights are left; empty for the last ones."""
        return self.keep.partition(":")[2]

    @property
    def evaluated(self) -> list[str]:
        """Evaluations of policies: names of benchmarks, HELD_OUT for held-out prompts."""
        has_prompts = self.evaluation.validation or any(source.held_out for source in self.data)
        names = [benchmark.name for benchmark in self.evaluation.benchmarks]
        return [*names, *[sections.HELD_OUT] * bool(self.evaluation.eval_prompts and has_prompts)]

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

    @property
    def shares_torch(self) -> str:  # type: ignore[override]
        through_host = self.weights.sync == "disk" or (
            self.weights.sync == "distributed" and self.weights.sync_backend == "gloo"
        )
        is_on_gpus = self.guest is not None and self.resources.device == "cuda" and not self.sampler.has_others
        return f"weights.sync={self.weights.sync}" if is_on_gpus and not through_host else ""

    def load_entry(self, entry: EntryConfig) -> Callable[..., Any]:
        return self.algorithm.load(entry)

    lora_rank = from_setting("optimizer.lora_rank")
    measures_held_out = answer(lambda s: sections.HELD_OUT in s.evaluated and not s.evaluation.validation)
    own_gpus = answer(lambda stage: len(stage.sampler.gpus) if isinstance(stage.sampler.gpus, tuple) else 0)

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
        return max(ranks, gpus if self.guest is not None else min(gpus, available))

    @property
    def trainer(self) -> sections.OptimizerSection:
        return self.optimizer

    @property
    def held_models(self) -> tuple[int, int]:  # type: ignore[override]
        """Policy and critic; reference and teacher, which are only asked."""
        algorithm = self.algorithm
        return 1 + algorithm.has_critic, algorithm.has_reference + (algorithm.teacher.model != "none")

    @property
    def room_share(self) -> float:  # type: ignore[override]
        is_alone = not self.has_samplers or (self.sampler.has_others and self.sampler.replicas in ("auto", 0))
        if self.placement == "separate" or is_alone:
            return 1.0
        if self.placement == "shared" and self.lends_states is not False:
            return derive.ROOM_IN_TURNS
        return 1 - float(self.sampler.memory_fraction)

    @property
    def step_size(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        """Tokens of a step, tokens of a row; rows go to ranks in any way, and some ranks share each row."""
        rollout = self.rollout
        tokens = rollout.prompts_per_step * rollout.samples_per_prompt * rollout.max_new_tokens
        return tokens, rollout.max_new_tokens, 0, self.optimizer.sequence_parallel

    def before_ranks(self, derived: derive.Derived) -> Self:
        """The stage with the trainer's precision, narrow models on a CPU in float32, and the GPUs that samplers have to
        themselves, by number. Raises ConfigError where that leaves the trainer none, or one is not there."""
        is_on_gpu, model = self.resources.device == "cuda", model_of(derived.pipeline, derived.name)
        is_narrow = not is_on_gpu and model is not None and model.shape.width < derive.NUMBERS["least_bf16_width"]
        of_optimizer, of_sampler = derived.filler(self.optimizer, "optimizer"), derived.filler(self.sampler, "sampler")
        precision, why = "fp32" if is_narrow else derived.fastest(self), "precision_rl" if is_narrow else "precision"
        of_optimizer("precision", precision, derived.why(why))
        total = derived.machine.num_gpus
        is_separate = self.placement == "separate" and is_on_gpu and not self.sampler.nodes
        gpus = of_sampler("gpus", max(1, total // 2) if is_separate else (), derived.why("sampler_gpus"))
        # -1 is no GPU: too many are refused below, and a list of 10^15 is never made.
        numbers = tuple(range(max(total - gpus, -1), total)) if isinstance(gpus, int) else gpus
        if is_separate and (not numbers or len(set(numbers)) != len(numbers) or not set(numbers) < set(range(total))):
            raise ConfigError(
                f"{derived.name}.sampler.gpus: {self.sampler.gpus} of this machine's {total} leaves samplers or "
                "trainer without a GPU of its own; name some of "
                f"{', '.join(map(str, range(total))) or 'none'}, not all."
            )
        of_sampler.updates["gpus"] = numbers
        return self.model_copy(update={"optimizer": of_optimizer.filled, "sampler": of_sampler.filled})

    def ranks_on_cpu(self, model: ModelSize | None, derived: derive.Derived) -> list[int]:
        """Numbers of ranks that a node without GPUs may have beside its samplers, ascending."""
        derived.note("resources.num_ranks", "ranks_rl_cpu")
        most = min(derive.NUMBERS["max_cpu_ranks"], derived.machine.cores // derive.NUMBERS["rl_cores_a_rank"])
        return list(range(1, max(1, most) + 1))

    def after_ranks(self, model: ModelSize | None, derived: derive.Derived) -> Self:
        """The stage without any `auto`. Raises ConfigError for what its resources cannot do."""
        fill = derived.filler(self)
        chosen = "shared" if self._gains_by_turns(model, derived.machine) else "beside"
        placement = fill("placement", chosen, derived.why(f"placement_{chosen}"))
        is_lent = placement == "shared" and self.resources.device == "cuda"
        fill("lends_states", is_lent, derived.why("lends_states"))
        derive.check_heads(derived.name, self.optimizer.sequence_parallel, model)
        stage = derive_sampler(derived.name, fill.filled, derived.machine, model, derived.origins)
        stage = stage._with_trainer(model, derived)
        try:
            check(stage)
        except ValueError as error:
            raise ConfigError(f"stages.{derived.name}.{error}.") from error
        if stage.lora_rank and model is not None and pretrain_of(derived.pipeline, derived.name) is not None:
            check_lora(derived.name, stage.lora_rank, model.shape.width)
        if stage.rollout.router_replay and model is not None and model.active_mlp_width is None:
            raise ConfigError(f"{derived.name}.rollout.router_replay: true, but the model has no experts; omit it.")
        return stage

    def _gains_by_turns(self, model: ModelSize | None, machine: Machine) -> bool:
        """True where the optimizer's states stay on the GPU where the trainer has it in turns, and beside samplers
        not."""
        sampler = self.sampler
        if model is None or machine.gpu is None or self.resources.device != "cuda":
            return False
        if sampler.engine == "vllm" or (sampler.engine != "embedded" and self.weights.lora_sync == "adapter"):
            return False  # they keep their memory
        if self.resources.offload_optimizer != "auto" or sampler.nodes or sampler.gpus != () or sampler.has_others:
            return False
        if self.rollout.max_staleness or self.lends_states is False:
            return False
        states = 2 * derive.state_bytes(self, model, int(self.resources.num_ranks))
        share = SHARE_BESIDE_TRAINER if sampler.memory_fraction == "auto" else sampler.memory_fraction
        sampler = sampler.model_copy(update={"memory_fraction": share})
        placements = ("beside", "shared")
        beside, shared = (self.model_copy(update={"placement": each, "sampler": sampler}) for each in placements)
        return derive.rank_room(beside, machine, 1) < states <= derive.rank_room(shared, machine, 1)

    def _with_trainer(self, model: ModelSize | None, derived: derive.Derived) -> Self:
        """The stage with offload, activation checkpointing, micro-batch and compilation, once its context is known."""
        device, context, machine = str(self.resources.device), int(self.sampler.context), derived.machine
        stage = derive.offloaded(self, model, True, derived)
        optimizer, limit = self.optimizer, derive.NUMBERS[f"rl_tokens_{device}"]
        fill = derived.filler(optimizer, "optimizer")
        least = min(derive.NUMBERS["least_tokens"], limit) if device == "cuda" else context
        tokens = least if optimizer.micro_batch_tokens == "auto" else int(optimizer.micro_batch_tokens)
        is_tight = derive.fitting_tokens(stage, model, derived, checkpointed=False) < max(tokens, context)
        is_checkpointed = bool(fill("activation_checkpointing", is_tight, derived.why("checkpointing")))
        most = min(limit, derive.fitting_tokens(stage, model, derived, checkpointed=is_checkpointed))
        most, why = 1 << (max(most, 1).bit_length() - 1), "micro_rl"
        if device == "cuda" and (model is None or machine.gpu is None):
            most, why = derive.NUMBERS["rl_tokens_unknown"], "micro_rl_unknown"
        fill("micro_batch_tokens", max(most, context), derived.why(why, limit=f"{limit:,}"))
        is_fast = device == "cuda" or optimizer.precision == "bf16"
        fill("compile", is_fast and derive.has_compiler(device, machine), derived.why("compile_rl"))
        return stage.model_copy(update={"optimizer": fill.filled})

    def own_evaluation(self, name: str) -> EvalStage | None:
        """The benchmarks that it asks its policy, as an eval stage with the same items, samples and seeds."""
        how = {"seed": self.seed, "max_new_tokens": self.rollout.max_new_tokens}
        return asked_in_training(self.evaluation.benchmarks, inputs={"model": name}, **how)

    @property
    def has_trainer(self) -> bool:
        """True where anything is trained."""
        return self.only != "rollouts"

    @property
    def has_samplers(self) -> bool:
        """True where anything is sampled: to be trained, or in an evaluation."""
        return self.rollout.is_sampled or bool(self.evaluated)

    @property
    def has_process_reward(self) -> bool:
        """True where the reward scores single steps of a response."""
        return any(reward.traits is not None and reward.traits.scores_steps for reward in self.reward)


class SelectStage(SampledStage):
    """Rejection sampling (input `model`): rollout.samples_per_prompt answers to each prompt, of which the best are
    kept, or of which pairs are made. An `sft` stage, or one of kind `preference`, reads them as
    `input:conversations`."""

    plan_formula: ClassVar[str] = "nanodag.plan.rl:SELECT"

    rollout: sections.SamplingSection = sections.SamplingSection()
    """Which answers are generated."""
    best: int = Field(1, ge=1)
    """Different answers that are kept of each prompt, those with the highest rewards; of equal ones the first."""
    lowest_reward: float = 1.0
    """The least reward of an answer that is kept; in a pair, of the better one."""
    pairs: Literal["none", "best_worst", "all"] = later("none")
    """Preference pairs in the place of the best answers: the best and the worst answer to each prompt, or every two
    answers with different rewards."""

    def check_settings(self) -> None:
        if self.pairs != "none" and self.best != 1:
            raise ValueError(
                f"best {self.best} keeps single answers, and pairs: {self.pairs} makes pairs; leave one out"
            )
        self.as_rl()

    def as_rl(self) -> RLStage:
        """The RL stage that its worker runs: it samples and scores, and trains nothing. Raises ValueError for settings
        that make none."""
        context, sampler = self.sampler.context, self.sampler
        has_own_place = sampler.nodes > 0 or sampler.gpus not in ("auto", ())
        try:
            return RLStage.of(
                **self.model_dump(exclude={"kind", "best", "lowest_reward", "pairs"}),
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
                sync="disk",
                sync_check_every=0,
                mismatch_limit=1.0,
            )
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error

    def load_entry(self, entry: EntryConfig) -> Callable[..., Any]:
        return entry.load()

    def num_gpus(self, available: int) -> int:
        return self.as_rl().num_gpus(available)

    def after_ranks(self, model: ModelSize | None, derived: derive.Derived) -> Self:
        """The stage without any `auto`. Raises ConfigError for what its resources cannot do."""
        try:
            stage = self.as_rl()
        except ValueError as error:  # of what this machine makes of it
            raise ConfigError(f"stages.{derived.name}.{error}.") from error
        return self.model_copy(update={"sampler": stage.before_ranks(derived).after_ranks(model, derived).sampler})
