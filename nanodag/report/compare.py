"""Runs on one page: curves of stages of one name over each other, scores beside each other, and what differs in their
configs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanodag.report import plots, tables
from nanodag.report.gather import columns_of, stages_of
from nanodag.report.page import NOTES, PageSection, Part, Report
from nanodag.report.tables import Cell, Table, cells
from nanodag.report.words import shortened, shown


def compare_report(contexts: Mapping[str, Mapping[str, Any]], configs: Mapping[str, Mapping[str, Any]]) -> Report:
    """contexts: of each run, as nanodag.report describes them. configs: of each run, settings by dotted name."""
    runs = {run: stages_of(context) for run, context in contexts.items()}
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
    values = {name: [shortened(shown(config.get(name))) for config in configs.values()] for name in names}
    rows = [[Cell(text=name, code=True), *cells(*told)] for name, told in values.items() if len(set(told)) > 1]
    table = Table(headers=["setting", *configs], rows=rows) if rows else None
    return PageSection(title="What differs", note=NOTES["differs"], parts=[Part(table=table, style="many")])
