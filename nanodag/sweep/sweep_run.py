"""A sweep as a run: from a grid or a list of overrides to one pipeline in which what points have in common stands once;
begun, what the store has of it looked up at once, and concluded by its page in the store."""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanodag.config import AnyStage, Pipeline, order_of, resolve
from nanodag.config.document import parse_yaml
from nanodag.config.kind import SCORES
from nanodag.config.kinds import find_kind
from nanodag.config.pipeline import full_path
from nanodag.config.resolve import value_of
from nanodag.errors import ConfigError
from nanodag.errors.words import counted
from nanodag.host.machine import Machine
from nanodag.nightly.nights import PREFIX as NIGHT
from nanodag.run.build_stage import key_of, made_from
from nanodag.run.derived_runs import machine_for, note_page, open_composed, page_key, publish_page
from nanodag.run.record import Run, StageResult, check_name, pipeline_file, refuse_busy, result_of, store_of
from nanodag.store import canonical_json
from nanodag.store.run_record import PointRecord, RunRecord, SweepRecord

MAX_POINTS = 1000
# What belongs to the sweep as a whole: its points share a store, a server and where data come from.
SETTINGS = frozenset(Pipeline.model_fields) - {"stages", "seed", "device", "core_bundle"} | {"preset", "unchecked"}
PAGE_STAGE = "comparison"


class Sweep:
    """stage: of the preset, what is compared. pipeline: all points' stages. points: in their order. predicted: the
    pipeline of a depth that a scaling law is to predict. Not a dataclass, so that what carries it about does not look
    inside."""

    def __init__(
        self, stage: str, pipeline: Pipeline, points: Sequence[PointRecord], predicted: Pipeline | None = None
    ) -> None:
        self.stage, self.pipeline, self.predicted = stage, pipeline, predicted
        self.points = tuple(points)

    @property
    def names(self) -> list[str]:
        """The options that points set, in the order given."""
        return list(dict.fromkeys(name for point in self.points for name in values_of(point)))


def values_of(point: PointRecord) -> dict[str, str]:
    """Options that a point sets: name -> text. Raises ConfigError for an override that is none."""
    return dict(map(_split, point.overrides))


def points_of(grid: Sequence[str], listed: Sequence[Sequence[str]]) -> list[PointRecord]:
    """Every combination of the grid's values with every listed set of overrides.

    grid: `dotted.name=[value, ...]` each. listed: lists of `dotted.name=value`. Raises ConfigError.
    """
    axes = [_axis(text) for text in grid]
    combined = [(*chosen, *more) for more in (listed or [()]) for chosen in itertools.product(*axes)]
    if not grid and not listed:
        raise ConfigError("A sweep needs a grid, as rl.learning_rate=[1e-6,2e-6], or a list of points.")
    if len(combined) > MAX_POINTS:
        raise ConfigError(f"The grid has {len(combined)} points; {MAX_POINTS} is the limit. Split it.")
    return [
        PointRecord(number=number, overrides=overrides, stages={}) for number, overrides in enumerate(combined, start=1)
    ]


def make_sweep(
    file: Path,
    preset: str,
    overrides: Sequence[str],
    grid: Sequence[str],
    listed: Sequence[Sequence[str]],
    stage: str,
    *,
    predict: int = 0,
    machine: Machine | None = None,
) -> Sweep:
    """Resolve every point, for a machine or this one, and join their pipelines.

    stage: what is compared; empty for the last stage that a point sets an option of. Of the preset's DAG a point has
    what that stage needs, the stage, and the evals of it. predict: the depth that a scaling law is to predict; 0 for no
    law. Raises ConfigError for a wrong option, naming the point, and for points that determine no law.
    """
    points = points_of(grid, listed)
    base = resolve(file, preset, overrides, machine=machine).pipeline
    for point in points:
        if len({full_path(base.stages, _split(text)[0]) for text in point.overrides}) < len(point.overrides):
            raise ConfigError(f"Point {point.number} sets an option twice: {', '.join(point.overrides)}.")
        for name in values_of(point):
            if name.partition(".")[0] in SETTINGS:
                raise ConfigError(f"{name!r} belongs to the sweep as a whole; give it beside the grid, not in it.")
    if not stage:
        heads = {name.partition(".")[0] for point in points for name in values_of(point)}
        kinds = {name: find_kind(each.kind) for name, each in base.stages.items()}
        if not (named := [n for n in order_of(base) if n in heads and not kinds[n].is_about_others]):
            raise ConfigError(f"No point sets an option of a stage; the stages are {', '.join(base.stages)}.")
        stage = named[-1]
    if stage not in base.stages:
        raise ConfigError(f"Preset {base.preset} has no stage {stage!r}; it has {', '.join(base.stages)}.")
    if find_kind(base.stages[stage].kind).is_about_others:
        raise ConfigError(f"Stage {stage} is of kind {base.stages[stage].kind}; sweep over one that makes something.")
    pipelines = []
    for point in points:
        try:
            pipelines.append(resolve(file, preset, [*overrides, *point.overrides], machine=machine).pipeline)
        except ConfigError as error:
            raise ConfigError(f"Point {point.number} ({', '.join(point.overrides)}): {error}") from None
    predicted = None
    if predict:
        from nanodag.sweep.scaling import check_sizes, size_of  # with scipy, which other sweeps do without

        predicted = resolve(file, preset, [*overrides, f"{stage}.shape.depth={predict}"], machine=machine).pipeline
        check_sizes(sizes := [size_of(pipeline, stage) for pipeline in pipelines])
        if size_of(predicted, stage) in sizes:
            raise ConfigError(f"--predict {predict}: a point trains that depth for as many tokens.")
    stages, points = _joined(pipelines, points, stage)
    made = base.model_copy(
        update={"stages": stages, "description": f"Sweep over {stage}, {counted(len(points), 'point')}"}
    )
    return Sweep(stage, made, points, predicted)


def _joined(
    pipelines: Sequence[Pipeline], points: Sequence[PointRecord], stage: str
) -> tuple[dict[str, AnyStage], list[PointRecord]]:
    """One table of stages: equal configs on equal inputs are one stage, which has its name from the preset where all
    points share it, with the number of the first point that has it where they do not."""
    identities: list[dict[str, str]] = []
    variants: dict[str, dict[str, int]] = {}
    for pipeline, point in zip(pipelines, points, strict=True):
        by_name: dict[str, str] = {}
        for name in _needed(pipeline, stage):
            config = pipeline.stages[name]
            inputs = {label: by_name[source] for label, source in config.inputs.items()}
            by_name[name] = canonical_json([name, config.model_dump(mode="json", exclude={"inputs"}), inputs])
            variants.setdefault(name, {}).setdefault(by_name[name], point.number)
        identities.append(by_name)
    digits = len(str(len(points)))
    stages: dict[str, AnyStage] = {}
    placed: list[PointRecord] = []
    for pipeline, point, by_name in zip(pipelines, points, identities, strict=True):
        names = {}
        for name, identity in by_name.items():
            number = f"-{variants[name][identity]:0{digits}d}" if len(variants[name]) > 1 else ""
            names[name] = f"{name}{number}"
            config = pipeline.stages[name]
            inputs = {label: names[source] for label, source in config.inputs.items()}
            made = config.model_copy(update={"inputs": inputs})
            if stages.setdefault(names[name], made) != made:
                raise ConfigError(f"Point {point.number}'s {name} and another stage are both {names[name]}.")
        placed.append(point.changed(stages=names))
    return stages, placed


def _needed(pipeline: Pipeline, stage: str) -> list[str]:
    """Stages that a stage and its evals need, inputs first, the stage itself, and its evals."""
    order = order_of(pipeline)
    stages = {
        name
        for name, config in pipeline.stages.items()
        if name == stage or (find_kind(config.kind).makes == SCORES and config.inputs.get("model") == stage)
    }
    for name in reversed(order):
        if name in stages:
            stages |= set(pipeline.stages[name].inputs.values())
    return [name for name in order if name in stages]


def _axis(text: str) -> list[str]:
    """`rl.learning_rate=[1e-6,2e-6]` as one override a value."""
    name, raw = _split(text)
    values = parse_yaml(raw, lambda line: f"Grid {text!r:.80}")
    if not isinstance(values, list) or not values:
        raise ConfigError(f"Grid {text!r}: give a list of values, as {name}=[1,2].")
    return [f"{name}={_text(value)}" for value in values]


def _text(value: Any) -> str:
    with suppress(ConfigError):  # as what it is, it would be no YAML
        if isinstance(value, str) and value_of(f"={value}") == value:
            return value
    return json.dumps(value, ensure_ascii=False)


def _split(text: str) -> tuple[str, str]:
    name, equals, raw = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"{text!r} is not of the form name=value.")
    return name.strip(), raw.strip()


def begin_sweep(
    name: str,
    *,
    grid: Sequence[str],
    points: Sequence[Sequence[str]],
    stage: str,
    preset: str,
    overrides: Sequence[str],
    file: str,
    flow_run: str,
    predict: int = 0,
) -> tuple[Sweep, Run]:
    """Begin a sweep, or resume the one of that name. Parameters as `make_sweep` has them.

    Raises ConfigError, and StoreBusy when another process that is alive runs it.
    """
    path = pipeline_file(file)
    check_name(name)
    if name.startswith(NIGHT):
        raise ConfigError(f"Sweep name {name!r}: names that begin with {NIGHT!r} are those of nights.")
    store = store_of(resolve(path, preset, overrides).pipeline)
    before = store.find_run(name)
    if before is not None and before.sweep is None:
        raise ConfigError(f"{name} is a run of {store.url} that is no sweep; choose another name.")
    refuse_busy("Sweep", before)
    machine = machine_for(name, store)
    sweep = make_sweep(path, preset, overrides, grid, points, stage, predict=predict, machine=machine)
    about = SweepRecord(stage=sweep.stage, points=sweep.points)
    run = open_composed(
        name,
        sweep.pipeline,
        store,
        file=path,
        to_do=in_waves(sweep, list(sweep.pipeline.stages)),
        flow_run=flow_run,
        machine=machine,
        about=about,
    )
    return sweep, run


def in_waves(sweep: Sweep, stages: Sequence[str]) -> list[str]:
    """Stages so that all points' first ones come before any point's second; inputs always come first."""
    depth: dict[str, int] = {}
    for stage in stages:  # a point's stages stand in the DAG's order, and later points only name earlier stages
        depth[stage] = 1 + max((depth[source] for source in sweep.pipeline.stages[stage].inputs.values()), default=0)
    return sorted(stages, key=lambda stage: depth[stage])


def find_built(run: Run) -> dict[str, StageResult]:
    """Results that the store has of a run's stages, noted in its record at once; what needs a missing one is missing
    too."""
    results: dict[str, StageResult] = {}
    notes: dict[str, dict[str, Any]] = {}
    now = time.time()
    for stage in run.to_do:
        config = run.pipeline.stages[stage]
        if not set(config.inputs.values()) <= set(results):
            continue
        inputs = {label: results[source] for label, source in config.inputs.items()}
        key, _ = key_of(run, config, inputs)
        if (artifact := run.store.lookup(key)) is None:
            continue
        results[stage] = result_of(stage, artifact, was_found=True)
        made = made_from(artifact, config, inputs)
        notes[stage] = {"state": "found", "reason": "", "started": now, "ended": now, "key": key, "made": made}

    def note(record: RunRecord) -> RunRecord:
        noted = {stage: record.stages[stage].changed(**facts) for stage, facts in notes.items()}
        return record.changed(stages={**record.stages, **noted})

    run.store.change_run(run.name, note)
    return results


def conclude(sweep: Sweep, run: Run, results: Mapping[str, StageResult]) -> Path:
    """Compare the points and publish the page; one about the same results is found, not drawn again. Returns the path
    of sweep.html; its table lies beside it in sweep.md.

    results: stage of the sweep's pipeline -> its result; what failed is not in it.
    """
    config: dict[str, Any] = {"stage": sweep.stage, "run": run.name}
    config["points"] = [[list(p.overrides), dict(p.stages)] for p in sweep.points]
    if sweep.predicted is not None:
        config["predicted"] = sweep.predicted.stages[sweep.stage].model_dump(mode="json")
    entries = run.store.read_run(run.name).stages
    ended = {name: entry.reason for name, entry in entries.items() if entry.state == "stopped" and entry.reason}
    config |= {"ended": ended} if ended else {}
    artifact = run.store.lookup(page_key(PAGE_STAGE, config, results))
    if artifact is None:
        # They draw, and resample: a sweep of which nothing changed needs neither.
        from nanodag.report.page import to_html, to_markdown
        from nanodag.sweep.sweep_page import as_json, rows_of, sweep_report

        rows, files, sections = rows_of(sweep, run, results, ended), {}, []
        if sweep.predicted is not None:
            from nanodag.sweep.scaling_page import law_section

            section, law = law_section(run.name, sweep, rows)
            sections, files["scaling.json"] = [section], json.dumps(law, indent=1)
        report = sweep_report(run.name, sweep, rows, sections)
        files |= {
            "sweep.html": to_html(report),
            "sweep.md": to_markdown(report),
            "sweep.json": json.dumps(as_json(rows), indent=1),
        }
        metrics = {"num_points": len(rows), "num_failed": sum(row.artifact is None and not row.early for row in rows)}
        artifact = publish_page(run, PAGE_STAGE, config, results, files, metrics)
    note_page(run, PAGE_STAGE, artifact)
    return run.store.materialize(artifact) / "sweep.html"
