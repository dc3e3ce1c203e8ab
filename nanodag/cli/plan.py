"""`nanodag plan`: what a run would take, as a table or as JSON."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from rich.table import Table

from nanodag.cli.live_table import make_console
from nanodag.cli.show import print_warnings
from nanodag.config import Resolved, resolve
from nanodag.errors.words import counted, duration, size
from nanodag.host.machine import detect, machine_of
from nanodag.plan.case import device_room, host_room
from nanodag.plan.make import Plan, plan_of
from nanodag.report.words import count
from nanodag.run.record import pipeline_file

MIN_WIDTH = 118


def show_plan(
    overrides: Sequence[str], *, preset: str, file: str, on: str, price_per_hour: float, as_json: bool
) -> int:
    """Print the plan of a pipeline; returns the command's exit code, 2 where it has faults. on: a machine's text, empty
    for this one. price_per_hour: of the whole machine."""
    machine = machine_of(on) if on else detect()
    resolved = resolve(pipeline_file(file), preset, overrides, machine=machine)
    plan = plan_of(resolved.pipeline, machine, price_per_hour=price_per_hour)
    if as_json:
        sys.stdout.write(json.dumps({**plan.as_json(), "warnings": resolved.warnings}, indent=1) + "\n")
    else:
        _print(plan, resolved)
    return 2 if plan.faults else 0


def _print(plan: Plan, resolved: Resolved) -> None:
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
    print_warnings(console, resolved)
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
        cells += [_cell(stage.seconds, duration), *[_cell(plan.price_of(stage.seconds), price)] * has_price]
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
