"""Puts the report together: sections of tables, plots and text, rendered once as HTML and once as Markdown."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from nanodag.errors.words import counted, duration
from nanodag.evaluation.paired import FALSE_ALARMS
from nanodag.host.beside import table_beside
from nanodag.report import gather, plots, tables, words
from nanodag.report.gather import NO_CLEAR, Column, Comparison, ReportedStage, columns_of, unusual, warnings_of
from nanodag.report.lineage import TEMPLATES, lineage_svg
from nanodag.report.tables import Cell, Table
from nanodag.run.progress import StageProgress
from nanodag.store.run_record import ENDED_WELL

MOST_SCORES = 4  # of the first tiles
NOTES: dict[str, str] = table_beside(__file__, "notes.yaml")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a section. drawing: an SVG that keeps its size and scrolls. examples, programs: as of
    nanodag.report.tables. samples: as of a ReportedStage. folded: closed at first."""

    heading: str = ""
    note: str = ""
    panels: Sequence[plots.Panel] = ()
    drawing: str = ""
    table: Table | None = None
    style: str = ""
    examples: Sequence[Mapping[str, str]] = ()
    programs: Sequence[Mapping[str, str]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    progress: Sequence[StageProgress] = ()
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


@dataclass(frozen=True, kw_only=True)
class Report:
    """Content of both pages. warnings: what the reader must know before all else."""

    title: str
    subtitle: str
    cards: Sequence[Cell]
    warnings: Sequence[str] = ()
    sections: Sequence[PageSection] = field(default_factory=list)


def build_report(
    run: str,
    context: Mapping[str, Any],
    *,
    price_per_hour: float = 0.0,
    contamination: Table | None = None,
    missing: Sequence[str] = (),
) -> Report:
    """The report of a run. missing: names of stages that were to be reported but have no result."""
    begun = gather.stages_of(context)
    stages = {name: stage for name, stage in begun.items() if stage.digest}
    columns = columns_of(stages)
    comparisons = gather.comparisons_of(columns, stages)
    found = [Part(table=contamination)] if contamination is not None else []
    total = [Part(table=tables.stages_table(stages, price_per_hour), style="compact total")] if stages else []
    costs = PageSection(title="Time, tokens and cost", note=NOTES["cost"], parts=total)
    made = [
        _dag(begun, context.get("progress", ())),
        _scores(columns, comparisons),
        _curves(begun),
        _samples(columns, comparisons, begun),
        *([costs, _lineage(stages)] if stages else []),
        PageSection(title="Contamination", note=NOTES["contamination"], parts=found),
        _config(begun, context.get("origins", {})),
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
        cards=[*_score_cards(columns), *_change_cards(comparisons), *_cost_cards(stages)],
        warnings=[*warnings_of(begun, context.get("stale", {})), *(r for s in begun.values() for r in unusual(s))],
        sections=[section for section in made if section is not None and section.parts],
    )


def compare_report(contexts: Mapping[str, Mapping[str, Any]], configs: Mapping[str, Mapping[str, Any]]) -> Report:
    """The report of several runs: curves of stages of one name over each other, scores beside each other, and settings
    that differ. contexts: of each run. configs: of each run, settings by dotted name."""
    runs = {run: gather.stages_of(context) for run, context in contexts.items()}
    finished = {run: {n: s for n, s in stages.items() if s.digest} for run, stages in runs.items()}
    columns = [replace(c, label=f"{run} {c.label}") for run, stages in finished.items() for c in columns_of(stages)]
    sections = []
    if columns:
        parts = [Part(table=tables.scores_table(columns))]
        sections.append(PageSection(title="Scores", note=NOTES["several runs"], parts=parts))
    names = dict.fromkeys(name for stages in runs.values() for name in stages)
    of_name = {name: {run: stages[name] for run, stages in runs.items() if name in stages} for name in names}
    parts = [Part(heading=n, panels=panels) for n, stages in of_name.items() if (panels := plots.overlaid(stages))]
    sections += [PageSection(title="Training", parts=parts, in_markdown=False), _differences(configs)]
    states = " · ".join(f"{run} {context['description']}" for run, context in contexts.items())
    return Report(title=" against ".join(contexts), subtitle=states, cards=(), sections=sections)


def _differences(configs: Mapping[str, Mapping[str, Any]]) -> PageSection:
    heads = set.intersection(*({name.partition(".")[0] for name in config} for config in configs.values()))
    names = dict.fromkeys(name for config in configs.values() for name in config if name.partition(".")[0] in heads)
    values = {name: [words.shortened(words.shown(config.get(name))) for config in configs.values()] for name in names}
    rows = [[Cell(text=name, code=True), *tables.cells(*told)] for name, told in values.items() if len(set(told)) > 1]
    table = Table(headers=["setting", *configs], rows=rows) if rows else None
    return PageSection(title="What differs", note=NOTES["differs"], parts=[Part(table=table, style="many")])


def to_html(report: Report, *, page: str = "report.html.jinja") -> str:
    """One file without anything to load from elsewhere. page: the template; live.html.jinja asks its own address for
    what is new, which sections.html.jinja is."""
    return environment_of().get_template(page).render(**vars(report))


def to_markdown(report: Report) -> str:
    """The tables alone, for a terminal, a repository or the Prefect UI."""
    return environment_of(autoescape=False).get_template("report.md.jinja").render(**vars(report)).strip() + "\n"


@cache
def environment_of(*folders: Path, autoescape: bool = True) -> jinja2.Environment:
    """The templates of these folders and of the report."""
    loader = jinja2.FileSystemLoader([*folders, TEMPLATES])
    environment = jinja2.Environment(loader=loader, autoescape=autoescape, undefined=jinja2.StrictUndefined)
    environment.filters.update(
        duration=duration,
        spoken=words.spoken,
        md=words.markdown,
        md_cell=_md_cell,
        fenced=words.fenced,
        anchor=lambda text: re.sub(r"\W+", "-", text.lower()).strip("-"),  # name of an element
    )
    environment.globals["page_scripts"] = plots.page_scripts
    environment.policies["json.dumps_kwargs"] = {}  # in the order of a panel's lines, which have their colours by it
    return environment


def _md_cell(cell: Cell) -> str:
    text, detail = words.markdown(cell.text), words.markdown(cell.detail)
    shown = f"{text} ({detail})" if detail and text else text or detail
    return f"{shown}, {words.markdown(cell.verdict)}" if cell.verdict else shown


def _score_cards(columns: Sequence[Column]) -> list[Cell]:
    """Scores of the last model with their intervals."""
    cards = []
    for name in gather.benchmarks_of(columns[-1:])[:MOST_SCORES]:
        score: Any = columns[-1].benchmark(name)
        text = words.value(score["value"], score["metric"]) + (" %" if words.is_share(score["metric"]) else "")
        interval = words.interval(score["low"], score["high"], score["metric"])
        cards.append(Cell(text=text, detail=f"{name} of {columns[-1].label}, {interval}"))
    return cards


def _change_cards(comparisons: Sequence[Comparison]) -> list[Cell]:
    """The largest gain beside the largest loss, of shares of right answers in one form of question, of a model over the
    one it comes from."""
    compared = [c for c in comparisons if c.is_parent and c.same_form and words.is_share(c.metric)]
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
    told = (
        ("seconds", duration, "of all stages together"),
        ("tokens", words.count, "tokens trained on"),
        ("flops", words.count, "FLOPs"),
    )
    totals = {name: sum(tables.number(stage.cost, name) for stage in stages.values()) for name, *_ in told}
    return [Cell(text=text_of(totals[name]), detail=detail) for name, text_of, detail in told if totals[name]]


def _dag(stages: Mapping[str, ReportedStage], progress: Sequence[StageProgress]) -> PageSection:
    """The DAG with times; of a run under way with states, and how far each stage is that has begun."""
    below = {name: duration(tables.number(stage.cost, "seconds")) for name, stage in stages.items()}
    below |= {stage.name: f"{stage.state} {duration(stage.elapsed_s)}" for stage in progress}
    parts = [Part(drawing=lineage_svg(stages, below, {stage.name: stage.state for stage in progress}))]
    if open_stages := [stage for stage in progress if stage.state not in (*ENDED_WELL, "waiting", "not run")]:
        parts.append(Part(progress=open_stages))
    return PageSection(title="Stages", parts=parts, in_markdown=len(parts) > 1)


def _scores(columns: Sequence[Column], comparisons: Sequence[Comparison]) -> PageSection | None:
    if not columns:
        return None
    parts = [Part(panels=plots.score_panels(columns), style="small"), Part(table=tables.scores_table(columns))]
    if comparisons:
        note = NOTES["differences"].format(false_alarms=FALSE_ALARMS, no_clear=NO_CLEAR)
        clear = [comparison for comparison in comparisons if comparison.verdict != NO_CLEAR]
        unclear = [comparison for comparison in comparisons if comparison.verdict == NO_CLEAR]
        heading = f"Which differences are real: {len(clear)} of {len(comparisons)}"
        parts.append(Part(heading=heading, note=note, table=tables.comparisons_table(clear) if clear else None))
        if unclear:
            heading = f"{NO_CLEAR}: {len(unclear)}"
            parts.append(Part(heading=heading, table=tables.comparisons_table(unclear), folded=True))
    return PageSection(title="Scores", note=NOTES["scores"], parts=parts)


def _curves(stages: Mapping[str, ReportedStage]) -> PageSection:
    parts = []
    for stage in stages.values():
        if panels := plots.panels_of(stage):
            parts.append(Part(heading=stage.name, panels=panels))
        if stage.kind.config.makes_rollouts and (policy := tables.policy_table(stage)):
            heading = f"{stage.name}: its own evaluations"
            parts.append(Part(heading=heading, note=NOTES["own evaluations"], table=policy))
    if reached := tables.reached_table(stages):
        parts.append(Part(heading="What each stage reached", table=reached))
    if rows := tables.rows_table(stages):
        parts.append(Part(heading="Rows trained, and how often", note=NOTES["rows"], table=rows))
    return PageSection(title="Training", parts=parts)


def _samples(
    columns: Sequence[Column], comparisons: Sequence[Comparison], stages: Mapping[str, ReportedStage]
) -> PageSection:
    parts = []
    for stage in stages.values():
        if samples := stage.samples:
            heading, note = f"{stage.name} while it trains", f"step {samples[0]['step']}"
            parts.append(Part(heading=heading, note=note, samples=samples, folded=stage.digest != ""))
    if table := tables.samples_table(columns):
        parts.append(Part(heading="The same prompts", table=table, style="samples"))
    by_last = [c for c in comparisons if c.after is columns[-1]]
    for comparison in by_last:
        for turned, other in (("right", "wrong"), ("wrong", "right")):
            examples = tables.examples_of(comparison, turned=turned)
            if examples:
                before, after = comparison.before.label, comparison.after.label
                heading = f"{comparison.benchmark}: {before} {other}, {after} {turned}"
                parts.append(Part(heading=heading, examples=examples, before=before, after=after, style=turned))
    for benchmark in gather.benchmarks_of(columns[-1:]):
        for verdict in ("passed", "failed"):
            if programs := tables.programs_of(columns[-1], benchmark, verdict=verdict):
                heading = f"{benchmark}: programs of {columns[-1].label} that {verdict}"
                parts.append(Part(heading=heading, programs=programs))
    return PageSection(title="Samples", parts=parts)


def _lineage(stages: Mapping[str, ReportedStage]) -> PageSection:
    parts = [Part(table=tables.lineage_table(stages))]
    if environment := tables.environment_table(stages):
        parts.append(Part(heading="Made with", table=environment, folded=True))
    return PageSection(title="Lineage", parts=parts)


def _config(stages: Mapping[str, ReportedStage], origins: Mapping[str, str]) -> PageSection:
    parts = []
    for stage in stages.values():
        table = tables.config_table(stage, origins)
        chosen = sum(row[2].text != "default" for row in table.rows)
        note = f"{chosen} of {counted(len(table.rows), 'value')} chosen or derived"
        parts.append(Part(heading=stage.name, note=note, table=table, folded=True))
    return PageSection(title="Config", note=NOTES["config"], parts=parts, in_markdown=False)
