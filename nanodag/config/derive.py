"""Replaces every `auto` of a pipeline by a number and says why it is that number; and names what was set by hand and
the machine does badly, which is kept."""

from collections.abc import Collection, Iterator
from typing import Any

from nanodag.config.derive_hardware import Derived, device_of, precision_of, spread
from nanodag.config.derive_schedule import model_of
from nanodag.config.hardware_rules import RULES
from nanodag.config.kinds import find_kind
from nanodag.config.pipeline import Pipeline
from nanodag.config.section import Filler
from nanodag.config.stage_base import StageBase
from nanodag.errors.words import counted
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
        derived = Derived(name, machine, origins, pipeline)
        fill = Filler(stage, name, origins)
        fill("seed", pipeline.seed, "the pipeline's seed")
        stage = stage.model_copy(update=fill.updates)
        stage = precision_of(device_of(stage, device, derived).before_ranks(derived), derived)
        model = model_of(pipeline, name)
        stages[name] = spread(stage, model, derived).after_ranks(model, derived)
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
    warning = f"CORE is left out of {', '.join(without)}: core_bundle is none. Fetch and unpack {BUNDLE}, and set "
    warning += "core_bundle to its folder, or NANODAG_CORE_BUNDLE"
    return pipeline.model_copy(update={"stages": stages}), origins, (warning,) if without else ()


def unwise(pipeline: Pipeline, machine: Machine, given: Collection[str]) -> tuple[str, ...]:
    """A line for each bad idea, naming the settings, what is bad, and what `auto` would say.

    pipeline: derived for the machine. given: dotted names of what somebody wrote.
    """
    settings: dict[str, list[str]] = {}
    for name, stage in pipeline.stages.items():
        if stage.resources.work_pool != "none":  # another machine's
            continue
        for setting, why in _of_stage(stage, machine):
            if f"{name}.{setting}" in given:
                settings.setdefault(why, []).append(f"{name}.{setting}")
    return tuple(f"{', '.join(names)}: {why}" for why, names in settings.items())


def _of_stage(stage: StageBase, machine: Machine) -> Iterator[tuple[str, str]]:
    resources = stage.resources
    device = str(resources.device)
    is_fast = machine.multiplies_bf16_fast(device)
    for setting in ("precision", "optimizer.precision", "sampler.precision"):
        section = stage if setting == "precision" else getattr(stage, setting.partition(".")[0], None)
        precision = getattr(section, "precision", None)
        if precision == "bf16" and not is_fast:
            yield setting, f"bf16, which {machine.short} emulates many times slower than fp32; `auto` is fp32"
        if precision == "fp32" and device == "cuda" and is_fast and find_kind(stage.kind).trains:
            yield setting, f"fp32, which {machine.short} multiplies many times slower than bf16; `auto` is bf16"
    ranks = int(resources.num_ranks) // resources.num_nodes
    if device == "cuda" and machine.gpu is not None and ranks > machine.num_gpus:
        why = f"{counted(ranks, 'rank')} a node, and {machine.short} has {counted(machine.num_gpus, 'GPU')} for them"
        yield "resources.num_ranks", why
    if device == "cpu" and ranks * int(resources.threads) > machine.cores:
        why = (
            f"{counted(ranks, 'rank')} of {counted(int(resources.threads), 'thread')} take turns on "
            f"{counted(machine.cores, 'core')}; `auto` uses each core once"
        )
        yield "resources.num_ranks", why
        yield "resources.threads", why
