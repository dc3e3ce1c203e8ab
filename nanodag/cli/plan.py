"""`nanodag plan`: what a run would take, as a table or as JSON."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from nanodag.cli.live_table import make_console
from nanodag.cli.show import print_warnings
from nanodag.config import Resolved, resolve
from nanodag.errors import NanodagError
from nanodag.errors.words import counted, duration, size
from nanodag.host.machine import GIB, detect, machine_of
from nanodag.plan.case import device_room, host_room
from nanodag.plan.make import Plan, plan_of, with_lost_files
from nanodag.report.words import count
from nanodag.run.record import pipeline_file, store_of
from nanodag.run.stale_stages import made_stages

MIN_WIDTH = 118
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
    machine = machine_of(on) if on else detect()
    resolved = resolve(pipeline_file(file), preset, overrides, machine=machine)
    plan = replace(plan_of(resolved.pipeline, machine, price_per_hour=price_per_hour), warnings=resolved.warnings)
    if not on:  # another machine has files of its own
        plan = with_lost_files(plan, resolved.pipeline)
    if not on and Path(resolved.pipeline.store.url).is_dir():  # a far one is not asked, and who looks makes none
        plan = replace(plan, made=made_stages(resolved.pipeline, store_of(resolved.pipeline)))
    return plan


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
    console.width = max(console.width, MIN_WIDTH)
    machine, gpu = plan.machine, plan.machine.gpu
    rooms = [f"{size(host_room(machine))} of memory"]
    rooms += [f"{size(device_room(machine))} a GPU"] if gpu is not None else []
    console.print(f"Preset [bold]{plan.preset}[/] on {machine}; room: {', '.join(rooms)}", highlight=False)
    console.print(_table(plan))
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


def _table(plan: Plan) -> Table:
    has_gpu, has_price = plan.machine.gpu is not None, plan.price_per_hour > 0
    table = Table(box=None, pad_edge=False, show_footer=True)
    exact, price = "{:,}".format, "{:,.2f}".format
    footers = {"stage": "total", "disk": size(plan.disk_bytes), "price": _cell(plan.price_of(plan.seconds), price)}
    footers["time"] = _cell(plan.seconds, duration)
    names = ["stage", "model", "tokens", "steps", "FLOPs", *["a GPU"] * has_gpu, "memory", "at once", "prompt", "read"]
    for name in [*names, "disk", "time", *["price"] * has_price]:
        justify: Literal["left", "right"] = "left" if name == "stage" else "right"
        table.add_column(name, footer=footers.get(name, ""), justify=justify, no_wrap=True)
    for stage in plan.stages:
        cells = [stage.name, _cell(stage.parameters, count), _cell(stage.tokens, count)]
        cells += [_cell(stage.steps, exact), _cell(stage.flops, count)]
        cells += [_cell(num or None, size) for num in (*[stage.device_bytes] * has_gpu, stage.host_bytes)]
        cells += [_cell(stage.at_once, exact), _cell(stage.longest_prompt, exact)]
        cells += [_cell(num or None, size) for num in (stage.read_bytes, stage.disk_bytes)]
        time = "made" if stage.name in plan.made else _cell(stage.seconds, duration)
        cells += [time, *[_cell(plan.price_of(stage.seconds), price)] * has_price]
        table.add_row(*cells, style="red" if stage.faults else "")
    return table


def _shares(plan: Plan) -> str:
    """Share of the peak that each stage is taken to reach, in words."""
    reached: dict[float, list[str]] = {}
    for stage in plan.stages:
        if stage.share is not None:
            reached.setdefault(stage.share, []).append(stage.name)
    shares = "; ".join(f"{share:.0%} in {', '.join(names)}" for share, names in sorted(reached.items(), reverse=True))
    return f"  Of the matmul peak, these reach: {shares or 'none is known'}."


def _cell(value: Any, form: Callable[[Any], str]) -> str:
    """The text of a value; empty where it is not known."""
    return "" if value is None else form(value)
