"""Stages, scores and comparisons of a report, read from the job's context and the stages' folders."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

from nanodag.config.kind import SCORES, Kind
from nanodag.config.kinds import recorded_kind
from nanodag.config.kinds.evaluation import EvalStage
from nanodag.errors import SourceError
from nanodag.errors.words import counted
from nanodag.evaluation.paired import FALSE_ALARMS, PairedDifference, holm, paired
from nanodag.host.beside import table_beside
from nanodag.host.images import IMAGES, picture_url
from nanodag.rewards.reward import labels
from nanodag.rl.rollouts.metrics import over_optimised, why_nothing_was_learned
from nanodag.rl.rollouts.rollout import read_lines

HEADLINES = ("core", "chat_core")
"""Benchmarks that are means over many tasks: they stand first."""
MOST_SAMPLES = 6  # of a stage's training
NO_CLEAR = "no clear difference"
ASKED = ("form", "num_fewshot", "sampling")
"""What must agree for two scores of a benchmark to be of the same question."""
WINDOW = 10  # steps
SHARES: dict[str, tuple[float, str]] = table_beside(__file__, "unusual.yaml")
NOISE = 3.0  # standard deviations of a window's mean by which it must lie above the lowest window's
RISE = 0.03  # share of the lowest mean, the same
NORMAL = 0.826  # median distance of a value from the middle of its neighbours, in standard deviations


@dataclass(frozen=True, kw_only=True)
class ReportedStage:
    """One finished stage. Fields as in the context (nanodag.report); files and records: local folders."""

    name: str
    kind: Kind
    key: str
    attempt: str
    digest: str
    metrics: Mapping[str, Any]
    cost: Mapping[str, Any]
    config: Mapping[str, Any]
    lineage: Mapping[str, Mapping[str, Any]]
    environment: Mapping[str, Any]
    files: Path
    records: Path

    @classmethod
    def read(cls, name: str, raw: Mapping[str, Any]) -> Self:
        """raw: as the context has it."""
        fields = {key: raw[key] for key in ("key", "attempt", "digest", "metrics", "cost", "config", "lineage")}
        fields |= {"environment": raw.get("environment", {}), "kind": recorded_kind(raw["kind"])}
        return cls(name=name, files=Path(raw["files"]), records=Path(raw["records"]), **fields)

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of its metrics.jsonl; none where there is no such file, or no folder but the empty path, which is
        the working directory's."""
        return list(read_lines(self.records / "metrics.jsonl", is_whole=True)) if self.records != Path() else []

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of one metric, over all lines that have it as a number."""
        pairs = [(float(line["step"]), float(line[name])) for line in self.lines if _is_number(line.get(name))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    @cached_property
    def watched(self) -> dict[str, str]:
        """Measures of an RL stage that it does not train on, label by metric: rewards of weight 0, and benchmarks."""
        rewards = self.config.get("reward", ())
        named = labels([reward["name"] for reward in rewards])
        weights = {label: reward["weight"] for label, reward in zip(named, rewards, strict=True)}

        def weight(part: str) -> float:
            of = [label for label in weights if f"{part}_".startswith(f"{label}_")]
            return weights.get(max(of, key=len, default="auto"), 1.0)  # a prompt's own reward is called as it names it

        parts = {name[7:] for line in self.lines for name in line if name.startswith("reward_")} - {"failed"}
        unseen = {f"reward_{part}": part for part in sorted(parts) if not weight(part)}
        scored = {line["benchmark"]: line.get("higher_is_better") for line in self.lines if "benchmark" in line}
        return unseen | {f"benchmark_{name}": name for name, highest in scored.items() if highest}

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The last texts of its training: prompt, `text`, or of RL `response`, reward and `pictures`, as data: URLs."""
        lines = [line for line in self.lines if line.get("event") == "sample"]
        last = [line for line in lines if line["step"] == lines[-1]["step"]]
        rows = [{"step": line["step"], **one} for line in last for one in line.get("responses", [line])][:MOST_SAMPLES]
        folders = self.records / IMAGES, self.records / "records" / IMAGES  # of a stage under way
        folder = next((folder for folder in folders if folder.is_dir()), folders[0])
        return [{**one, "pictures": [picture_url(folder, digest) for digest in one.get("images", ())]} for one in rows]

    @cached_property
    def results(self) -> dict[str, Any]:
        return json.loads((self.files / "results.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Column:
    """An evaluated model: a column of the table of scores. evals: its eval stages."""

    label: str
    stage: ReportedStage
    evals: tuple[ReportedStage, ...]

    def benchmark(self, name: str) -> Mapping[str, Any] | None:
        """The scores of one benchmark, None where this model was not asked."""
        return next((e.results["benchmarks"][name] for e in self.evals if name in e.results["benchmarks"]), None)

    def samples_path(self, name: str) -> Path:
        return next(e.files / "samples" / f"{name}.jsonl" for e in self.evals if name in e.results["benchmarks"])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`after` against `before` on one benchmark. same_form: both were asked in the same words. is_parent: `after` was
    trained from `before`, not beside it. adjusted: the p-value, by Holm's correction over all that are compared."""

    benchmark: str
    before: Column
    after: Column
    higher_is_better: bool
    same_form: bool
    is_parent: bool
    found: PairedDifference
    adjusted: float = 1.0

    @property
    def verdict(self) -> str:
        """better, worse, or no clear difference: by the adjusted p-value alone."""
        if self.adjusted >= FALSE_ALARMS:
            return NO_CLEAR
        return "better" if self.gain > 0 else "worse"

    @property
    def metric(self) -> str:
        return str(self.after.benchmark(self.benchmark)["metric"])  # type: ignore[index] # both have it

    @property
    def gain(self) -> float:
        """The difference, above 0 where `after` is the better one."""
        return self.found.difference if self.higher_is_better else -self.found.difference


def stages_of(context: Mapping[str, Any]) -> dict[str, ReportedStage]:
    """The stages of a run by name: inputs before what was made of them, whatever order they were given in."""
    stages = {name: ReportedStage.read(name, raw) for name, raw in context["stages"].items()}
    depth: dict[str, int] = {}

    def depth_of(stage: ReportedStage) -> int:
        if stage.name not in depth:
            depth[stage.name] = 1 + max(map(depth_of, sources_of(stages, stage)), default=0)
        return depth[stage.name]

    return dict(sorted(stages.items(), key=lambda item: (depth_of(item[1]), item[1].kind.order, item[0])))


def stage_behind(stages: Mapping[str, ReportedStage], source: Mapping[str, Any]) -> ReportedStage | None:
    """The stage that a line of lineage names, by key and digest: an earlier run may have called it otherwise. None when
    it is not part of this report."""
    return next((s for s in stages.values() if s.key == source["key"] and s.digest == source["digest"]), None)


def sources_of(stages: Mapping[str, ReportedStage], stage: ReportedStage) -> list[ReportedStage]:
    """The stages that a stage's inputs come from."""
    return [origin for source in stage.lineage.values() if (origin := stage_behind(stages, source)) is not None]


def columns_of(stages: Mapping[str, ReportedStage]) -> list[Column]:
    """The evaluated models in the DAG's order, named BASE, MID, SFT, RL, or by stage where a kind is there twice."""
    evals: dict[str, list[ReportedStage]] = {}
    for stage in stages.values():
        if stage.kind.makes == SCORES:  # of a model that somebody serves, they are no stage's but their own
            model = stage_behind(stages, stage.lineage["model"]) if "model" in stage.lineage else stage
            if model is not None:
                evals.setdefault(model.name, []).append(stage)
    models = [stages[name] for name in stages if name in evals]
    kinds = [model.kind.name for model in models]
    labels = [(m.kind.label if kinds.count(m.kind.name) == 1 else "") or m.name.upper() for m in models]
    return [Column(label=label, stage=m, evals=tuple(evals[m.name])) for label, m in zip(labels, models, strict=True)]


def benchmarks_of(columns: Sequence[Column]) -> list[str]:
    """Names of all benchmarks that have scores: the means over many tasks, then in the config's order where it says."""
    evals = [stage for column in columns for stage in column.evals]
    suites = [stage.config["benchmarks"] for stage in evals if issubclass(stage.kind.config, EvalStage)]
    names = [benchmark["name"] for benchmarks in suites for benchmark in benchmarks]
    scored = dict.fromkeys(name for stage in evals for name in stage.results["benchmarks"])
    ordered = dict.fromkeys([*(name for name in names if name in scored), *scored])
    return sorted(ordered, key=lambda name: HEADLINES.index(name) if name in HEADLINES else len(HEADLINES))


def comparisons_of(columns: Sequence[Column], stages: Mapping[str, ReportedStage]) -> list[Comparison]:
    """Each model against the nearest evaluated one that it was trained from, and against others trained from that one.

    The latter is what tells RL from a control that spent the same on more SFT. p-values are corrected over all of them.
    """
    comparisons = []
    parents = {column.label: _nearest_evaluated(column, columns, stages) for column in columns}
    for benchmark in benchmarks_of(columns):
        for number, column in enumerate(columns):
            parent = parents[column.label]
            siblings = [c for c in columns[:number] if parent is not None and parents[c.label] is parent]
            for other in ([parent] if parent else []) + siblings:
                with suppress(SourceError):  # they were asked other items: nothing to compare
                    if comparison := _compared(benchmark, other, column, is_parent=other is parent):
                        comparisons.append(comparison)
    adjusted = holm([comparison.found.p_value for comparison in comparisons])
    return [replace(comparison, adjusted=p) for comparison, p in zip(comparisons, adjusted, strict=True)]


def _compared(name: str, before: Column, after: Column, *, is_parent: bool) -> Comparison | None:
    first, second = before.benchmark(name), after.benchmark(name)
    if first is None or second is None or first["metric"] != second["metric"]:
        return None
    return Comparison(
        benchmark=name,
        before=before,
        after=after,
        higher_is_better=bool(second["higher_is_better"]),
        is_parent=is_parent,
        same_form=all(first.get(name) == second.get(name) for name in ASKED),
        found=paired(before.samples_path(name), after.samples_path(name), second["metric"]),
    )


def _nearest_evaluated(column: Column, columns: Sequence[Column], stages: Mapping[str, ReportedStage]) -> Column | None:
    by_name = {c.stage.name: c for c in columns}
    stage: ReportedStage | None = column.stage
    while stage is not None and "model" in stage.lineage:
        stage = stage_behind(stages, stage.lineage["model"])
        if stage is not None and stage.name in by_name:
            return by_name[stage.name]
    return None


def warnings_of(stages: Mapping[str, ReportedStage], stale: Mapping[str, str]) -> list[str]:
    """Warnings for the reader of scores: what is stale, that RL learned nothing, and prompts that were too long.
    stale: stage -> why."""
    warnings = [f"{name} is stale: {why}." for name, why in stale.items()]
    for stage in stages.values():
        if stage.kind.config.makes_rollouts:
            if stage.kind.trains:
                learned = "learned" if stage.digest else "has so far learned"
                warnings += [f"{stage.name} {learned} nothing: {why}" for why in why_nothing_was_learned(stage.metrics)]
                warnings += [f"{stage.name} went too far: {why}" for why in over_optimised(stage.lines, stage.watched)]
            num_over = stage.metrics.get("eval_too_long")
            if _is_number(num_over) and num_over:
                warnings.append(f"{stage.name}: {counted(num_over, 'held-out prompt')} too long to be asked.")
        has_scores = stage.kind.makes == SCORES and stage.digest
        for name, score in stage.results["benchmarks"].items() if has_scores else ():
            if score.get("too_long"):
                many = f"{score['too_long']} of {counted(score['num_items'], 'item')}"
                warnings.append(f"{stage.name} {name}: the prompts of {many} were too long for the model.")
    return warnings


def unusual(stage: ReportedStage) -> list[str]:
    """Remarks on the curves of a stage, for which somebody who watches it would stop it: rewards all alike, answers
    that are cut or repeat themselves, a loss that rises."""
    remarks = []
    for name, (least, words) in SHARES.items():
        shares = stage.curve(name)[1][-WINDOW:] if stage.kind.config.makes_rollouts else []
        if shares and (share := fmean(shares)) >= least:
            remarks.append(f"{stage.name}: {share:.0%} of the last {words}.")
    for name in ("loss", "validation_loss") if stage.kind.config.curves == "loss" else ():
        steps, values = stage.curve(name)
        size = max(2, len(values) // 8)
        means = [fmean(values[n : n + size]) for n in range(len(values) - size + 1)]
        if len(means) <= size or (name != "loss" and stage.config.get("patience")):  # that stops by it
            continue
        low = min(range(len(means)), key=means.__getitem__)
        # Of the whole curve, less its trend: a mixture's steps differ more than the few of the last window show.
        bends = [abs(now - (before + after) / 2) for before, now, after in zip(values, values[1:], values[2:])]
        noise = median(bends) / NORMAL * (2 / size) ** 0.5
        if means[-1] - means[low] > NOISE * noise + RISE * abs(means[low]):
            rise = f"{means[low]:.3g} from step {steps[low]:.0f} on, now {means[-1]:.3g}"
            remarks.append(f"{stage.name}: {name.replace('_', ' ')} rises, {rise}.")
    return remarks


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
