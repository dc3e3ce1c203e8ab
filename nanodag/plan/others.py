"""Plans the stages that multiply no matrices: tokenizer, import, report, and kinds of a user's own."""

from collections.abc import Sequence
from pathlib import Path

from nanodag.config.kinds.import_model import ImportStage
from nanodag.config.kinds.report import ReportStage
from nanodag.config.kinds.tokenizer import TokenizerStage
from nanodag.config.model_size import ModelSize
from nanodag.config.stage_base import StageBase
from nanodag.data.config import SourceConfig
from nanodag.host.machine import Machine
from nanodag.plan import processes
from nanodag.plan.memory import Candidate, memory_faults
from nanodag.plan.sizes import downloaded, in_memory, text_bytes
from nanodag.plan.stage_plan import Fault, Process, StagePlan

DOWNLOAD_BYTES_S = 50e6
COPIED_BYTES_S = 500e6
"""Of a model that is copied and hashed."""
LEARNED_BYTES_S = 10e6
"""Text that the tokenizer's training takes in a second of a core."""
SEARCHED_BYTES_S = 11e6
"""Text that is searched for 13-grams of benchmarks in a second of a core."""
MAX_SEARCHED = 200_000_000  # MAX_TRAINING_BYTES of nanodag.report.contamination_table
LEAST_TEXT = 1_000_000
"""Bytes of text from which a tokenizer is worth learning."""
KNOWN_WORDS = 150 * processes.MB
"""Of the tokenizer's training over 8 MB of text: words and pairs, which grow slower than the text."""


def plan_other(
    name: str,
    stage: StageBase,
    model: ModelSize | None,
    *,
    trained: Sequence[SourceConfig] = (),
    mirror: Path | None = None,
) -> StagePlan:
    """The plan of a stage that trains and scores nothing. trained: what the stages of a report were trained on. mirror:
    a folder that stands for the hub."""
    device = str(stage.resources.device)
    if isinstance(stage, TokenizerStage):
        num_bytes = min(stage.max_bytes, sum(text_bytes(source.url, mirror) for source in stage.data))
        words = int(KNOWN_WORDS * (num_bytes / 8e6) ** 0.6)
        parsed = in_memory(stage.data) / processes.PARSED_BYTES_S
        seconds = processes.SHORT_S + num_bytes / LEARNED_BYTES_S + parsed
        held = {"process": processes.TOKENIZER, "data": int(processes.PARSED * in_memory(stage.data)), "words": words}
        return StagePlan(
            name=name,
            kind=stage.kind,
            device=device,
            read_bytes=num_bytes,
            download_bytes=downloaded(stage.data, num_bytes),
            processes=(Process(name="worker", host=held),),
            disk_bytes=200 * stage.vocabulary,
            kept_bytes=200 * stage.vocabulary,
            seconds=seconds,
            cpu_seconds=seconds,
        )
    if isinstance(stage, ImportStage):
        weights = 2 * model.total if model is not None else None
        is_far = stage.model.startswith("hub:") and weights is not None
        return StagePlan(
            name=name,
            kind=stage.kind,
            device=device,
            parameters=model.total if model is not None else None,
            read_bytes=weights,
            download_bytes=weights if is_far else 0,
            processes=(Process(name="worker", host={"process": processes.IMPORT}),),
            disk_bytes=weights,
            kept_bytes=weights or 0,
            seconds=processes.SHORT_S + (weights or 0) / (DOWNLOAD_BYTES_S if is_far else COPIED_BYTES_S),
            cpu_seconds=processes.SHORT_S + (weights or 0) / COPIED_BYTES_S,
            notes=() if model is not None else ("its model is not known yet",),
        )
    if isinstance(stage, ReportStage):
        searched = {source.url: source for source in trained} if stage.contamination else {}
        largest = max((in_memory([source]) for source in searched.values()), default=0)
        held = {"process": processes.REPORT, "data": int(processes.PARSED * largest)}
        num_bytes = sum(min(MAX_SEARCHED, text_bytes(url, mirror)) for url in searched)
        num_bytes += sum(text_bytes(source.url, mirror) for source in stage.contamination)
        parsed = in_memory(list(searched.values())) / processes.PARSED_BYTES_S
        seconds = processes.SHORT_S + num_bytes / SEARCHED_BYTES_S + parsed
        return StagePlan(
            name=name,
            kind=stage.kind,
            device=device,
            read_bytes=num_bytes,
            download_bytes=downloaded([*searched.values(), *stage.contamination], num_bytes),
            processes=(Process(name="worker", host=held),),
            disk_bytes=5 * processes.MB,
            kept_bytes=5 * processes.MB,
            seconds=seconds,
            cpu_seconds=seconds,
        )
    return StagePlan(name=name, kind=stage.kind, device=device, notes=("a kind of your own: nothing is known of it",))


def faults_of_other(
    plan: StagePlan, stage: StageBase, machine: Machine, *, trained: Sequence[SourceConfig] = ()
) -> list[Fault]:
    """What of the stage does not fit the machine: a tokenizer learns from less text, a report searches for nothing."""
    setting, found, candidates = "resources.device", plan.device, list[Candidate]()
    if isinstance(stage, TokenizerStage):
        setting, found = "max_bytes", str(stage.max_bytes)
        sizes = [stage.max_bytes >> k for k in range(1, 12) if stage.max_bytes >> k >= LEAST_TEXT]
        candidates = [((f"max_bytes={num}",), stage.model_copy(update={"max_bytes": num})) for num in sizes]
    if isinstance(stage, ReportStage):
        setting, found = "contamination", str(len(stage.contamination))
        candidates = [(("contamination=[]",), stage.model_copy(update={"contamination": ()}))]
    return memory_faults(
        plan,
        machine,
        setting=setting,
        found=found,
        candidates=candidates,
        rebuilt=lambda changed: plan_other(plan.name, changed, None, trained=trained),
    )
