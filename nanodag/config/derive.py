"""Replaces every `auto` of a pipeline by a number, and says why it is that number."""

from typing import Any

from nanodag.config.derive_hardware import Derived, device_of, precision_of, spread
from nanodag.config.derive_schedule import model_of
from nanodag.config.hardware_rules import RULES
from nanodag.config.pipeline import Pipeline
from nanodag.host.machine import Machine

BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"


def derive(pipeline: Pipeline, machine: Machine) -> tuple[Pipeline, dict[str, str]]:
    """The pipeline without `auto`, as it fits a machine, and the origin of what was filled in, by dotted name."""
    origins: dict[str, str] = {}
    device = pipeline.device
    if device == "auto":
        device = machine.device
        origins["device"] = f"derived: {machine.short}: {RULES['device'].rule}"
    stages: dict[str, Any] = {}
    for name, stage in pipeline.stages.items():
        found = Derived(name, machine, origins, pipeline)
        if stage.seed == "auto":
            stage = stage.model_copy(update={"seed": pipeline.seed})
            origins[f"{name}.seed"] = "derived: the pipeline's seed"
        stage = precision_of(device_of(stage, device, found).before_ranks(found), found)
        model = model_of(pipeline, name)
        stages[name] = spread(stage, model, found).after_ranks(model, found)
    return pipeline.model_copy(update={"stages": stages, "device": device}), origins


def with_core(pipeline: Pipeline, machine: Machine) -> tuple[Pipeline, dict[str, str], tuple[str, ...]]:
    """The pipeline with CORE's items from `core_bundle`, or CORE left out where that is none; the origin of what was
    filled in, and warnings.

    Raises ConfigError for an eval stage of which nothing would be left.
    """
    origins: dict[str, str] = {}
    stages: dict[str, Any] = {}
    without: list[str] = []
    for name, stage in pipeline.stages.items():
        stages[name], is_left_out = stage.with_core(pipeline.core_bundle, Derived(name, machine, origins, pipeline))
        without += [name] if is_left_out else []
    warning = (
        f"CORE is left out of {', '.join(without)}: core_bundle is none. Fetch and unpack {BUNDLE}, and set "
        "core_bundle to its folder, or NANODAG_CORE_BUNDLE"
    )
    return pipeline.model_copy(update={"stages": stages}), origins, (warning,) if without else ()
