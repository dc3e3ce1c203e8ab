"""Plans the stages that multiply no matrices: tokenizer, import, report."""

from nanodag.config.kinds.small_stages import MAX_SEARCHED, ImportStage, ReportStage, TokenizerStage
from nanodag.plan import host_memory
from nanodag.plan.case import Case, Formula, changed
from nanodag.plan.sizes import SIZES
from nanodag.plan.speeds import SPEEDS
from nanodag.plan.stage_plan import Process, StagePlan

KNOWN_WORDS = 150 * host_memory.MB
"""Memory of the tokenizer's training over 8 MB of text: words and pairs, which grow slower than the text."""


def plan_tokenizer(case: Case[TokenizerStage]) -> StagePlan:
    stage, parsed = case.stage, case.sizes.in_memory(case.stage.data)
    num_bytes = min(stage.max_bytes, sum(case.sizes.text_bytes(source.url) for source in stage.data))
    words = int(KNOWN_WORDS * (num_bytes / 8e6) ** 0.6)
    held = {"process": host_memory.BYTES["tokenizer"], "data": int(host_memory.PARSED * parsed), "words": words}
    return case.plan(
        read_bytes=num_bytes,
        processes=(Process(name="worker", host=held),),
        disk_bytes=200 * stage.vocabulary,
        kept_bytes=200 * stage.vocabulary,
        seconds=SPEEDS["short_stage"] + num_bytes / SPEEDS["learned_bytes"] + parsed / SPEEDS["parsed_bytes"],
    )


def plan_import(case: Case[ImportStage]) -> StagePlan:
    """The plan of an import: its files, copied and hashed."""
    total = case.known_model.total if case.known_model is not None else None
    weights = 2 * total if total is not None else None
    is_far = case.stage.model.startswith("hub:") and weights is not None
    return case.plan(
        parameters=total,
        read_bytes=weights,
        processes=(Process(name="worker", host={"process": host_memory.BYTES["import"]}),),
        disk_bytes=weights,
        kept_bytes=weights or 0,
        seconds=SPEEDS["short_stage"] + (weights or 0) / SPEEDS["downloaded_bytes" if is_far else "copied_bytes"],
        notes=() if total is not None else ("its model is not known yet",),
    )


def plan_report(case: Case[ReportStage]) -> StagePlan:
    """The plan of a report: what it searches the training data for takes nearly all of it."""
    stage, sizes = case.stage, case.sizes
    searched = {source.url: source for source in case.trained} if stage.contamination else {}
    largest = max((sizes.in_memory([source]) for source in searched.values()), default=0)
    num_bytes = sum(min(MAX_SEARCHED, sizes.text_bytes(url)) for url in searched)
    num_bytes += sum(sizes.text_bytes(source.url) for source in stage.contamination)
    parsed = sizes.in_memory(list(searched.values())) / SPEEDS["parsed_bytes"]
    held = {"process": host_memory.BYTES["report"], "data": int(host_memory.PARSED * largest)}
    return case.plan(
        read_bytes=num_bytes,
        processes=(Process(name="worker", host=held),),
        disk_bytes=5 * host_memory.MB,
        kept_bytes=5 * host_memory.MB,
        seconds=SPEEDS["short_stage"] + num_bytes / SPEEDS["searched_bytes"] + parsed,
    )


TOKENIZER = Formula(
    plan_tokenizer,
    too_large=lambda case: ("max_bytes", case.stage.max_bytes),
    candidates=lambda case: (  # less text
        changed(case.stage, {"max_bytes": size})
        for size in (case.stage.max_bytes >> k for k in range(1, 12))
        if size >= SIZES["least_text"]
    ),
)
IMPORT = Formula(plan_import)
REPORT = Formula(
    plan_report,
    too_large=lambda case: ("contamination", len(case.stage.contamination)),
    candidates=lambda case: [(("contamination=[]",), case.stage.model_copy(update={"contamination": ()}))],
)
UNKNOWN = Formula(lambda case: case.plan(notes=("a kind of your own: nothing is known of it",)))
