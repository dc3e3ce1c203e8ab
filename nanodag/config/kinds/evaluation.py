"""Evaluation of a model."""

import os
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from nanodag.config.derive import CORE_LEFT_OUT, Derived
from nanodag.config.derive_sampler import derive_evaluation
from nanodag.config.model_size import ModelSize
from nanodag.config.rl_parts import EngineConfig
from nanodag.config.section import Auto, Positive, Precision, Seconds, Section, later, operational
from nanodag.config.stage_base import StageBase, answer, from_setting
from nanodag.data.config import SourceConfig
from nanodag.data.core_tasks import FEWEST_ITEMS, bundle_url
from nanodag.errors import ConfigError
from nanodag.errors.words import counted, listed
from nanodag.inference.engine_install import TITLES

OVER_SAMPLES = re.compile(r"(avg|maj|pass)@([1-9][0-9]*)")
"""A metric over the samples of an item: its name, and how many samples it is of."""


class ThinkingConfig(Section):
    """The tags around thinking text."""

    begin: str = Field("<think>", min_length=1)
    """What thinking begins with. A chat template may have written it already."""
    end: str = Field("</think>", min_length=1)
    """What thinking ends with. An answer is what stands behind the last of these."""


class BenchmarkConfig(Section):
    """One lm-eval task."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """The benchmark's name in results."""
    form: str = "auto"
    """How an item is asked: a form shipped in nanodag/evaluation/benchmarks, the path of an lm-eval YAML file, or
    `lm_eval:folder/file.yaml`. `auto`: the form called like the benchmark."""
    source: SourceConfig | None = None
    """Where the items come from; CORE without one takes the pipeline's core_bundle."""
    num_fewshot: int = Field(0, ge=0, le=1_000_000)
    """Worked examples before each item."""
    fewshot: SourceConfig | None = None
    """Where the worked examples come from."""
    limit: int = Field(0, ge=0)
    """Items, drawn at random by the stage's seed; 0 for all. Of CORE the first of each task, in nanochat's order."""
    num_samples: int = Field(1, ge=1, le=1_000_000)
    """Answers that are written to each item."""
    temperature: float = Field(0.0, ge=0.0, le=10)
    """Sampling temperature; at 0 each token is the likeliest one."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Tokens are drawn from the likeliest ones that together have this probability."""
    top_k: int = Field(0, ge=0)
    """Tokens are drawn from that many likeliest ones; 0 for all."""
    seed: int | Auto = "auto"
    """What answers are drawn with, together with the item and the number of the sample. `auto`: the stage's seed."""
    metrics: tuple[Annotated[str, Field(pattern=f"^{OVER_SAMPLES.pattern}$")], ...] = ()
    """What is told of several samples, the main one first: `avg@n` (mean), `pass@k` (chance that one of k is right),
    `maj@n` (whether most samples agree on the right answer), n being num_samples. `avg@n` is always there."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer, beside those of the form. They end thinking too."""
    system: str = ""
    """The system prompt of a chat, before that of the item."""
    max_new_tokens: Annotated[int, Field(ge=1, le=100_000_000)] | Auto = "auto"
    """Longest written answer, in tokens, thinking included. `auto`: the stage's max_new_tokens."""
    thinking: ThinkingConfig | None = None
    """Thinking text between these tags is left out of the answer that is scored."""
    judge: str = later("none")
    """The file of a judge that compares each answer with that of the evaluation `baseline` (an input) to the same item,
    in both orders; the score is then the win rate. `none` for the form's own score."""
    options: dict[str, bool | int | float | str] = {}
    """Of the form `verifiers`: verifiers' own options by their dotted names, such as `agent.max_turns`."""

    def check_settings(self) -> None:
        if self.options and not self.is_environment:
            raise ValueError(
                f"benchmark {self.name!r}: options {', '.join(self.options)} are those of an environment, and its form "
                f"is {self.form}; leave them out, or set form: verifiers"
            )
        if self.judge != "none" and (not self.judge.startswith("/") or self.num_samples > 1 or self.metrics):
            raise ValueError(
                f"judge {self.judge!r} must be an absolute path; it compares one answer an item, no metrics"
            )
        if self.judge != "none" and self.is_core:
            raise ValueError("CORE is scored by likelihood, so a judge has no answers to compare; leave it out")
        if self.is_core and 0 < self.limit < FEWEST_ITEMS:
            raise ValueError(f"limit {self.limit} of CORE is too few for its worked examples; take {FEWEST_ITEMS} or 0")
        for name in () if self.temperature else ("num_samples", "top_p", "top_k"):
            if (own := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"benchmark {self.name!r}: {name} {own} means nothing at temperature 0, where all answers to an "
                    "item are the same; set temperature"
                )
        for metric in self.metrics:
            kind, count = metric.split("@")
            if int(count) > self.num_samples or (kind != "pass" and int(count) != self.num_samples):
                how = "at most" if kind == "pass" else "all of"
                raise ValueError(
                    f"benchmark {self.name!r}: {metric} is of {how} num_samples, which is {self.num_samples}; write "
                    f"{kind}@{self.num_samples}, or change num_samples"
                )
        if twice := sorted({metric for metric in self.metrics if self.metrics.count(metric) > 1}):
            raise ValueError(f"benchmark {self.name!r}: {twice[0]} stands twice among its metrics")

    @property
    def is_core(self) -> bool:
        """True where it is CORE, which no form describes."""
        return "core" in (self.form, self.name)

    @property
    def is_environment(self) -> bool:
        """True where each item is a rollout in an environment of the `verifiers` package."""
        return "verifiers" in (self.form, self.name if self.form == "auto" else "")

    @property
    def wants_bundle(self) -> bool:
        """True where its items come from the pipeline's core_bundle."""
        return self.is_core and self.source is None

    @property
    def sampling(self) -> str:
        """Sampling of answers in words: `greedy`, `8 samples, temperature 0.7, top_p 0.9`."""
        if not self.temperature:
            return "greedy"
        words = [counted(self.num_samples, "sample"), f"temperature {self.temperature:g}"]
        words += [f"top_p {self.top_p:g}"] if self.top_p < 1 else []
        words += [f"top_k {self.top_k}"] if self.top_k else []
        return ", ".join(words)

    @property
    def metrics_over_samples(self) -> tuple[str, ...]:
        """The metrics over samples, the main one first; none for one sample that asks for none."""
        mean = f"avg@{self.num_samples}"
        if mean in self.metrics or (self.num_samples == 1 and not self.metrics):
            return self.metrics
        return (*self.metrics, mean)


class EvalSamplerConfig(EngineConfig):
    """The samplers that write answers. The embedded one's context is what each benchmark needs."""

    replicas: Annotated[int, Field(ge=1, le=1024)] | Auto = operational("auto")
    """Samplers at most; of embedded ones fewer where there is too little to write for so many. `auto`: one for each
    GPU of the machine, as far as others leave them; on a CPU a process a thread, 4 at most, and one of SGLang."""
    max_batch: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = operational("auto")
    """Answers that one sampler writes at once, as far as its cache holds them. `auto`: 256 on a GPU, 64 on a CPU."""
    cache_bytes: Positive | Auto = operational("auto")
    """Bytes of one sampler's keys and values. `auto`: 0.7 of a GPU less the weights, or what is left where the weights
    fit only once; 0.25 of the host's memory for all samplers on a CPU."""


class EndpointConfig(Section):
    """A model that somebody serves under the OpenAI API."""

    url: str = "none"
    """Address of the API with its version, such as http://127.0.0.1:8000/v1; `none` for the input `model`."""
    model: str = ""
    """The model's name there."""
    key: str = operational("none")
    """`env:NAME` for a key in an environment variable; `none` for no key."""
    at_once: int = operational(16, ge=1, le=100)
    """Requests that are sent at once."""
    patience_s: Seconds = operational(600.0)
    """Seconds of silence, and of sending a request again after 429, 5xx or a lost connection."""

    def check_settings(self) -> None:
        if not re.fullmatch(r"none|env:\w+", self.key):  # not shown, nor the URL
            raise ValueError("key would be kept in records: put it in an environment variable and write env:NAME")
        if not re.fullmatch(r"none|https?://[^/?#@\s]+(/[^?#@\s]*[^/?#@\s])?", self.url):
            raise ValueError("url must be like http://HOST:8000/v1, with no login, query or / at its end")
        if (self.url == "none") != (not self.model):
            raise ValueError("url and model go together: set both, or neither")

    def headers(self) -> dict[str, str]:
        """Headers of each request. Raises ConfigError where the key's environment variable is not set."""
        secret = "" if self.key == "none" else os.environ.get(self.key.removeprefix("env:"), "").strip()
        if self.key != "none" and not secret:
            raise ConfigError(f"endpoint.key is {self.key}, and that environment variable is not set here; set it.")
        return {"Authorization": f"Bearer {secret}"} if secret else {}


def different_names(benchmarks: Sequence[BenchmarkConfig]) -> list[str]:
    """Their names. Raises ValueError where two are the same."""
    names = [benchmark.name for benchmark in benchmarks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two benchmarks are called {twice[0]!r}; give each a name and say what it is with `form`")
    return names


def check_names(benchmarks: Sequence[BenchmarkConfig]) -> None:
    """Raise ValueError where two have the same name, or one has that of ChatCORE."""
    if "chat_core" in different_names(benchmarks):
        raise ValueError("chat_core is the mean over nanochat's chat tasks; it is there where they are, so leave it")


class EvalStage(StageBase):
    """Scores of a checkpoint (input `model`), or of a model that somebody serves (`endpoint`)."""

    plan_formula: ClassVar[str] = "nanodag.plan.evaluation:EVALUATION"

    benchmarks: tuple[BenchmarkConfig, ...] = Field(min_length=1)
    """The benchmarks that the model is evaluated on."""
    endpoint: EndpointConfig = later(EndpointConfig())
    """A served model in the place of the input `model`. Benchmarks by likelihood need its prompt log-probabilities."""
    precision: Precision | Auto = "auto"
    """Number format of the model. `auto`: bf16 on GPUs that multiply it faster, else fp32."""
    micro_batch_tokens: Annotated[int, Field(ge=1, le=10**12)] | Auto = operational("auto")
    """Tokens that are scored at once where likelihoods answer. A longer question goes alone, or with others that share
    most of it.
    `auto`: 16384 on a GPU, 1024 on a CPU, whose caches hold no more."""
    sampler: EvalSamplerConfig = EvalSamplerConfig()
    """The samplers that write answers."""
    chat: bool = True
    """Whether prompts pass the chat template; false for a base model."""
    bos: Literal["auto", "always", "never"] = "auto"
    """Whether texts outside the chat template begin with the tokenizer's bos token. `auto`: where the tokenizer itself
    puts it there, as lm-eval does."""
    max_new_tokens: int = Field(256, ge=1, le=100_000_000)
    """Longest written answer of a benchmark that does not say, in tokens. An item whose prompt leaves it no room in the
    model's positions is not asked and counts as wrong, as `too_long`."""
    sample_prompts: tuple[str, ...] = ()
    """Prompts whose answers the report shows."""

    def check_settings(self) -> None:
        check_names(self.benchmarks)

    def check_inputs(self) -> None:
        """Raise ValueError unless it has one model."""
        if ("model" in self.inputs) == self.is_served:
            raise ValueError(f"inputs: found {listed(self.inputs)}; name a model, or endpoint.url, and not both")
        if ("baseline" in self.inputs) != any(benchmark.judge != "none" for benchmark in self.benchmarks):
            raise ValueError("a benchmark's `judge` and the input `baseline` go together: name both, or neither")

    asks_in_chat = from_setting("chat")
    is_served = answer(lambda stage: stage.endpoint.url != "none")
    guest = answer(lambda stage: stage.sampler if stage.sampler.engine in TITLES else None)
    spare_gpus = answer(lambda stage: (int(stage.sampler.replicas) - 1) * stage.sampler.tensor_parallel)

    def num_gpus(self, available: int) -> int:
        """GPUs of one sampler at least."""
        return self.sampler.tensor_parallel

    def on_another_machine(self, **updates: Any) -> Self:
        """The stage with `auto` for what follows from a machine, its samplers too."""
        return super().on_another_machine(sampler=EvalSamplerConfig(), **updates)

    def before_ranks(self, derived: Derived) -> Self:
        """The stage with CORE's items where the benchmark names none. Raises ConfigError where CORE is left out and
        nothing else is evaluated."""
        if not any(benchmark.wants_bundle for benchmark in self.benchmarks):
            return self
        bundle, origin = derived.pipeline.core_bundle, f"{derived.name}.benchmarks"
        if bundle == "none":
            derived.origins[origin] = CORE_LEFT_OUT
            kept = tuple(benchmark for benchmark in self.benchmarks if not benchmark.wants_bundle)
        else:
            derived.origins[origin] = f"derived: core_bundle is {bundle}"
            update = {"source": SourceConfig(url=bundle_url(bundle))}
            kept = tuple(b.model_copy(update=update) if b.wants_bundle else b for b in self.benchmarks)
        if not kept:
            raise ConfigError(
                f"{derived.name}.benchmarks: CORE alone, and core_bundle is none. Name its items by core_bundle, "
                "or give the benchmark a source."
            )
        return self.model_copy(update={"benchmarks": kept})

    def after_ranks(self, model: ModelSize | None, derived: Derived) -> Self:
        """The stage without any `auto` among its samplers' settings."""
        return derive_evaluation(derived.name, self, derived.machine, model, derived.origins)


def asked_in_training(benchmarks: Sequence[BenchmarkConfig], **settings: Any) -> EvalStage | None:
    """The eval stage that asks the benchmarks of a stage that trains; None without any. settings: of that stage."""
    fields = set(BenchmarkConfig.model_fields)
    asked = [benchmark.model_dump(mode="json", include=fields) for benchmark in benchmarks]
    return EvalStage.model_validate({"kind": "eval", "benchmarks": asked, **settings}) if asked else None
