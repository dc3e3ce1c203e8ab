"""Puts the report together: sections of tables, plots and text, rendered once as HTML and once as Markdown."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from nanodag.errors.words import counted, duration
from nanodag.evaluation.paired import FALSE_ALARMS
from nanodag.report import plots, tables, words
from nanodag.report.gather import (
    NO_CLEAR,
    Column,
    Comparison,
    ReportedStage,
    benchmarks_of,
    columns_of,
    comparisons_of,
    stages_of,
    warnings_of,
)
from nanodag.report.lineage import TEMPLATES, lineage_svg
from nanodag.report.tables import Cell, Example, Program, Table


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a section. drawing: an SVG that keeps its size and scrolls. folded: closed at first."""

    heading: str = ""
    note: str = ""
    panels: Sequence[plots.Panel] = ()
    drawing: str = ""
    table: Table | None = None
    style: str = ""
    examples: Sequence[Example] = ()
    programs: Sequence[Program] = ()
    before: str = ""
    after: str = ""
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """in_markdown: whether the Markdown page has it too; plots, lineage pictures and configs are in the HTML only."""

    title: str
    note: str = ""
    parts: Sequence[Part] = ()
    in_markdown: bool = True

    @property
    def anchor(self) -> str:
        return anchor_of(self.title)

    @property
    def has_plots(self) -> bool:
        return any(part.panels for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Content of both pages. warnings: what the reader must know before all else."""

    title: str
    subtitle: str
    cards: Sequence[Cell]
    warnings: Sequence[str] = ()
    sections: Sequence[PageSection] = field(default_factory=list)


def build_report(
    run: str, context: Mapping[str, Any], *, price_per_hour: float, contamination: Table | None, missing: Sequence[str]
) -> Report:
    """The report of a run. missing: names of stages that were to be reported but have no result."""
    stages = stages_of(context)
    columns = columns_of(stages)
    comparisons = comparisons_of(columns, stages)
    made = [
        _scores(columns, comparisons),
        _curves(stages),
        _samples(columns, comparisons),
        _stages(stages, price_per_hour),
        _lineage(stages),
        _contamination(contamination),
        _config(stages, context.get("origins", {})),
    ]
    ended = max((raw.get("created", 0.0) for raw in context["stages"].values()), default=0.0)
    facts = [f"preset {context['preset']}" if context.get("preset") else "", context.get("description", "")]
    if ended:
        facts.append(datetime.fromtimestamp(ended, UTC).strftime("%Y-%m-%d %H:%M UTC"))
    if missing:
        facts.append(f"without {', '.join(missing)}: no result")
    return Report(
        title=f"Report of run {run}",
        subtitle=" · ".join(fact.rstrip(".") for fact in facts if fact),
        cards=[*_change_cards(comparisons), *_cost_cards(stages)],
        warnings=warnings_of(stages, context.get("stale", {})),
        sections=[section for section in made if section is not None],
    )


def to_html(report: Report, *, live: bool = False) -> str:
    """One file without anything to load from elsewhere. live: it asks its own address for what is new."""
    return environment_of().get_template("report.html.jinja").render(**vars(report), live=live)


def to_markdown(report: Report) -> str:
    """The tables alone, for a terminal, a repository or the Prefect UI."""
    return environment_of(autoescape=False).get_template("report.md.jinja").render(**vars(report)).strip() + "\n"


def environment_of(*folders: Path, autoescape: bool = True) -> jinja2.Environment:
    """The templates of these folders and of the report."""
    loader = jinja2.FileSystemLoader([*folders, TEMPLATES])
    environment = jinja2.Environment(loader=loader, autoescape=autoescape, undefined=jinja2.StrictUndefined)
    environment.filters.update(md=words.markdown, md_cell=_md_cell, fenced=words.fenced, anchor=anchor_of)
    environment.globals["page_scripts"] = plots.page_scripts
    return environment


def anchor_of(text: str) -> str:
    """Name of an element, of the letters and digits of a text."""
    return re.sub(r"\W+", "-", text.lower()).strip("-")


def _md_cell(cell: Cell) -> str:
    text, detail = words.markdown(cell.text), words.markdown(cell.detail)
    shown = f"{text} ({detail})" if detail and text else text or detail
    return f"{shown}, {words.markdown(cell.verdict)}" if cell.verdict else shown


def _change_cards(comparisons: Sequence[Comparison]) -> list[Cell]:
    """The largest gain beside the largest loss, of shares of right answers, of a model over the one it comes from."""
    compared = [c for c in comparisons if c.is_parent and words.is_share(c.metric)]
    cards = []
    for verdict, what, tone in (("better", "gain", "good"), ("worse", "loss", "bad")):
        clear = [c for c in compared if c.verdict == verdict]
        if clear:
            largest = max(clear, key=lambda c: abs(c.gain))
            points = f"{words.signed(largest.found.difference, largest.metric)} points"
            models = f"{largest.after.label} over {largest.before.label}"
            cards.append(Cell(text=points, detail=f"largest {what}: {largest.benchmark}, {models}", tone=tone))
        elif compared:
            cards.append(Cell(text=f"no {what}", detail=f"beyond noise, in {counted(len(compared), 'comparison')}"))
    return cards


def _cost_cards(stages: Mapping[str, ReportedStage]) -> list[Cell]:
    def total(name: str) -> float:
        return sum(tables.number(stage.cost, name) for stage in stages.values())

    cards = [Cell(text=duration(total("seconds")), detail="of all stages together")]
    if tokens := total("tokens"):
        cards.append(Cell(text=words.count(tokens), detail="tokens trained on"))
    if flops := total("flops"):
        cards.append(Cell(text=words.count(flops), detail="FLOPs"))
    return cards


def _scores(columns: Sequence[Column], comparisons: Sequence[Comparison]) -> PageSection | None:
    if not columns:
        return None
    parts = [Part(panels=plots.score_panels(columns), style="small"), Part(table=tables.scores_table(columns))]
    if comparisons:
        note = (
            "Differences item by item between models that answered the same items, in points. p decides the verdict: "
            "by McNemar's test where items are right or wrong, else by Student's t, corrected by Holm over all rows, "
            f"so that where nothing differs the chance of any verdict is below {FALSE_ALARMS:g}. The 95 % interval "
            f"below a difference is of that one alone. “{NO_CLEAR}” may hide a small one."
        )
        clear = [comparison for comparison in comparisons if comparison.verdict != NO_CLEAR]
        unclear = [comparison for comparison in comparisons if comparison.verdict == NO_CLEAR]
        heading = f"Which differences are real: {len(clear)} of {len(comparisons)}"
        parts.append(Part(heading=heading, note=note, table=tables.comparisons_table(clear) if clear else None))
        if unclear:
            heading = f"{NO_CLEAR}: {len(unclear)}"
            parts.append(Part(heading=heading, table=tables.comparisons_table(unclear), folded=True))
    note = "Score ± standard error, 95 % interval below. Shares in percent."
    return PageSection(title="Scores", note=note, parts=parts)


def _curves(stages: Mapping[str, ReportedStage]) -> PageSection | None:
    parts = []
    for stage in stages.values():
        if panels := plots.PANELS[stage.kind.config.curves](stage):
            parts.append(Part(heading=stage.name, panels=panels))
        if stage.kind.config.makes_rollouts and (policy := tables.policy_table(stage)):
            note = "Score and 95 % interval of each model by itself. The best of many is in part the luckiest one."
            parts.append(Part(heading=f"{stage.name}: its own evaluations", note=note, table=policy))
    if reached := tables.reached_table(stages):
        parts.append(Part(heading="What each stage reached", table=reached))
    if rows := tables.rows_table(stages):
        note = "A document that was cut counts once. Rows that are too long or teach nothing are not among them."
        parts.append(Part(heading="Rows trained, and how often", note=note, table=rows))
    return PageSection(title="Training", parts=parts) if parts else None


def _samples(columns: Sequence[Column], comparisons: Sequence[Comparison]) -> PageSection | None:
    parts = []
    if table := tables.samples_table(columns):
        parts.append(Part(heading="The same prompts", table=table, style="samples"))
    by_last = [c for c in comparisons if c.after is columns[-1]]
    for comparison in by_last:
        for turned, other in (("right", "wrong"), ("wrong", "right")):
            examples = tables.examples_of(comparison, turned=turned)
            if examples:
                before, after = comparison.before.label, comparison.after.label
                heading = f"{comparison.benchmark}: {before} {other}, {after} {turned}"
                parts.append(Part(heading=heading, examples=examples, before=before, after=after))
    for benchmark in benchmarks_of(columns[-1:]):
        for verdict in ("passed", "failed"):
            if programs := tables.programs_of(columns[-1], benchmark, verdict=verdict):
                heading = f"{benchmark}: programs of {columns[-1].label} that {verdict}"
                parts.append(Part(heading=heading, programs=programs))
    return PageSection(title="Samples", parts=parts) if parts else None


def _stages(stages: Mapping[str, ReportedStage], price_per_hour: float) -> PageSection:
    note = (
        "Time is what the stage's processes took, over all tries, CPU time is summed over them, memory is the largest "
        "process. A stage that was found in the store shows what it cost when it was built. Trained tokens went "
        "through the model forward and backward; read tokens forward only: prompts and samples of RL, and evaluations. "
        "FLOPs of all stages are 6 a trained token and 2 a read one for each parameter of a matrix, the head once, "
        "without attention, and without RL's scoring by old, reference and critic weights; MFU has attention too."
    )
    table = tables.stages_table(stages, price_per_hour)
    return PageSection(title="Time, tokens and cost", note=note, parts=[Part(table=table, style="compact total")])


def _lineage(stages: Mapping[str, ReportedStage]) -> PageSection:
    parts = [Part(drawing=lineage_svg(stages)), Part(table=tables.lineage_table(stages))]
    if environment := tables.environment_table(stages):
        parts.append(Part(heading="Made with", table=environment, folded=True))
    return PageSection(title="Lineage", parts=parts)


def _contamination(found: Table | None) -> PageSection | None:
    if found is None:
        return None
    note = (
        "Benchmark items that share at least one run of 13 words with a training source. An item found there may have "
        "been learnt by heart."
    )
    return PageSection(title="Contamination", note=note, parts=[Part(table=found)])


def _config(stages: Mapping[str, ReportedStage], origins: Mapping[str, str]) -> PageSection:
    parts = []
    for stage in stages.values():
        table = tables.config_table(stage, origins)
        chosen = sum(row[2].text != "default" for row in table.rows)
        note = f"{chosen} of {counted(len(table.rows), 'value')} chosen or derived"
        parts.append(Part(heading=stage.name, note=note, table=table, folded=True))
    return PageSection(title="Config", note="Every value, and where it comes from.", parts=parts, in_markdown=False)
