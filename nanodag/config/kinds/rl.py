"""Reinforcement learning."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from nanodag.config.derive_hardware import Derived, fit_rl, own_gpus, placed, rl_precision, rl_ranks_on_cpu
from nanodag.config.derive_sampler import derive_sampler
from nanodag.config.derive_schedule import model_of, width_from_scratch
from nanodag.config.hardware_rules import ROOM_IN_TURNS
from nanodag.config.kind import MODEL, Kind
from nanodag.config.kinds.evaluation import BenchmarkConfig, EvalStage
from nanodag.config.model_size import ModelSize
from nanodag.config.rl_checks import check, check_lora
from nanodag.config.rl_entries import EntryConfig
from nanodag.config.rl_sections import (
    HELD_OUT,
    AlgorithmSection,
    EvaluationSection,
    OptimizerSection,
    RolloutSection,
    WeightsSection,
)
from nanodag.config.sampled_stage import SampledStage
from nanodag.config.section import Auto, operational
from nanodag.config.stage_base import ExternalInput, TrainedStage
from nanodag.data.config import SourceConfig
from nanodag.errors import ConfigError


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
    keep_weights_every: int = operational(0, ge=0)
    """The weights of each step that this number divides are kept as a Hugging Face folder in the artifact's records,
    weights/step-STEP; 0 for none."""

    @model_validator(mode="after")
    def _combination(self) -> "RLStage":
        self.resources.check_offload(zero_stage=self.optimizer.zero_stage, optimizer="adamw")
        check(self)
        return self

    @property
    def best_metric(self) -> str:
        """HELD_OUT or the name of the benchmark that says which weights are left; empty for the last ones."""
        return self.keep.partition(":")[2]

    @property
    def evaluated(self) -> list[str]:
        """Evaluations of policies: names of benchmarks, HELD_OUT for held-out prompts."""
        has_prompts = self.evaluation.validation or any(source.held_out for source in self.data)
        names = [benchmark.name for benchmark in self.evaluation.benchmarks]
        return [*names, *[HELD_OUT] * bool(self.evaluation.eval_prompts and has_prompts)]

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
        return self.algorithm.load(entry)

    @property
    def lora_rank(self) -> int:
        return self.optimizer.lora_rank

    @property
    def measures_held_out(self) -> bool:
        return self.evaluation.eval_prompts > 0 and not self.evaluation.validation

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
        return self.optimizer

    @property
    def held_models(self) -> tuple[int, int]:
        """Policy and critic; reference and teacher, which each rank holds whole (nanodag.rl.trainer.trainer)."""
        algorithm = self.algorithm
        return 1 + algorithm.has_critic, algorithm.has_reference + (algorithm.teacher.model != "none")

    @property
    def room_share(self) -> float:
        is_alone = not self.has_samplers or (self.sampler.has_others and self.sampler.replicas in ("auto", 0))
        if self.placement == "separate" or is_alone:
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
        return len(self.sampler.gpus) if isinstance(self.sampler.gpus, tuple) else 0

    def before_ranks(self, derived: Derived) -> Self:
        """The stage with the trainer's precision, and the GPUs that samplers have to themselves."""
        return own_gpus(rl_precision(self, model_of(derived.pipeline, derived.name), derived), derived)

    def ranks_on_cpu(self, model: ModelSize | None, derived: Derived) -> list[int]:
        """Numbers of ranks that a node without GPUs may have beside its samplers."""
        return rl_ranks_on_cpu(derived)

    def after_ranks(self, model: ModelSize | None, derived: Derived) -> Self:
        """The stage without any `auto`. Raises ConfigError for what its resources cannot do."""
        stage = derive_sampler(derived.name, placed(self, model, derived), derived.machine, model, derived.origins)
        stage = fit_rl(stage, model, derived)
        try:
            check(stage)
        except ValueError as error:
            raise ConfigError(f"stages.{derived.name}.{error}.") from error
        if stage.lora_rank and (width := width_from_scratch(derived.pipeline, derived.name)):
            check_lora(derived.name, stage.lora_rank, width)
        return stage

    def own_evaluation(self, name: str) -> EvalStage | None:
        """The benchmarks that it asks its policy, as an eval stage with the same items, samples and seeds."""
        fields = set(BenchmarkConfig.model_fields)
        benchmarks = [benchmark.model_dump(mode="json", include=fields) for benchmark in self.evaluation.benchmarks]
        made = {"kind": "eval", "inputs": {"model": name}, "benchmarks": benchmarks, "seed": self.seed}
        return EvalStage.model_validate(made | {"max_new_tokens": self.rollout.max_new_tokens}) if benchmarks else None

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
