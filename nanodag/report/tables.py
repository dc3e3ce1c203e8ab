"""The tables of the report, as data: the HTML and the Markdown page render the same ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanodag.config.resolve import leaves
from nanodag.config.rl_sections import HELD_OUT
from nanodag.errors.words import duration, size, tries
from nanodag.evaluation.paired import read_records
from nanodag.evaluation.results import COUNTS
from nanodag.report import words
from nanodag.report.gather import Column, Comparison, ReportedStage, benchmarks_of, sources_of

BOUNDS = ("low", "high")
MOST_EXAMPLES, MOST_PROGRAMS = 3, 2  # that are shown of a kind


@dataclass(frozen=True, kw_only=True)
class Cell:
    """text in normal size, detail small below it, verdict below that. tone: good, bad or none, of text and verdict.
    code: fixed width."""

    text: str
    detail: str = ""
    verdict: str = ""
    tone: str = ""
    code: bool = False


def cells(*texts: str) -> list[Cell]:
    """Cells with a text and nothing else."""
    return [Cell(text=text) for text in texts]


@dataclass(frozen=True, kw_only=True)
class Table:
    """numeric: numbers of the columns that are aligned to the right."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: tuple[int, ...] = ()


def scores_table(columns: Sequence[Column], *, is_short: bool = False) -> Table:
    """Benchmarks down, models across: score and standard error, 95 % interval below. is_short: one line a benchmark,
    score and 95 % interval."""
    rows = []
    for benchmark in benchmarks_of(columns):
        scores = [column.benchmark(benchmark) for column in columns]
        known = [score for score in scores if score is not None]
        metric = known[0]["metric"]
        unit = "%" if words.is_share(metric) else "" if is_short else "lower is better"
        items = " / ".join(map(str, sorted({score["num_items"] for score in known})))
        base = known[0].get("base_metric", metric)
        named = metric if base == metric else f"{metric} of {base}"
        lead = Cell(text=benchmark, detail=unit if is_short else f"{named}, {unit}, {items} items")
        rows.append([lead, *(_score_cell(score, is_short) if score else Cell(text="") for score in scores)])
    headers = ["benchmark", *(column.label for column in columns)]
    return Table(headers=headers, rows=rows, numeric=tuple(range(1, len(headers))))


def _score_cell(score: Mapping[str, Any], is_short: bool) -> Cell:
    metric = score["metric"]
    if is_short:
        value, low, high = (words.value(score[name], metric) for name in ("value", *BOUNDS))
        return Cell(text=value, detail=f"{low}–{high}")
    value = words.value(score["value"], metric)
    counts = [f", {score[name]} {name.replace('_', ' ')}" for name in COUNTS if score.get(name)]
    return Cell(
        text=f"{value} ± {words.value(score['stderr'], metric)}",
        detail=words.interval(score["low"], score["high"], metric) + "".join(counts),
    )


def comparisons_table(comparisons: Sequence[Comparison]) -> Table:
    """Differences on the same items, what is worse first."""
    rows = []
    for comparison in sorted(comparisons, key=lambda comparison: comparison.verdict != "worse"):
        result, metric, verdict = comparison.found, comparison.metric, comparison.verdict
        lead = Cell(text=comparison.benchmark, detail="" if comparison.same_form else "asked in different forms")
        models = f"{comparison.after.label} − {comparison.before.label}"
        difference, interval = result.difference, words.signed_interval(result.low, result.high, metric)
        tone = {"better": "good", "worse": "bad"}.get(verdict, "")
        changed = Cell(text=words.signed(difference, metric), detail=interval, verdict=verdict, tone=tone)
        items = Cell(text=f"{result.num_higher} / {result.num_lower}", detail=f"of {result.num_items}")
        rows.append([lead, *cells(models), changed, items, *cells(words.probability(comparison.adjusted))])
    headers = ["benchmark", "models", "difference", "items up / down", "p"]
    return Table(headers=headers, rows=rows, numeric=(2, 3, 4))


def stages_table(stages: Mapping[str, ReportedStage], price_per_hour: float) -> Table:
    """Time, tokens, FLOPs and cost a stage; what it does not have is left empty, and a stage without any left out."""
    every = [_stage_row(stage, price_per_hour) for stage in stages.values()]
    rows = [row for row in every if any(cell.text or cell.detail for cell in row[1:])]
    summed = ("seconds", "cpu_seconds", "flops", "tokens", "forward_tokens")
    totals = {name: sum(number(stage.cost, name) for stage in stages.values()) for name in summed}
    most = max(number(stage.cost, "peak_bytes") for stage in stages.values())
    largest = size(most) if most else ""
    cpu_time = duration(totals["cpu_seconds"]) if totals["cpu_seconds"] else ""
    trained, read, flops = (_count(totals[name]) for name in ("tokens", "forward_tokens", "flops"))
    last = cells("all", duration(totals["seconds"]), cpu_time, trained, read, "", flops, "", largest)
    headers = ["stage", "time", "CPU time", "trained", "read", "trained/s", "FLOPs", "MFU", "memory"]
    if price_per_hour:
        headers.append("price")
        last.append(Cell(text=f"{sum(_price(s, price_per_hour) for s in stages.values()):.2f}"))
    return Table(headers=headers, rows=[*rows, last], numeric=tuple(range(1, len(headers))))


def _stage_row(stage: ReportedStage, price_per_hour: float) -> list[Cell]:
    cost = stage.cost
    seconds, tokens = number(cost, "seconds"), number(cost, "tokens")
    speed = number(cost, "tokens_per_second") or (tokens / seconds if seconds and tokens else 0.0)
    last = duration(seconds - number(cost, "earlier_seconds"))
    device = str(cost.get("device", ""))
    if (ranks := _num_ranks(stage)) > 1:
        device = f"{ranks} × {device}"
    kind, documents = stage.kind.name if stage.kind.name != stage.name else "", number(stage.metrics, "document_share")
    row = [
        Cell(text=stage.name, detail=" · ".join(filter(None, [kind, device]))),
        Cell(text=duration(seconds) if seconds else "", detail=tries(int(number(cost, "num_attempts")), last)),
        Cell(text=duration(cost["cpu_seconds"]) if number(cost, "cpu_seconds") else ""),
        Cell(text=_count(tokens), detail=f"{100 * documents:.0f} % documents" if documents else ""),
        *cells(_count(number(cost, "forward_tokens")), _count(speed), _count(number(cost, "flops"))),
        Cell(text=f"{100 * cost['mfu']:.1f} %" if number(cost, "mfu") else ""),
        Cell(text=size(cost["peak_bytes"]) if number(cost, "peak_bytes") else ""),
    ]
    return [*row, *cells(f"{_price(stage, price_per_hour):.2f}")] if price_per_hour else row


def _price(stage: ReportedStage, price_per_hour: float) -> float:
    return number(stage.cost, "seconds") / 3600 * _num_ranks(stage) * price_per_hour


def _num_ranks(stage: ReportedStage) -> int:
    return int(stage.config.get("resources", {}).get("num_ranks", 1))


def _count(number: float) -> str:
    return words.count(number) if number else ""


def number(table: Mapping[str, Any], name: str) -> float:
    value = table.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def reached_table(stages: Mapping[str, ReportedStage]) -> Table | None:
    """The metrics that training stages ended with; None when there are none."""
    rows = []
    for stage in stages.values():
        shown = [
            f"{name.replace('_', ' ')} {words.shown(round(value, 4) if isinstance(value, float) else value)}"
            for name, value in stage.metrics.items()
            if value is not None and not isinstance(value, list) and (value != 0 or isinstance(value, float))
        ]
        if shown and not stage.kind.is_about_others:
            rows.append(cells(stage.name, " · ".join(shown)))
    return Table(headers=["stage", "reached"], rows=rows) if rows else None


def rows_table(stages: Mapping[str, ReportedStage]) -> Table | None:
    """Rows of each source that a stage trained on, and how often each; None where no stage counted them."""
    rows = [
        cells(name, source["url"], f"{source['rows']:,}", _times(source))
        for name, stage in stages.items()
        for source in stage.metrics.get("rows_trained", [])
    ]
    return Table(headers=["stage", "source", "rows trained", "how often"], rows=rows, numeric=(2,)) if rows else None


def _times(source: Mapping[str, Any]) -> str:
    # Two rows of a source differ by one at most: nanodag.train.batches.
    fewest, more = divmod(source["trained"], max(source["rows"], 1))
    often = {0: "never", 1: "once"}.get(fewest, f"{fewest:,} times")
    return f"{often}, {more:,} of them once more" if more else often


def policy_table(stage: ReportedStage) -> Table | None:
    """Scores of an RL stage's own evaluations: its start, its best and its last weights. None without any."""
    eval_lines: dict[str, list[Mapping[str, Any]]] = {}
    for line in stage.lines:
        name = line.get("benchmark") or HELD_OUT
        if line["event"] == "eval" and line.get(_policy_field(name)) is not None:
            eval_lines.setdefault(name, []).append(line)
    rows = []
    for name, lines in eval_lines.items():
        sign = 1 if lines[-1].get("higher_is_better", True) else -1
        best = max(lines, key=lambda line: (sign * number(line, _policy_field(name)), -line["step"]))
        start = lines[0] if lines[0]["step"] == 0 else None
        metric = lines[-1].get("metric", "reward")
        lead = Cell(text="held-out prompts" if name == HELD_OUT else name, detail=metric)
        shown = [_policy_cell(line, name) if line is not None else Cell(text="") for line in (start, best, lines[-1])]
        rows.append([lead, *shown])
    headers = ["evaluation", "start", "best", "last"]
    return Table(headers=headers, rows=rows, numeric=(1, 2, 3)) if rows else None


def _policy_field(name: str) -> str:
    return HELD_OUT if name == HELD_OUT else f"benchmark_{name}"


def _policy_cell(line: Mapping[str, Any], name: str) -> Cell:
    """A score and its 95 % interval; a reward as it is, as it may be no share."""
    digits = 3 if name == HELD_OUT or not words.is_share(line["metric"]) else 1
    scale = 1 if digits == 3 else 100
    value, *bounds = (
        f"{scale * number(line, field):.{digits}f}" for field in (_policy_field(name), *BOUNDS) if field in line
    )
    within = f"{' to '.join(bounds)}, " if bounds else ""
    return Cell(text=value, detail=f"{within}step {line['step']}")


def samples_table(columns: Sequence[Column]) -> Table | None:
    """Answers of each model to the same prompts; None when no eval stage was given any."""
    answers: dict[str, dict[str, str]] = {}
    for column in columns:
        for stage in column.evals:
            for sample in stage.results["samples"]:
                answers.setdefault(sample["prompt"], {})[column.label] = sample["completion"]
    labels = [column.label for column in columns]
    rows = [
        [Cell(text=prompt), *(Cell(text=words.spoken(said.get(label, "")), code=True) for label in labels)]
        for prompt, said in answers.items()
    ]
    return Table(headers=["prompt", *labels], rows=rows) if rows else None


def examples_of(comparison: Comparison, *, turned: str) -> list[dict[str, str]]:
    """Items with written answers that `after` has right and `before` wrong (turned="right"), or the other way round:
    prompt, target, before and after."""
    name, metric = comparison.benchmark, comparison.metric
    before = {record["id"]: record for record in read_records(comparison.before.samples_path(name))}
    direction = 1.0 if turned == "right" else -1.0
    examples = []
    for record in read_records(comparison.after.samples_path(name)):
        earlier = before[record["id"]]
        change = record["scores"][metric] - earlier["scores"][metric]
        if change == direction and (answer := _written(record)) is not None and (once := _written(earlier)) is not None:
            item = {"prompt": record["prompt"], "target": str(record["target"]), "before": once, "after": answer}
            examples.append({name: words.spoken(text) for name, text in item.items()})
    return examples[:MOST_EXAMPLES]


def programs_of(column: Column, benchmark: str, *, verdict: str) -> list[dict[str, str]]:
    """Programs of a code benchmark that passed, or failed; the first answer to each of the first items: item, text, and
    error, of its first failure or that there is none."""
    programs = []
    for record in read_records(column.samples_path(benchmark)):
        details = record.get("samples", [record])[0].get("details", {})
        if details.get("verdict") == verdict and details.get("program"):
            error = words.shortened(details["error"]) or "all tests passed"
            text = words.shortened(details["program"], 1200)
            programs.append({"item": str(record["id"]), "text": text, "error": error})
    return programs[:MOST_PROGRAMS]


def _written(record: Mapping[str, Any]) -> str | None:
    """An item's written answer, the best one of several; None where likelihoods answer."""
    samples = record.get("samples", [record] if "output" in record else [])
    best = max(samples, key=lambda sample: sum(sample["scores"].values()), default=None)
    return None if best is None else str(best["output"])


def lineage_table(stages: Mapping[str, ReportedStage]) -> Table:
    """Digests of each stage and of its inputs."""
    rows = []
    for stage in stages.values():
        key, digest = (Cell(text=hashed[:16], code=True) for hashed in (stage.key, stage.digest))
        made_of = ", ".join(source.name for source in sources_of(stages, stage))
        rows.append([*cells(stage.name, stage.kind.name), key, *cells(stage.attempt), digest, *cells(made_of)])
    headers = ["stage", "kind", "key", "attempt", "content digest", "made of"]
    return Table(headers=headers, rows=rows, numeric=(3,))


def config_table(stage: ReportedStage, origins: Mapping[str, str]) -> Table:
    """Every value of a stage's resolved config, what was chosen or derived before what was left at its default."""
    rows = []
    for name, value in leaves(dict(stage.config), stage.name):
        # what the dial would have said
        origin = Cell(text=origins.get(name, "default"), detail=origins.get(f"{name}!", ""))
        field = Cell(text=name.removeprefix(f"{stage.name}."), code=True)
        rows.append([field, *cells(words.shortened(words.shown(value), 600)), origin])
    rows.sort(key=lambda row: row[2].text == "default")
    return Table(headers=["field", "value", "from"], rows=rows)


def environment_table(stages: Mapping[str, ReportedStage]) -> Table | None:
    """Environments of the stages, one row for each setting that they share or differ in; None when nothing was
    recorded."""
    stages_by_setting: dict[tuple[str, str], list[str]] = {}
    for stage in stages.values():
        for name, value in leaves(dict(stage.environment)):
            stages_by_setting.setdefault((name, words.shown(value)), []).append(stage.name)
    if not stages_by_setting:
        return None
    everywhere = sum(bool(stage.environment) for stage in stages.values())
    rows = [
        cells(name, value, "all" if len(where) == everywhere else ", ".join(where))
        for (name, value), where in stages_by_setting.items()
    ]
    return Table(headers=["setting", "value", "stages"], rows=rows)
