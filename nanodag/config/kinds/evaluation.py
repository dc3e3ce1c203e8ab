"""Evaluation of a model."""

from typing import Literal

from pydantic import Field, model_validator

from nanodag.config.section import Auto, Precision, Section, operational
from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig


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
