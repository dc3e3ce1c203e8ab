"""Evaluation during RL."""

from pydantic import Field, model_validator

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.config.section import Auto, Positive, StageSection
from nanodag.data.config import SourceConfig

HELD_OUT = "eval_reward"
"""What the evaluation on held-out prompts is called where benchmarks are called by their names."""


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

    @model_validator(mode="after")
    def _names_differ(self) -> "EvaluationSection":
        names = [benchmark.name for benchmark in self.benchmarks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two benchmarks are called {twice[0]!r}; give each a name and say what it is with `form`")
        if HELD_OUT in names:
            raise ValueError(f"{HELD_OUT} is the reward on held-out prompts; give the benchmark another name")
        if core := [benchmark.name for benchmark in self.benchmarks if benchmark.is_core]:
            raise ValueError(f"benchmark {core[0]!r} is scored by likelihood; only an eval stage can ask it")
        return self

    def interval(self, name: str) -> int:
        """Steps between evaluations on a benchmark, or on the held-out prompts."""
        own = {benchmark.name: benchmark.every for benchmark in self.benchmarks if benchmark.every != "auto"}
        return int(own.get(name, self.eval_every))

    def is_time(self, name: str, step: int, *, num_steps: int) -> bool:
        """True where the weights of a step are evaluated on a benchmark, or on the held-out prompts."""
        return self.eval_at_start if step == 0 else step % self.interval(name) == 0 or step == num_steps
