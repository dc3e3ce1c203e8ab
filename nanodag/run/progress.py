"""Progress of each stage of a run, read from its record, from metrics.jsonl in the workspaces, and from manifests."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanodag.config.kind import SCORES
from nanodag.config.kinds import recorded_kind
from nanodag.config.kinds.evaluation import EvalStage
from nanodag.errors import StoreError
from nanodag.errors.words import size
from nanodag.run.stale_stages import stale_stages
from nanodag.store import Store
from nanodag.store.run_record import RunRecord, StageRecord
from nanodag.worker.tracker import urls_in

TAIL_BYTES = 65536
SPEED_WINDOW_S = 30.0
UNDER_WAY = ("starting", "running")
# Of a stage's metrics, what stands in the table: the first that is there, and in which words. Under way it is the curve
# that is trained on: evaluations are rare, and the two would take turns.
TRAINED_ON = {"reward": "reward", "loss": "loss"}
AT_THE_END = {
    **{"eval_reward": "eval reward", "reward": "reward", "validation_loss": "val. loss", "loss": "loss"},
    **{"bytes_per_token": "bytes/token"},
}


@dataclass(frozen=True, kw_only=True)
class StageProgress:
    """One stage. state: as in the run's record, `stale`, `starting` until a stage under way has said something, or
    `queued` where it waits for what the reason says.
    done: share of its work, 0 to 1. amount: that in words, as in `12/40 steps`. reached: its loss, reward or score, in
    words. speed: in words. left_s, elapsed_s: seconds, -1 where nothing is known; elapsed_s: over all tries."""

    name: str
    kind: str
    state: str
    key: str
    done: float
    amount: str
    reached: str
    speed: str
    left_s: float
    elapsed_s: float
    reason: str


def progress_of(store: Store, record: RunRecord) -> list[StageProgress]:
    """Every stage of a run, in the order of its DAG."""
    stale = stale_stages(record)
    stages = [_stage(store, name, entry) for name, entry in record.stages.items()]
    return [replace(stage, state="stale") if stage.name in stale else stage for stage in stages]


def tracker_urls(store: Store, entry: StageRecord) -> dict[str, str]:
    """Name of each tracker -> where this stage's run can be seen, as far as files here say so."""
    if entry.workspace and Path(entry.workspace).is_dir():
        return urls_in(Path(entry.workspace))
    if entry.artifact is None or store.is_remote:
        return {}
    return urls_in(store.local / "artifacts" / "/".join(entry.artifact) / "records")


def shown_state(entry: StageRecord) -> str:
    """State of a stage in words: its own, or `queued`."""
    return "queued" if entry.state == "waiting" and entry.reason else entry.state


def _stage(store: Store, name: str, entry: StageRecord) -> StageProgress:
    state, started = shown_state(entry), entry.started
    lines = _last_lines(store, entry) if state in ("running", "stopped", "failed") else []
    works = [line for line in lines if line["event"] in ("step", "phase") and line.get("total")]
    rate = _rate([(line["time"], line["step"], (line["total"], line.get("phase"))) for line in works])
    is_running, is_made = state == "running", entry.has_ended_well
    last = works[-1] if works else {"step": 0, "total": 0}
    # What it worked in is gone when it has published, a moment before its record says that it is built.
    is_starting = is_running and not works and (store.local / "work" / (entry.key or "none")).exists()
    return StageProgress(
        name=name,
        kind=recorded_kind(entry.kind).name,
        state="starting" if is_starting else state,
        key=entry.key,
        done=1.0 if is_made else min(1.0, last["step"] / last["total"]) if works else 0.0,
        amount=_amount(last) if works else "loads its packages and data" if is_starting else "",
        reached=_reached_by(store, *entry.artifact) if is_made and entry.artifact is not None else _said(lines),
        speed=_speed(works, rate) if is_running else "",
        left_s=(last["total"] - last["step"]) / rate if is_running and rate else -1.0,
        elapsed_s=(entry.ended or time.time()) - started + entry.earlier_s if started else -1.0,
        reason=entry.reason,
    )


def _last_lines(store: Store, entry: StageRecord) -> list[dict[str, Any]]:
    """The newest metrics records that this attempt wrote."""
    path = store.local / "work" / (entry.key or "none") / "metrics.jsonl"
    if not path.exists():
        return []
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - TAIL_BYTES))
        block = stream.read().decode(errors="replace")
    lines = []
    for text in block.splitlines():
        with suppress(ValueError):  # cut by the seek, or being written now
            lines.append(json.loads(text))
    whole = [line for line in lines if isinstance(line, dict) and "event" in line and "step" in line]
    return [line for line in whole if line["time"] >= entry.started]


def _rate(points: Sequence[tuple[float, float, Any]]) -> float:
    """Amount done a second over the last SPEED_WINDOW_S, 0 where nothing is known. points: time, how much is done,
    and of what: each phase counts for itself."""
    recent = [p for p in points if p[2] == points[-1][2] and p[0] >= points[-1][0] - SPEED_WINDOW_S]
    if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
        return 0.0
    spanned = recent[-1][0] - recent[0][0]
    silent = time.time() - recent[-1][0]
    if silent > 3 * spanned / (len(recent) - 1):  # a stage that has come to a halt is not as fast as it was
        spanned += silent
    return max(0.0, (recent[-1][1] - recent[0][1]) / spanned)


def _amount(line: Mapping[str, Any]) -> str:
    """`12/40 steps`, `1.2/2.0 MB`, `130/400 items`; the name of a phase that counts nothing that people know."""
    unit = line.get("unit", "steps")
    if unit == "bytes":
        return f"{line['step'] / 1e6:,.1f}/{line['total'] / 1e6:,.1f} MB"
    if unit == "phases":
        return str(line.get("phase", ""))
    done, total = line.get("done", line["step"]), line.get("of", line["total"])
    return f"{done:,}/{total:,} {unit}" if total else ""


def _said(lines: Sequence[Mapping[str, Any]]) -> str:
    """Last loss, reward or score that the stage wrote, in words."""
    for line in reversed(lines):
        if line["event"] == "eval" and isinstance(score := line.get(line.get("benchmark", "")), int | float):
            return _score(line["benchmark"], score)
        if line["event"] == "step" and (text := _telling(line, TRAINED_ON)):
            return text
    return ""


@lru_cache(maxsize=1024)
def _reached_by(store: Store, key: str, attempt: str) -> str:
    """Loss, reward or score in an artifact's manifest, in words. An artifact never changes, so it is read once."""
    try:
        artifact = store.attempt(key, attempt)
    except StoreError:  # removed, or damaged; that is said where it is needed
        return ""
    if (kind := recorded_kind(artifact.kind)).makes == SCORES:
        benchmarks = artifact.config.get("benchmarks", ()) if issubclass(kind.config, EvalStage) else ()
        names = [*(benchmark["name"] for benchmark in benchmarks), *artifact.metrics]
        numbers = {name: value for name, value in artifact.metrics.items() if isinstance(value, int | float)}
        return next((_score(name, numbers[name]) for name in names if name in numbers), "")
    return _telling(artifact.metrics, AT_THE_END)


def _telling(metrics: Mapping[str, Any], names: Mapping[str, str]) -> str:
    there = (name for name in names if isinstance(metrics.get(name), int | float))
    return next((f"{names[name]} {metrics[name]:.3f}" for name in there), "")


def _score(benchmark: str, value: float) -> str:
    return f"{benchmark} {value:.3f}" if benchmark == "bits_per_byte" else f"{benchmark} {100 * value:.1f} %"


def _speed(works: Sequence[Mapping[str, Any]], rate: float) -> str:
    last = works[-1] if works else {}
    if isinstance(tokens := last.get("tokens_per_second"), int | float):
        return f"{tokens:,.0f} tok/s"
    unit = last.get("unit", "steps")
    if "done" in last:
        rate = _rate([(line["time"], line["done"], line.get("phase")) for line in works if "done" in line])
    if not rate or unit == "phases":
        return ""
    if unit == "bytes":
        return f"{size(rate)}/s"
    return f"{rate:.3g} {unit}/s" if rate >= 1 else f"{1 / rate:.3g} s/{unit.removesuffix('s')}"
