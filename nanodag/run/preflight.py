"""Checks of a pipeline before anything starts: functions, files, models, benchmarks and the first rows.

A short process looks (nanodag.run.preflight_checks), with a worker's environment: what it imports, the user's own
modules too, never gets into the command's process. Only the user's kinds of stages do: their configs are read there.
What passed is not looked at again while nothing of it has changed. The plan is made each time: what does not fit this
machine, or would be void, is refused too (nanodag.plan).
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from nanodag.config import AnyStage, Pipeline
from nanodag.errors import ConfigError, StageKilled
from nanodag.errors.words import size
from nanodag.host.cuda import gpu_faults, torch_build, version_fault
from nanodag.host.machine import detect, usable_gpus, usable_memory
from nanodag.inference.engine_install import TITLES, find_python
from nanodag.plan.make import check_plan
from nanodag.store import Store, write_json
from nanodag.store.atomic import writing
from nanodag.store.provenance import code_digest

TIMEOUT_S = 300.0  # a hub may be slow, a user's module may load torch


def check_before_start(
    pipeline: Pipeline,
    store: Store,
    *,
    file: Path,
    stages: Collection[str] = (),
    to_build: Collection[str] | None = None,
) -> None:
    """Raise ConfigError with a line for each thing that a stage would fail for, or that does not fit this machine;
    StageKilled when the process that looks was ended from outside.

    store: it remembers what has passed. stages: those that are to be run; all unless given. to_build: those of
    them that are not finished: only these must fit.
    """
    if to_build is None or to_build:
        built = stages if to_build is None else to_build
        check_plan(pipeline, detect(store.local / "checked"), stages=built)
        check_cuda({name: stage for name, stage in pipeline.stages.items() if not built or name in built})
    check_names(pipeline, file=file, local=store.local, stages=stages)


def check_cuda(stages: Mapping[str, AnyStage]) -> None:
    """Raise ConfigError where this machine's driver, GPUs, torch and SGLang do not go together for a stage. It is asked
    each time: a driver is no file that what passed could depend on."""
    here = {name: stage for name, stage in stages.items() if stage.is_on_gpus_here}
    gpus = usable_gpus() if here else ()
    ours = torch_build(sys.executable) if gpus else None
    if ours is None:
        return
    faults = [f"{next(iter(here))}.resources.device=cuda: {text}" for text in gpu_faults(gpus, ours, sys.executable)]
    for name, stage in here.items():
        if stage.guest is not None and (engine := stage.guest.engine) in TITLES and stage.shares_torch:
            theirs = torch_build(str(find_python(stage.guest.python, "cuda", engine)))
            text = "" if theirs is None else version_fault(ours, theirs, stage.shares_torch, TITLES[engine])
            faults += [f"{name}.{text}"] if text else []
    if faults:
        raise ConfigError("\n  ".join(["GPUs of this machine:", *faults]))


def check_names(pipeline: Pipeline, *, file: Path, **how: Any) -> None:
    """Raise ConfigError with the lines of `faults_of_names`, whose arguments these are."""
    if faults := faults_of_names(pipeline, file=file, **how):
        head = f"{file}, preset {pipeline.preset!r}"
        text = f"{head}: {faults[0]}" if len(faults) == 1 else "\n  ".join([f"{head}, cannot be run:", *faults])
        raise ConfigError(text)


def faults_of_names(
    pipeline: Pipeline, *, file: Path, local: Path | None = None, stages: Collection[str] = (), only_names: bool = False
) -> list[str]:
    """A line for each thing that a stage would fail for, whether it fits this machine or not. local: the store's folder
    here, which remembers what has passed; None to look in any case. only_names: neither the hub is asked nor which
    tools this machine has, and nothing is written."""
    request = {
        "pipeline": pipeline.model_dump(mode="json"),
        "stages": [name for name in pipeline.stages if not stages or name in stages],
        "file": str(file),
    }
    identity = [request, code_digest(), os.environ.get("PYTHONPATH", ""), sys.executable]
    name = f"{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]}.json"
    remembered = None if local is None else local / "checked" / name
    with suppress(OSError, ValueError):
        if remembered is not None and all(state_of(p) == s for p, s in json.loads(remembered.read_text()).items()):
            return []
    # Beside what a command prints: it may be JSON.
    print("Looking at packages and first rows: a few seconds on an idle machine ...", file=sys.stderr, flush=True)
    report = _look({**request, "only_names": only_names})
    faults: list[str] = report["faults"]
    if not faults and remembered is not None and not only_names:
        with writing(f"Writing {remembered}"):
            remembered.parent.mkdir(parents=True, exist_ok=True)
            write_json(remembered, report["relied_on"])
    return faults


def state_of(path: str) -> list[int]:
    """State of a file that changes with it: its size and the time of its last change; empty where there is none."""
    try:
        facts = os.stat(path)
    except OSError:
        return []
    return [facts.st_size, facts.st_mtime_ns]


def _look(asked: dict[str, Any]) -> dict[str, Any]:
    """Findings of the process. What a user's module prints goes nowhere; one that ends the process is a fault."""
    memory, total = min(psutil.virtual_memory().available, usable_memory()), usable_memory()
    environment = os.environ | {"PYTHONSAFEPATH": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
    with tempfile.TemporaryDirectory(prefix="nanodag-") as folder:
        answer, doing = Path(folder) / "answer.json", Path(folder) / "doing"
        command = [sys.executable, "-m", "nanodag.run.preflight_checks", str(answer), str(doing)]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(asked),
                text=True,
                env=environment,
                cwd=folder,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            code, stderr = done.returncode, done.stderr
            how = f"ended the process that looks at it, with code {code}"
        except subprocess.TimeoutExpired:
            code, stderr, how = 0, "", f"takes longer than {TIMEOUT_S:.0f} s"
        if answer.exists():
            return json.loads(answer.read_text())
        what = doing.read_text() if doing.exists() else ""
        if -code in (signal.SIGKILL, signal.SIGTERM):
            during = f", while it looked at {what}" if what else ""
            raise StageKilled(
                f"The check before the start was ended by {signal.Signals(-code).name}{during} (often: out of memory; "
                f"{size(memory)} of {size(total)} were free when it began): make room and run it again."
            )
        if not what:  # a fault of ours: its traceback
            raise RuntimeError(f"nanodag.run.preflight_checks {how}:\n{stderr[-4000:]}")
        return {"faults": [f"{what} {how}"], "relied_on": {}}
