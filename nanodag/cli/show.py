"""`nanodag config`, `status`, `stages` and `report`: config, runs and stages as tables."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from nanodag.cli.live_table import STYLES, fitting, make_console
from nanodag.cli.parameters import command
from nanodag.config import resolve
from nanodag.config.derive import reason_of
from nanodag.config.kind import PAGE
from nanodag.config.kinds import recorded_kind
from nanodag.config.model_size import model_of
from nanodag.config.reference import setting
from nanodag.config.resolve import leaves
from nanodag.config.rl_parts import EntryConfig
from nanodag.errors import ArtifactNotFound, CorruptArtifact, NanodagError, NewerFormat
from nanodag.errors.words import counted, duration, listed, nearest, size, tries
from nanodag.host.machine import machine_of
from nanodag.run.progress import progress_of, shown_state, tracker_urls
from nanodag.run.record import pipeline_file, served_store, state_of
from nanodag.run.stale_stages import advice, stale_stages
from nanodag.store import Store
from nanodag.store.provenance import code_revision
from nanodag.store.run_record import RunRecord, StageRecord

NEWEST = 10


def show_config(overrides: Sequence[str], *, preset: str, file: str, on: str = "") -> None:
    """Every value of the resolved pipeline with its origin, and what the dial says beside a value that was given. on:
    another machine, as nanodag.host.machine.machine_of reads it."""
    console = Console(soft_wrap=True)
    path = pipeline_file(file)
    resolved = resolve(path, preset, overrides, machine=machine_of(on) if on else None)
    if not on:  # what lies on another machine cannot be looked at
        from nanodag.run.preflight import check_names  # numpy and more, which other commands do without

        check_names(resolved.pipeline, file=path, local=Path(resolved.pipeline.store.url), only_names=True)
    where = f"on {resolved.machine}" if on else f"on this machine, {resolved.machine}"
    console.print(f"# {path}, preset {resolved.pipeline.preset}, {where}", markup=False, highlight=False)
    print_warnings(console, resolved.warnings)
    section = ""
    for name, value in leaves(resolved.pipeline):
        head, dot, rest = name.partition(".")
        if (head if dot else "") != section:
            section = head if dot else ""
            console.print(f"\n{section}:", style="bold", highlight=False)
            stage = resolved.pipeline.stages.get(section)
            if stage is not None and stage.is_from_scratch and (model := model_of(resolved.pipeline, section)):
                counts = model.parameters | {"flops_per_token": model.training_flops(stage.step_size[1])}
                numbers = ", ".join(f"{part} {count:,}" for part, count in counts.items())
                console.print(f"  # parameters and FLOPs: {numbers}", style="dim", highlight=False)
        origin = resolved.origins[name]
        if note := resolved.origins.get(f"{name}!"):
            origin += f"; {note}"
        line = Text(f"  {rest if dot else name} = {_plain(value)}")
        line.append(f"    # {origin}", style="cyan" if origin.startswith(("override", "environment")) else "dim")
        console.print(line)


def print_warnings(console: Console, warnings: Sequence[str]) -> None:
    """Print settings that were given by hand and are a bad idea on the machine."""
    for text in warnings:
        console.print(f"Warning: {text}.", style="yellow", markup=False, highlight=False, soft_wrap=True)


def explain_setting(name: str, overrides: Sequence[str], *, preset: str, file: str, on: str = "") -> None:
    """Print a setting: its meaning, its range, and its value in this pipeline with its origin."""
    console = Console(soft_wrap=True)
    resolved = resolve(pipeline_file(file), preset, overrides, machine=machine_of(on) if on else None)
    details = setting(resolved, name)
    console.print(f"{details.name}, preset {resolved.pipeline.preset}", style="bold", highlight=False)
    lines = [f"  {details.words}", f"  type      {details.type}"]
    if details.choices:
        lines.append(f"  shipped   {listed(details.choices)}, or a function of your own as package.module:function")
    if details.holds:
        lines.append(f"  holds     {listed(details.holds)}")
    else:
        lines += [f"  default   {details.default}", f"  value     {_plain(details.value)}    # {details.origin}"]
    if note := resolved.origins.get(f"{details.name}!"):
        lines.append(f"            {note}")
    if reason := reason_of(details.origin):
        lines.append(f"  why       {reason}")
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _plain(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_plain(v) for v in value) + "]"
    if isinstance(value, EntryConfig) and not value.options:
        return value.name
    if hasattr(value, "model_dump"):
        fields = value.model_dump(exclude_defaults=True)
        return fields["url"] if list(fields) == ["url"] else str(fields)
    return str(value)


def show_status(name: str = "", *, file: str, all_runs: bool) -> None:
    """The runs of the store, newest last, with every stage's state, key, size and time; of one that is named its scores
    too."""
    console = make_console()
    store, now = served_store(file), code_revision()
    records = store.records_of_runs()
    if name:
        record = find_run(store, name)
        _print_run(console, record, now)
        for stage, entry in record.stages.items():
            for tracker, url in tracker_urls(store, entry).items():
                console.print(f"  {stage} on {tracker}: {url}", style="dim", soft_wrap=True)
        print_summary(console, store, record)
        return
    if not records:
        console.print(f"No runs in {store.url} yet. Start one with: {command('run')}")
        return
    if len(records) > NEWEST and not all_runs:
        console.print(f"{len(records) - NEWEST} older runs are not shown; see them with --all.", style="dim")
    for record in list(records.values())[0 if all_runs else -NEWEST :]:
        _print_run(console, record, now)
    # From the records, not from the manifests: a store may hold thousands. `nanodag verify` reads all of them.
    used = {
        entry.artifact: entry.made.num_bytes
        for record in records.values()
        for entry in record.stages.values()
        if entry.made is not None
    }
    of_runs = f"{counted(len(used), 'artifact')}, {size(sum(used.values()))}"
    totals = f"{counted(len(store.keys()), 'key')} in {store.url}; the runs use {of_runs}"
    console.print(totals, style="dim")


def print_status(name: str = "", *, file: str, all_runs: bool) -> None:
    """The same runs as a JSON list, each with its stages: states, how far they are, and their trackers' URLs."""
    store = served_store(file)
    records = list(store.records_of_runs().values())
    chosen = [find_run(store, name)] if name else records if all_runs else records[-NEWEST:]
    values = []
    for record in chosen:
        about = {field: getattr(record, field) for field in ("run", "preset", "machine", "created", "ended", "reason")}
        stages = [
            asdict(stage) | {"trackers": tracker_urls(store, record.stages[stage.name])}
            for stage in progress_of(store, record)
        ]
        values.append({**about, "state": state_of(record), "stages": stages})
    print(json.dumps(values, indent=2))


def _print_run(console: Console, record: RunRecord, now: str) -> None:
    """A run and its stages. now: the revision of the code."""
    state = state_of(record)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created))
    about = f"  {when}  preset {record.preset}  "
    title = Text.assemble((record.run, "bold"), about, (state, STYLES.get(state, "")))
    if record.revision != now:
        title.append(f"  made by code {record.revision}, now {now}", style="yellow")
    console.print(title)
    stale = stale_stages(record)
    rows = [_stage_cells(name, entry, name in stale) for name, entry in record.stages.items()]
    narrow = (["attempt"], ["worker", "CPU"], ["kind"], ["key"], ["size"])
    console.print(fitting(console, rows, numbers=("size", "took", "worker", "CPU"), narrow=narrow))
    print_stale(console, record)


def print_summary(console: Console, store: Store, record: RunRecord) -> None:
    """The scores of a run, what got better and worse by more than noise, and what to beware of; nothing where there is
    nothing of it."""
    from nanodag.report.summary import summary_of  # it compares; no other table needs what that takes

    try:
        summary = summary_of(store, record)
    except NanodagError as error:
        console.print(f"No scores: {error}", style="red", markup=False)
        return
    if summary.scores is not None:
        console.print()
        lead, *models = summary.scores.headers
        rows: list[dict[str, RenderableType]] = []
        for benchmark, *scores in summary.scores.rows:
            rows.append({lead: f"{benchmark.text} {benchmark.detail}".strip()})
            for model, score in zip(models, scores, strict=True):
                rows[-1] |= {model: score.text, f"{model} 95 %": Text(score.detail, "dim")}
        intervals = [f"{model} 95 %" for model in models]
        console.print(fitting(console, rows, numbers=[*models, *intervals], narrow=[intervals]))
    for lines, word, style in ((summary.better, "better", "green"), (summary.worse, "worse", "red")):
        for line in lines:
            console.print(Text.assemble((f"{word:<7}", style), line), soft_wrap=True)
    if summary.num_compared and not (summary.better or summary.worse):
        console.print(f"No difference beyond noise, in {counted(summary.num_compared, 'comparison')}.", style="dim")
    for line in summary.warnings:
        console.print(line, style="yellow", markup=False, soft_wrap=True)


def how_to_build_stale(run: str) -> str:
    """The command that builds what is stale, for the same store and pipeline file."""
    return command(advice(run).removeprefix("nanodag "))


def print_stale(console: Console, record: RunRecord, stage: str = "") -> None:
    """Say which stages of a run are stale, why, and how they are built; of one stage alone where it is named."""
    stale = stale_stages(record)
    if not stale or (stage and stage not in stale):
        return
    reasons = ", ".join(f"{name} ({why})" for name, why in stale.items() if stage in ("", name))
    line = f"stale: {reasons}. Build again what is stale with: {how_to_build_stale(record.run)}"
    console.print(f"  {line}" if not stage else line, style=STYLES["stale"], markup=False, soft_wrap=True)


def _stage_cells(name: str, entry: StageRecord, is_stale: bool) -> dict[str, RenderableType]:
    made, state = entry.made, "stale" if is_stale else shown_state(entry)
    return {
        "stage": name,
        "kind": recorded_kind(entry.kind).name,
        "state": Text(state, STYLES.get(state, "dim")),
        "key": entry.key[:12],
        "attempt": made.attempt if made is not None else "",
        "size": size(made.num_bytes) if made is not None else "",
        "took": _took(entry),
        "worker": duration(made.cost_of("seconds")) if made is not None else "",
        "CPU": duration(made.cost_of("cpu_seconds")) if made is not None else "",
    }


def _took(entry: StageRecord) -> str:
    """Time that a stage took over all its tries; beside it the last one, where there were several."""
    if entry.made is None:
        return ""
    last = entry.made.took_s
    if not entry.earlier_s:  # the store had it, or the first try was enough
        return duration(last)
    several = tries(int(entry.made.cost_of("num_attempts")), duration(last))
    return duration(entry.earlier_s + last) + (f" ({several})" if several else "")


def find_run(store: Store, name: str) -> RunRecord:
    """The record of the run whose name is, or begins with, `name`; when that is empty, of the newest one that is no
    night and no sweep.

    Raises ArtifactNotFound when none does, or several do, StoreError when the record of that name cannot be read.
    """
    records = store.records_of_runs()
    names = list(records)
    plain = [n for n in names if not records[n].composed]
    matching = plain[-1:] if not name else [n for n in names if n == name] or [n for n in names if n.startswith(name)]
    if not matching and (unreadable := store.unreadable_runs().get(name)):
        raise unreadable
    if not records:
        raise ArtifactNotFound(f"There are no runs in {store.url} yet. Start one with: {command('run')}")
    if len(matching) != 1:
        shown = listed((matching or names)[-5:])
        if matching:
            raise ArtifactNotFound(f"{counted(len(matching), 'run')} in {store.url} begin with {name!r}: {shown}.")
        what = f"no run {name!r}" if name else "no run but nights and sweeps"
        near = nearest(name, names) or f" Newest: {shown}."
        raise ArtifactNotFound(f"There is {what} in {store.url}.{near}")
    return records[matching[0]]


def finished_stages(record: RunRecord, makes: str) -> list[str]:
    """Stages of a run that are finished and make that, in the DAG's order. makes: as in nanodag.config.kind."""
    finished = [(stage, entry) for stage, entry in record.stages.items() if entry.has_ended_well]
    return [stage for stage, entry in finished if recorded_kind(entry.kind).makes == makes]


def show_stages(name: str, *, file: str) -> None:
    """Every stage of a run with its inputs, data, metrics and cost, from the manifests."""
    console = make_console()
    store = served_store(file)
    record = find_run(store, name)
    console.print(Text.assemble((record.run, "bold"), f"  preset {record.preset}  {state_of(record)}"))
    if record.reason:
        console.print(record.reason.partition("\n")[0], style="red", markup=False, highlight=False)
    stale = stale_stages(record)
    for stage, entry in record.stages.items():
        state = (f"stale: {stale[stage]}", STYLES["stale"]) if stage in stale else (entry.state, "dim")
        console.print(Text.assemble((f"\n{stage}", "bold"), f" ({recorded_kind(entry.kind).name}) ", state))
        if entry.artifact is not None:
            _print_artifact(console, store, *entry.artifact)
        elif entry.reason:
            console.print(f"  {entry.reason}", style="red", markup=False, highlight=False)
    if stale:
        console.print(f"\nBuild again what is stale with: {how_to_build_stale(record.run)}", style=STYLES["stale"])


def show_report(name: str, *, file: str) -> None:
    """Print what a report says above all, then the paths of its files; into a pipe or a file its Markdown."""
    console = make_console()
    store = served_store(file)
    record = find_run(store, name)
    if not (reports := finished_stages(record, PAGE)):
        raise ArtifactNotFound(
            f"Run {record.run} has no report yet; see how far it is with: {command(f'stages {record.run}')}"
        )
    folder = store.materialize(store.get(f"{record.run}:{reports[-1]}"))
    if not console.is_terminal:
        print((folder / "report.md").read_text(encoding="utf-8"))
    else:
        print_summary(console, store, record)
    print_stale(console, record, reports[-1])
    for path in sorted(folder.glob("report.*")):
        console.print(str(path), soft_wrap=True, highlight=False)


def serve_report(names: Sequence[str], *, port: int, file: str) -> None:
    """Serve the report of runs, finished or under way, until Ctrl-C."""
    from nanodag.viewer.app import serve
    from nanodag.viewer.live_page import make_app

    store = served_store(file)
    runs = list(dict.fromkeys(find_run(store, name).run for name in names))
    serve(make_app(store, runs), port=port, query={})


def _print_artifact(console: Console, store: Store, key: str, attempt: str) -> None:
    try:
        artifact = store.attempt(key, attempt)
    except (ArtifactNotFound, CorruptArtifact, NewerFormat) as error:  # the other stages are shown all the same
        console.print(f"  {error}", style="red", markup=False, soft_wrap=True)
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(artifact.created))
    lines = [
        f"key      {artifact.key}  attempt {artifact.attempt}",
        f"content  {artifact.digest}",
        f"files    {store.local / artifact.folder / 'files' if not store.is_remote else artifact.folder}"
        f"  ({counted(len(artifact.files), 'file')}, {size(artifact.num_bytes)})",
    ]
    lines += [f"from     {label}: {up['stage']}  {up['key'][:12]}" for label, up in artifact.lineage.items()]
    lines += [f"data     {url}" for url in artifact.sources]
    lines += [f"metric   {name} = {_number(value)}" for name, value in artifact.metrics.items() if _is_plain(value)]
    cost = [f"{name} {_number(value)}" for name, value in artifact.cost.items() if _is_plain(value)]
    lines += [f"cost     {', '.join(cost)}", f"made     {when} by code {artifact.environment.get('revision', '?')}"]
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str) and len(str(value)) < 80


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
