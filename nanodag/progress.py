"""How far each stage of a run is, read from its record and from metrics.jsonl in the workspaces."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanodag.stale import stale_stages
from nanodag.store import Store

TAIL_BYTES = 65536
SPEED_WINDOW_S = 30.0


@dataclass(frozen=True, kw_only=True)
class StageProgress:
    """One stage. state: as in the run's record, or `stale`. done: share of its steps, 0 to 1. speed: in words. left_s,
    elapsed_s: seconds, -1 where nothing is known; elapsed_s: over all tries."""

    name: str
    kind: str
    state: str
    key: str
    done: float
    step: int
    total: int
    speed: str
    left_s: float
    elapsed_s: float
    reason: str


def progress_of(store: Store, record: Mapping[str, Any]) -> list[StageProgress]:
    """Every stage of a run, in the order of its DAG."""
    stale = stale_stages(record)
    found = [_stage(store, name, record["stages"][name]) for name in record["order"]]
    return [replace(stage, state="stale") if stage.name in stale else stage for stage in found]


def _stage(store: Store, name: str, entry: Mapping[str, Any]) -> StageProgress:
    state, started, ended = entry["state"], entry.get("started", 0.0), entry.get("ended", 0.0)
    lines = _last_lines(store, entry) if state in ("running", "stopped", "failed") else []
    step, total = (int(lines[-1]["step"]), int(lines[-1].get("total") or 0)) if lines else (0, 0)
    rate = _steps_per_s(lines)
    is_running = state == "running"
    return StageProgress(
        name=name,
        kind=entry["kind"],
        state=state,
        key=entry.get("key", ""),
        done=1.0 if state in ("built", "found") else min(1.0, step / total) if total else 0.0,
        step=step,
        total=total,
        speed=_speed(lines, rate) if is_running else "",
        left_s=(total - step) / rate if is_running and rate and total else -1.0,
        elapsed_s=(ended or time.time()) - started + entry.get("earlier_s", 0.0) if started else -1.0,
        reason=entry.get("reason", ""),
    )


def _last_lines(store: Store, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The newest metrics records that this attempt wrote, steps only."""
    path = store.local / "work" / entry.get("key", "none") / "metrics.jsonl"
    if not path.exists():
        return []
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - TAIL_BYTES))
        block = stream.read().decode(errors="replace")
    lines = []
    for text in block.splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # cut by the seek, or being written now
            continue
        if isinstance(line, dict) and line.get("event") in ("step", "phase") and line.get("total"):
            lines.append(line)
    return [line for line in lines if line["time"] >= entry.get("started", 0.0)]


def _steps_per_s(lines: list[dict[str, Any]]) -> float:
    """Steps a second over the last SPEED_WINDOW_S, 0 where nothing is known. Phases count each their own steps."""
    recent = [
        line
        for line in lines
        if (line["total"], line.get("phase")) == (lines[-1]["total"], lines[-1].get("phase"))
        and line["time"] >= lines[-1]["time"] - SPEED_WINDOW_S
    ]
    if len(recent) < 2 or recent[-1]["time"] <= recent[0]["time"]:
        return 0.0
    spanned = recent[-1]["time"] - recent[0]["time"]
    silent = time.time() - recent[-1]["time"]
    if silent > 3 * spanned / (len(recent) - 1):  # a stage that has come to a halt is not as fast as it was
        spanned += silent
    return max(0.0, (recent[-1]["step"] - recent[0]["step"]) / spanned)


def _speed(lines: list[dict[str, Any]], rate: float) -> str:
    if lines and isinstance(tokens := lines[-1].get("tokens_per_second"), int | float):
        return f"{tokens:,.0f} tok/s"
    if not rate:
        return ""
    return f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step"


def duration(seconds: float) -> str:
    """`4.2s`, `3m07s`, `2h05m`; empty for what is not known."""
    if seconds < 0:
        return ""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes = int(seconds) // 60
    return f"{minutes}m{int(seconds) % 60:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def size(num_bytes: float) -> str:
    """`1.2 MB` and the like."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError
