"""What a user set by hand and this machine does badly: kept, and said once for all stages that it concerns."""

from collections.abc import Collection, Iterator

from nanodag.config.kinds import find_kind
from nanodag.config.pipeline import Pipeline
from nanodag.config.stage_base import StageBase
from nanodag.errors.words import counted
from nanodag.host.machine import Machine


def unwise(pipeline: Pipeline, machine: Machine, given: Collection[str]) -> tuple[str, ...]:
    """A line for each bad idea, naming the settings, what is bad, and what `auto` would say.

    pipeline: derived for the machine. given: dotted names of what somebody wrote.
    """
    found: dict[str, list[str]] = {}
    for name, stage in pipeline.stages.items():
        if stage.resources.work_pool != "none":  # another machine's
            continue
        for setting, why in _of_stage(stage, machine):
            if f"{name}.{setting}" in given:
                found.setdefault(why, []).append(f"{name}.{setting}")
    return tuple(f"{', '.join(names)}: {why}" for why, names in found.items())


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
