"""Interface of a worker process: one job in, metrics lines while it works, one result out.

`python -m nanodag.<module> <workspace>/job.json`. The job names the stage's resolved config, the folders of its inputs
and the workspace. A worker leaves its product in `output/`, and `result.json` as its last act: success is a published
result, not an exit code.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from nanodag.config.kinds import vouch_for
from nanodag.config.pipeline import read_stage
from nanodag.data.urls import parse_url
from nanodag.host.images import FOLDER, IMAGES
from nanodag.own_code.find import search_last
from nanodag.registry import FROM_INPUT
from nanodag.store.atomic import write_bytes, write_json
from nanodag.worker import logs
from nanodag.worker.tracker import TrackerProcesses, numbers_in

log = logging.getLogger(__name__)

ROWS = "rows.jsonl"  # in a product of conversations
Line = Mapping[str, Any]
STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: stopped on request, go on by starting it again


@dataclass(frozen=True, kw_only=True)
class Job:
    """One stage to run.

    config: the resolved stage config (a class of nanodag.config.kinds). inputs: input name -> local verified folder.
    workspace: a folder of this stage's own, found again after a restart. context: what the run knows beside that: every
    stage gets `preset`, `mirror`, `store` (its folder on this machine), `code` (a folder of the user's own modules),
    `composed` (`sweep`, `nightly` or empty), `bases` (each input's key and digest) and `tracking` with
    `trackers_folder`, a report what nanodag.report lists, and one that its caller waits for `waited_for`.

    A worker fills `output`, the product, and may fill `records`: what is worth keeping with it but is no part of its
    content (rollouts, samples). metrics.jsonl, worker.log, job.json and what trackers wrote are kept there anyway.
    """

    name: str
    run: str
    config: Any
    inputs: Mapping[str, Path]
    workspace: Path
    context: Mapping[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        return self.workspace / "output"

    @property
    def records(self) -> Path:
        return self.workspace / "records"

    @property
    def mirror(self) -> Path | None:
        """The folder that hub sources are read from; None for the hub itself."""
        folder = self.context.get("mirror", "none")
        return None if folder == "none" else Path(folder)

    @property
    def held_out(self) -> Path:
        """The folder of packed validation rows, which the stages of a store share; without a store, one of its own."""
        return Path(self.context.get("store", self.workspace)) / "held_out"

    @property
    def checkpoints(self) -> Path:
        return self.workspace / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        return self.workspace / "metrics.jsonl"


def write_job(job: Job) -> Path:
    """Write job.json into the workspace; returns its path."""
    path, inputs = job.workspace / "job.json", {name: str(folder) for name, folder in job.inputs.items()}
    plain = {"config": job.config.model_dump(mode="json"), "inputs": inputs, "workspace": str(job.workspace)}
    write_json(path, vars(job) | plain | {"context": dict(job.context)})
    return path


def read_job(path: Path) -> Job:
    raw = json.loads(path.read_text())
    context = raw.get("context", {})
    # The kinds of a job, its own and those that a report is over, are imported as far as the pipeline trusts them: what
    # a report is over was read from manifests, which others may have written.
    named = [raw["config"]["kind"], *(stage["kind"] for stage in context.get("stages", {}).values())]
    if any(":" in name for name in named):
        vouch_for(Path(context.get("code", ".")) / "pipeline.yaml", context.get("trusted_modules", ()))
    return Job(
        name=raw["name"],
        run=raw["run"],
        config=read_stage(_with_inputs(raw["config"], raw["inputs"])),
        inputs={name: Path(folder) for name, folder in raw["inputs"].items()},
        workspace=Path(raw["workspace"]),
        context=context,
    )


def _with_inputs(config: Any, inputs: Mapping[str, str]) -> Any:
    """A stage's config with the file of each source `input:label` in the place of its URL, and the folder of each
    reward `model:input:label` in its name."""
    if isinstance(config, list):
        return [_with_inputs(value, inputs) for value in config]
    if not isinstance(config, dict):
        return config
    section = {name: _with_inputs(value, inputs) for name, value in config.items()}
    if isinstance(url := section.get("url"), str) and url.startswith("input:"):
        parsed = parse_url(url)
        rows = url.removeprefix(f"input:{parsed.path}")
        section["url"] = f"file:{Path(inputs[parsed.path]) / ROWS}{rows}"
    prefix = f"model:{FROM_INPUT}"
    if isinstance(name := section.get("name"), str) and name.startswith(prefix):
        section["name"] = f"model:{inputs[name.removeprefix(prefix)]}"
    return section


def load_job(argv: list[str] | None = None) -> Job:
    """The job named on the command line; sets up logging to stderr and the stop signal.

    Launchers append `--local_rank N`; it is taken from the environment instead and ignored here.
    """
    arguments = [a for a in (sys.argv[1:] if argv is None else argv) if not a.startswith("--local")]
    if not arguments:
        raise SystemExit("usage: python -m nanodag.<module> job.json")
    logs.set_up()
    for signum in (signal.SIGTERM, signal.SIGINT):  # asks for a stop at the next step instead of ending the process
        signal.signal(signum, _ask)
    job = read_job(Path(arguments[0]))
    if store := job.context.get("store"):
        os.environ.setdefault(FOLDER, str(Path(store) / IMAGES))  # child processes read it there, too
    if code := job.context.get("code"):
        search_last(code)  # where a user's own functions lie; last, so that it hides no installed package
    return job


class _Stop:
    requested = False
    tidy: Callable[[], None] | None = None  # where a stop ends the process at once


def _ask(signum: int, frame: object) -> None:
    _Stop.requested = True
    _leave_at_once()


def leave_when_stopped(tidy: Callable[[], None]) -> None:
    """Have a stop signal, also one that came before, end this process at once, until `stop_can_wait`. For the time in
    which nothing is done that a checkpoint would keep, and much is waited for that a stop may never let happen. tidy:
    called in the signal's handler; must not wait for anything."""
    _Stop.tidy = tidy
    if _Stop.requested:
        _leave_at_once()


def stop_can_wait() -> None:
    """From now on `stop_requested` says that a stop signal came."""
    _Stop.tidy = None


def _leave_at_once() -> None:
    if _Stop.tidy is not None:
        _Stop.tidy()
        os.write(2, b"stopped as asked, before the first step\n")  # what is interrupted may be a write to sys.stderr
        os._exit(STOPPED_EXIT_CODE)


def stop_requested() -> bool:
    """True once SIGTERM or SIGINT came: write a checkpoint, then call `leave_stopped`."""
    return _Stop.requested


def leave_stopped() -> NoReturn:
    """End the process with the exit code that says: stopped on request, resumable."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STOPPED_EXIT_CODE)


def step_lines(path: Path, *, resume_step: int, is_kept: Callable[[Line], bool] = lambda line: True) -> TextIO:
    """A file of JSON lines, each of a step, to append to. resume_step: lines of later steps, left by a process that was
    killed, are removed, a last one that is cut off, and those that are not kept."""
    if path.exists():
        lines = [(text, json.loads(text)) for text in path.read_text(encoding="utf-8").split("\n")[:-1]]
        kept = [text + "\n" for text, line in lines if line["step"] <= resume_step and is_kept(line)]
        write_bytes(path, "".join(kept).encode())
    return path.open("a", encoding="utf-8", buffering=1)  # a line written survives this process


class MetricsLog:
    """The metrics of one stage: `metrics.jsonl` always, and the trackers that the pipeline names.

    resume_step, is_kept: of its lines, as of `step_lines`. Only one process of a stage makes one (rank 0).
    """

    def __init__(self, job: Job, *, resume_step: int = 0, is_kept: Callable[[Line], bool] = lambda line: True) -> None:
        self._job = job
        self._stream = step_lines(job.metrics_path, resume_step=resume_step, is_kept=is_kept)
        self._board: Any = None
        names = job.context.get("tracking", {}).get("trackers", ())
        if "tensorboard" in names:
            from tensorboard.summary import Writer  # light: no torch, no TensorFlow

            self._board = Writer(str(job.workspace / "tensorboard"))
        self._trackers = TrackerProcesses(job.workspace, [name for name in names if name != "tensorboard"])

    def write(self, step: int, *, total: int | None = None, event: str = "step", **values: Any) -> None:
        """Append one line. step: what is done; total: what there is to do (for the progress bar); values: numbers,
        strings or small lists. event: `step`, `eval`, `sample`, `phase`."""
        line = {"event": event, "step": step, "total": total, "time": round(time.time(), 3), **values}
        self._stream.write(json.dumps(line, default=float) + "\n")
        if self._board is not None:
            for name, value in numbers_in(values).items():
                self._board.add_scalar(f"{self._job.name}/{name}", value, step)

    def close(self) -> None:
        self._stream.close()
        if self._board is not None:
            self._board.close()
        self._trackers.close()


def finish(job: Job, *, metrics: Mapping[str, Any], cost: Mapping[str, Any]) -> None:
    """Write result.json, the last act of a worker. metrics: what the stage reached; cost: tokens, flops, seconds."""
    write_json(job.workspace / "result.json", {"metrics": dict(metrics), "cost": dict(cost)})
