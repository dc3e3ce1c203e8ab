"""Plans the stages that multiply no matrices: tokenizer, import, report, and kinds of a user's own."""

from nanodag.config.kinds.import_model import ImportStage
from nanodag.config.kinds.report import ReportStage
from nanodag.config.kinds.tokenizer import TokenizerStage
from nanodag.config.model_size import ModelSize
from nanodag.config.stage_base import StageBase
from nanodag.host.machine import Machine
from nanodag.plan import processes
from nanodag.plan.sizes import downloaded, in_memory
from nanodag.plan.speeds import BYTES_A_CORE_S, SHORT_START_S
from nanodag.plan.stage_plan import Process, StagePlan

DOWNLOAD_BYTES_S = 50e6
REPORT_S = 6.0
KNOWN_WORDS = 150 * processes.MB
"""Of the tokenizer's training over 8 MB of text: words and pairs, which grow slower than the text."""


def plan_other(name: str, stage: StageBase, model: ModelSize | None, machine: Machine) -> StagePlan:
    """The plan of a stage that trains and scores nothing."""
    device = str(stage.resources.device)
    if isinstance(stage, TokenizerStage):
        words = int(KNOWN_WORDS * (stage.max_bytes / 8e6) ** 0.6)
        held = {"process": processes.TOKENIZER, "data": int(processes.PARSED * in_memory(stage.data)), "words": words}
        return StagePlan(
            name=name,
            kind=stage.kind,
            device=device,
            read_bytes=stage.max_bytes,
            download_bytes=downloaded(stage.data, stage.max_bytes),
            processes=(Process(name="worker", host=held),),
            disk_bytes=200 * stage.vocabulary,
            kept_bytes=200 * stage.vocabulary,
            start_seconds=SHORT_START_S,
            seconds=SHORT_START_S + stage.max_bytes / BYTES_A_CORE_S,
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
            start_seconds=SHORT_START_S,
            seconds=SHORT_START_S + (weights or 0) / DOWNLOAD_BYTES_S,
            notes=() if model is not None else ("its model is not known yet",),
        )
    if isinstance(stage, ReportStage):
        held = {"process": processes.REPORT, "data": int(2 * processes.PARSED * in_memory(stage.contamination))}
        return StagePlan(
            name=name,
            kind=stage.kind,
            device=device,
            download_bytes=downloaded(stage.contamination, in_memory(stage.contamination)),
            processes=(Process(name="worker", host=held),),
            disk_bytes=5 * processes.MB,
            kept_bytes=5 * processes.MB,
            seconds=REPORT_S,
            start_seconds=REPORT_S,
        )
    return StagePlan(name=name, kind=stage.kind, device=device, notes=("a kind of your own: nothing is known of it",))
