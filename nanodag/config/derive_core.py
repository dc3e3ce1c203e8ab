"""Where CORE's items come from in each stage: the pipeline's `core_bundle`, for a benchmark `core` without a source and
for training with `core_every`. Without a bundle both are left out, which a warning says before anything starts."""

from typing import Any

from nanodag.config.kinds.evaluation import BenchmarkConfig, EvalStage
from nanodag.config.pipeline import Pipeline
from nanodag.config.supervised import SupervisedStage
from nanodag.data.config import SourceConfig
from nanodag.data.core_tasks import bundle_url
from nanodag.errors import ConfigError

BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"


def with_core(pipeline: Pipeline) -> tuple[Pipeline, dict[str, str], tuple[str, ...]]:
    """The pipeline with CORE's items named or CORE left out, the origin of what was filled in, and warnings.

    Raises ConfigError for an eval stage of which nothing would be left.
    """
    origins: dict[str, str] = {}
    stages: dict[str, Any] = {}
    without: list[str] = []
    for name, stage in pipeline.stages.items():
        if isinstance(stage, SupervisedStage) and stage.core_bundle == "auto":
            updates: dict[str, Any] = {"core_bundle": pipeline.core_bundle}
            origins[f"{name}.core_bundle"] = "derived: the pipeline's core_bundle"
            if pipeline.core_bundle == "none" and stage.core_every:
                updates["core_every"] = 0
                origins[f"{name}.core_every"] = "derived: core_bundle is none"
                without.append(name)
            stage = stage.model_copy(update=updates)
        if isinstance(stage, EvalStage) and any(_wants_bundle(benchmark) for benchmark in stage.benchmarks):
            origins[f"{name}.benchmarks"] = f"derived: core_bundle is {pipeline.core_bundle}"
            if pipeline.core_bundle == "none":
                without.append(name)
            stage = stage.model_copy(update={"benchmarks": _benchmarks(name, stage, pipeline.core_bundle)})
        stages[name] = stage
    warning = (
        f"CORE is left out of {', '.join(without)}: core_bundle is none. Fetch and unpack {BUNDLE}, and set "
        "core_bundle to its folder, or NANODAG_CORE_BUNDLE"
    )
    return pipeline.model_copy(update={"stages": stages}), origins, (warning,) if without else ()


def _wants_bundle(benchmark: BenchmarkConfig) -> bool:
    return benchmark.is_core and benchmark.source is None


def _benchmarks(name: str, stage: EvalStage, bundle: str) -> tuple[BenchmarkConfig, ...]:
    if bundle != "none":
        source = SourceConfig(url=bundle_url(bundle))
        return tuple(b.model_copy(update={"source": source}) if _wants_bundle(b) else b for b in stage.benchmarks)
    kept = tuple(benchmark for benchmark in stage.benchmarks if not _wants_bundle(benchmark))
    if not kept:
        raise ConfigError(
            f"{name}.benchmarks: CORE alone, and core_bundle is none. Set core_bundle to the folder of its items, or "
            "give the benchmark a source."
        )
    return kept
