"""`nanodag plan`: what a run would take, as a table or as JSON."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from nanodag.cli.live_table import fitting, make_console
from nanodag.cli.show import print_warnings
from nanodag.config import Resolved, resolve
from nanodag.errors import NanodagError
from nanodag.errors.words import counted, duration, listed, size
from nanodag.host.machine import GIB, Machine, detect, machine_of
from nanodag.plan.case import device_room, host_room
from nanodag.plan.make import Plan, plan_of
from nanodag.report.words import count
from nanodag.run.preflight import faults_of_names
from nanodag.run.record import pipeline_file, store_of
from nanodag.run.stale_stages import made_stages
from nanodag.store import Store
from nanodag.worker.devices import devices_folder, holders

NARROW = ("read", "prompt", "at once", "FLOPs", "steps", "model", "tokens", "disk")  # first where it is narrow
LAYOUTS = ("placement=shared", "placement=beside", "placement=separate max_staleness=1 sync_mode=in_place")


def show_plan(
    overrides: Sequence[str], *, preset: str, file: str, on: str, price_per_hour: float, as_json: bool
) -> int:
    """Print what `planned` makes; returns the command's exit code, 2 where it has faults. Parameters as there."""
    plan = planned(preset, *overrides, file=file, on=on, price_per_hour=price_per_hour)
    layouts = _layouts(plan, lambda new: resolve(pipeline_file(file), preset, [*overrides, *new], machine=plan.machine))
    if as_json:
        sys.stdout.write(json.dumps({**plan.as_json(), "layouts": layouts, "warnings": plan.warnings}, indent=1) + "\n")
    else:
        _print(plan, layouts)
    return 2 if plan.faults else 0


def planned(preset: str = "auto", *overrides: str, file: str = "", on: str = "", price_per_hour: float = 0.0) -> Plan:
    """The plan of a pipeline. on: a machine's text, empty for this one. price_per_hour: of the whole machine."""
    path, machine = pipeline_file(file), machine_of(on) if on else detect()
    resolved = resolve(path, preset, overrides, machine=machine)
    pipeline, warnings = resolved.pipeline, resolved.warnings
    local, plan = Path(pipeline.store.url), plan_of(pipeline, machine, price_per_hour=price_per_hour)
    # Another machine has files and packages of its own.
    lacking = [] if on else faults_of_names(pipeline, file=path, local=local, only_names=True)
    plan = replace(plan, warnings=warnings, lacking=lacking)
    if on or not local.is_dir():  # a far one is not asked, and who looks makes none
        return plan
    store = store_of(pipeline)
    return replace(plan, made=made_stages(pipeline, store), warnings=[*warnings, *_taken(store, machine)])


def _taken(store: Store, machine: Machine) -> list[str]:
    """A line where stages of the store's runs hold devices of this machine now."""
    name, what, there = ("cpu", "core", machine.cores) if machine.gpu is None else ("gpu", "GPU", machine.num_gpus)
    held = holders(devices_folder(store), name)
    who, many = listed(dict.fromkeys(held.values())), counted(min(len(held), there), what)
    return [f"{many} of {there} held now by {who}: a run waits for them, which no time here has"] if held else []


def _layouts(plan: Plan, resolved_with: Callable[[list[str]], Resolved]) -> dict[str, dict[str, float]]:
    """Seconds of each RL stage on several GPUs, by the settings of each layout that fits."""
    found: dict[str, dict[str, float]] = {}
    for name in (stage.name for stage in plan.stages if stage.kind == "rl" and stage.num_gpus > 1):
        for layout in LAYOUTS:
            with suppress(NanodagError):
                pipeline = resolved_with([f"{name}.{setting}" for setting in layout.split()]).pipeline
                (stage,) = plan_of(pipeline, plan.machine, stages=[name]).stages
                if stage.seconds is not None and not stage.faults:
                    found.setdefault(name, {})[layout] = stage.seconds
    return found


def _print(plan: Plan, layouts: Mapping[str, Mapping[str, float]]) -> None:
    console = make_console()
    machine, gpu = plan.machine, plan.machine.gpu
    rooms = [f"{size(host_room(machine))} of memory"]
    rooms += [f"{size(device_room(machine))} a GPU"] if gpu is not None else []
    console.print(f"Preset [bold]{plan.preset}[/] on {machine}; room: {', '.join(rooms)}", highlight=False)
    rows = _rows(plan)
    table = fitting(console, rows, numbers=[*rows[0]][1:], narrow=[[name] for name in NARROW])
    console.print(table)
    if narrow := [name for name in NARROW if name not in [column.header for column in table.columns]]:
        console.print(f"  The terminal is too narrow for {listed(narrow)}: --json has them.", style="dim")
    for stage in plan.stages:
        for note in stage.notes:
            console.print(f"  {stage.name}: {note}", style="dim", markup=False, highlight=False)
    for name, times in layouts.items():
        each = sorted((seconds, layout) for layout, seconds in times.items())
        words = "; ".join(f"{duration(seconds)} with {layout}" for seconds, layout in each)
        console.print(f"  {name}: {words}", style="dim", highlight=False)
    for name, run in plan.made.items():
        said = f"  {name}: in the store, of run {run}, unless its data or the code have changed"
        console.print(said, style="dim", markup=False, highlight=False)
    if gpu is not None and not gpu.peak:
        hint = f"--on {machine.num_gpus}x{round(gpu.memory / GIB)}GB:TFLOPS"
        console.print(f"  The speed of {gpu.name} is not known, so no time is said; {hint} says it.", highlight=False)
    print_warnings(console, plan.warnings)
    console.print(_shares(plan), style="dim", markup=False, highlight=False)
    for fault in plan.faults:
        console.print(f"  {fault}", style="red", markup=False, highlight=False, soft_wrap=True)
    if plan.faults:
        console.print(f"{counted(len(plan.faults), 'fault')}: nanodag run would refuse it.", style="red")


def _rows(plan: Plan) -> list[dict[str, Text]]:
    """A row for each stage and one for all of them: its cells by their columns' titles."""
    has_gpu, has_price = plan.machine.gpu is not None, plan.price_per_hour > 0
    exact, price = "{:,}".format, "{:,.2f}".format
    rows = []
    for stage in plan.stages:
        cells = {
            **{"stage": stage.name, "model": _cell(stage.parameters, count), "tokens": _cell(stage.tokens, count)},
            **{"steps": _cell(stage.steps, exact), "FLOPs": _cell(stage.flops, count)},
            **({"a GPU": _cell(stage.device_bytes or None, size)} if has_gpu else {}),
            **{"memory": _cell(stage.host_bytes or None, size), "at once": _cell(stage.at_once, exact)},
            **{"prompt": _cell(stage.longest_prompt, exact), "read": _cell(stage.read_bytes or None, size)},
            "disk": _cell(stage.disk_bytes or None, size),
            "time": "made" if stage.name in plan.made else _cell(stage.seconds, duration),
            **({"price": _cell(plan.price_of(stage.seconds), price)} if has_price else {}),
        }
        rows.append({title: Text(cell, style="red" if stage.faults else "") for title, cell in cells.items()})
    total = {"stage": "total", "disk": size(plan.disk_bytes), "time": _cell(plan.seconds, duration)}
    total["price"] = _cell(plan.price_of(plan.seconds), price)
    return [*rows, {title: Text(total.get(title, ""), style="bold") for title in rows[0]}]


def _shares(plan: Plan) -> str:
    """Share of the peak that each stage is taken to reach, in words."""
    reached: dict[float, list[str]] = {}
    for stage in plan.stages:
        if stage.share is not None:
            reached.setdefault(stage.share, []).append(stage.name)
    shares = "; ".join(f"{share:.0%} in {', '.join(names)}" for share, names in sorted(reached.items(), reverse=True))
    return f"  Times are of an idle machine. Of its matmul peak, these reach: {shares or 'none is known'}."


def _cell(value: Any, form: Callable[[Any], str]) -> str:
    """The text of a value; empty where it is not known."""
    return "" if value is None else form(value)
