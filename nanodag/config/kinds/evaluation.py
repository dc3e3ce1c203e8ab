"""Evaluation of a model."""

from typing import Literal

from pydantic import Field, model_validator

from nanodag.config.kind import MODEL, SCORES, Kind
from nanodag.config.section import Auto, Positive, Precision, Section, operational
from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig
from nanodag.data.core_tasks import FEWEST_ITEMS


class BenchmarkConfig(Section):
    """One lm-eval task."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """The benchmark's name in results."""
    form: str = "auto"
    """How an item is asked: a form shipped in nanodag/evaluation/benchmarks, the path of an lm-eval YAML file, or
    `lm_eval:folder/file.yaml`. `auto`: the form called like the benchmark."""
    source: SourceConfig | None = None
    """Where the items come from; CORE without one takes the pipeline's core_bundle."""
    num_fewshot: int = Field(0, ge=0)
    """Worked examples before each item."""
    fewshot: SourceConfig | None = None
    """Where the worked examples come from."""
    limit: int = Field(0, ge=0)
    """Items, drawn at random by the stage's seed; 0 for all. Of CORE the first of each task, in nanochat's order."""

    @property
    def is_core(self) -> bool:
        """Whether it is CORE, which no form describes."""
        return "core" in (self.form, self.name)

    @model_validator(mode="after")
    def _has_worked_examples(self) -> "BenchmarkConfig":
        if self.is_core and 0 < self.limit < FEWEST_ITEMS:
            raise ValueError(f"limit {self.limit} of CORE is too few for its worked examples; take {FEWEST_ITEMS} or 0")
        return self


class EvalSamplerConfig(Section):
    """The embedded samplers that write answers. Their context is what each benchmark needs."""

    replicas: Positive | Auto = operational("auto")
    """Samplers at most; fewer where there is too little to write for so many. `auto`: one for each GPU of the machine,
    as far as others leave them; on a CPU a process a thread, 4 at most."""
    max_batch: Positive | Auto = operational("auto")
    """Answers that one sampler writes at once, as far as its cache holds them. `auto`: 256 on a GPU, 64 on a CPU."""
    cache_bytes: Positive | Auto = operational("auto")
    """Bytes of one sampler's keys and values. `auto`: 0.7 of a GPU less the weights; 0.25 of the host's memory for all
    samplers on a CPU."""


class EvalStage(StageBase):
    """Scores of a checkpoint (input `model`)."""

    benchmarks: tuple[BenchmarkConfig, ...] = Field(min_length=1)
    """The benchmarks that the model is evaluated on."""
    precision: Precision | Auto = "fp32"
    """Number format of the model."""
    batch_size: int = operational(64, ge=1)
    """Questions scored at once, where likelihoods answer them."""
    sampler: EvalSamplerConfig = EvalSamplerConfig()
    """The samplers that write answers."""
    chat: bool = True
    """Whether prompts pass the chat template; false for a base model."""
    bos: Literal["auto", "always", "never"] = "auto"
    """Whether texts outside the chat template begin with the tokenizer's bos token. `auto`: where the tokenizer itself
    puts it there, as lm-eval does."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest written answer, in tokens. An item whose prompt leaves it no room in the model's positions is not asked
    and counts as wrong, as `too_long`."""
    sample_prompts: tuple[str, ...] = ()
    """Prompts whose answers the report shows."""

    @model_validator(mode="after")
    def _names_differ(self) -> "EvalStage":
        names = [benchmark.name for benchmark in self.benchmarks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two benchmarks are called {twice[0]!r}; give each a name and say what it is with `form`")
        return self


KIND = Kind(
    name="eval",
    config=EvalStage,
    module="nanodag.evaluation",
    code_version=3,
    makes=SCORES,
    needs={"model": MODEL},
    is_beside=True,
    order=80,
    less_memory="batch_size=8",
)
