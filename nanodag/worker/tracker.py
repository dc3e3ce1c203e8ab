"""Trackers, such as Weights & Biases: each has a process of its own, which follows metrics.jsonl.

`python -m nanodag.worker.tracker NAME WORKSPACE` opens the tracker's run of the stage, passes on each line's numbers
and tables with its step, and finishes the run when its stdin says so. A tracker that raises, hangs or ends therefore
costs a stage one warning, and at its end FINISH_TIMEOUT_S at most. What is known of the run lies in trackers/NAME.json:
its id, under which a stage that is started again continues it, its URL, and the last step that was passed on. With
`ADDRESS DIGEST` behind, a process logs where the published stage lies, and that alone.
"""

import importlib
import json
import logging
import os
import re
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanodag.children.child import start_child
from nanodag.config.pipeline import TrackingConfig, filled
from nanodag.store.atomic import locked, write_json
from nanodag.worker import logs
from nanodag.worker.logs import Tail

log = logging.getLogger(__name__)

POLL_S = 1.0
FINISH_TIMEOUT_S = 60.0  # of all trackers of a stage together
FOLDER = "trackers"  # in the workspace, and in the artifact's records
REFERRING = ("wandb", "mlflow")  # trackers that have a place for the artifact's address
_DONE = b"done"
_QUIET = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}


class TrackerProcesses:
    """The trackers of a stage's metrics, running. names: of OPENED_BY. published: address and digest of its artifact,
    which REFERRING log in place of metrics."""

    def __init__(self, workspace: Path, names: Sequence[str], *published: str) -> None:
        self._processes = {
            name: start_child(
                [sys.executable, "-m", __name__, name, str(workspace), *published],
                environment=_QUIET | os.environ,
                given=b"",
                is_all=False,
                in_group=True,
                stdout=subprocess.DEVNULL,
            )
            for name in names
            if not published or name in REFERRING
        }

    def close(self) -> None:
        """Have them finish, once all metrics are written. One that takes too long is ended."""
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        for child in self._processes.values():
            child.tell(_DONE)
        for name, child in self._processes.items():
            if not child.wait(deadline - time.monotonic()):
                child.kill()
                log.warning("%s did not finish within %.0f s; it may lack the last metrics.", name, FINISH_TIMEOUT_S)
            elif child.code:
                log.warning("The process of %s ended with code %d; it may lack metrics.", name, child.code)


def numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def urls_in(folder: Path) -> dict[str, str]:
    """Name of each tracker -> where its run can be seen, as a workspace or an artifact's records know it."""
    known = {path.stem: json.loads(path.read_text()) for path in sorted((folder / FOLDER).glob("*.json"))}
    return {name: state["url"] for name, state in known.items() if state["url"]}


def _open_wandb(settings: TrackingConfig, config: Mapping[str, Any], folder: Path) -> tuple[Any, str]:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=settings.project,
        entity=None if settings.entity == "none" else settings.entity,
        group=settings.group,
        job_type=config["kind"],
        name=settings.name,
        id=settings.id,
        resume="allow",
        tags=list(settings.tags),
        config=dict(config),
        dir=str(folder),
        mode="offline" if settings.mode == "offline" else None,  # None leaves it to WANDB_MODE
        settings=wandb.Settings(console="off", silent=True),
    )
    return run, "" if run.offline else run.url or ""


def _open_trackio(settings: TrackingConfig, config: Mapping[str, Any], folder: Path) -> tuple[Any, str]:
    import trackio

    # It has no fields for these.
    about = {"name": settings.name, "kind": config["kind"], "tags": list(settings.tags)}
    config = {**config, "nanodag": {**config["nanodag"], **about}}
    run = trackio.init(project=settings.project, name=settings.id, group=settings.group, config=config, resume="allow")
    space = os.environ.get("TRACKIO_SPACE_ID", "")
    return run, f"https://huggingface.co/spaces/{space}" if space else ""


class _MlflowRun:
    """A run of MLflow as the others have one. A table's rows of all steps stand in one file."""

    def __init__(self, mlflow: Any, run_id: str) -> None:
        self._mlflow, self._id = mlflow, run_id

    def log(self, values: Mapping[str, Any], step: int) -> None:
        # Others take any name of a metric.
        values = {re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII): value for name, value in values.items()}
        self._mlflow.log_metrics(numbers_in(values), step=step, run_id=self._id)
        for key, table in values.items():
            if isinstance(table, dict):
                rows = {**table, "step": [step] * len(next(iter(table.values())))}
                self._mlflow.log_table(rows, f"{key}.json", run_id=self._id)

    def finish(self) -> None:
        self._mlflow.end_run()


def _open_mlflow(settings: TrackingConfig, config: Mapping[str, Any], folder: Path) -> tuple[Any, str]:
    import mlflow

    (folder / "mlflow").mkdir(parents=True, exist_ok=True)
    os.chdir(folder / "mlflow")  # where its database and files are made unless MLFLOW_TRACKING_URI names another place
    with locked(folder / "mlflow" / "open.lock", timeout_s=60.0):  # of two that make the database at once either fails
        experiment = mlflow.set_experiment(settings.project).experiment_id
    # It makes ids itself, so ours is a tag.
    asked = {"filter_string": f"tags.`nanodag.id` = '{settings.id}'", "output_format": "list"}
    found = mlflow.search_runs([experiment], **asked)
    tags = {"nanodag.id": settings.id, "group": settings.group, **dict.fromkeys(settings.tags, "true")}
    run = mlflow.start_run(found[0].info.run_id if found else None, run_name=settings.name, tags=tags)
    if not found:
        mlflow.log_dict(dict(config), "config.json")
    server = mlflow.get_tracking_uri()
    page = f"{server}/#/experiments/{experiment}/runs/{run.info.run_id}" if server.startswith("http") else ""
    return _MlflowRun(mlflow, run.info.run_id), page


OPENED_BY: Mapping[str, Callable[[TrackingConfig, Mapping[str, Any], Path], tuple[Any, str]]] = {
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "mlflow": _open_mlflow,
}
"""What opens a tracker's run: one with `log(metrics, step)` and `finish()`, and its URL. It is given the settings with
group, name and id filled in; the stage's config, with what it belongs to under `nanodag`; and a folder for its files.
"""


def refer(name: str, workspace: Path, address: str, digest: str) -> None:
    """Log the artifact of a published stage, by reference, to the run that a tracker has of the stage."""
    job, state = (json.loads((workspace / file).read_text()) for file in ("job.json", f"{FOLDER}/{name}.json"))
    if state["step"] < 0:
        return  # it could not be opened, of which a warning told
    settings, config, folder = request_of(job, build="")
    run, _ = OPENED_BY[name](settings.model_copy(update={"id": state["id"]}), config, folder)
    package, about = importlib.import_module(name), config["nanodag"]
    facts = {"artifact": address, "digest": digest, "key": about["key"]}
    if name == "wandb":
        called = re.sub(r"[^\w.-]", "-", f"{about['run']}-{about['stage']}", flags=re.ASCII)
        artifact = package.Artifact(called, type=about["kind"], metadata=facts)
        artifact.add_reference(address, checksum=False)
        run.log_artifact(artifact)
    else:
        package.set_tags({f"nanodag.{fact}": value for fact, value in facts.items()})
    run.finish()


def _logged(name: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """Line as a tracker gets it: numbers, and lists of objects as its own Table, which wandb and trackio both have;
    MLflow takes columns. The first object names the columns."""
    logged: dict[str, Any] = dict(numbers_in(line))
    for key, objects in line.items():
        if isinstance(objects, list) and objects and isinstance(objects[0], dict):
            if name == "mlflow":
                logged[key] = {column: [each.get(column) for each in objects] for column in objects[0]}
                continue
            rows = [[each.get(column) for column in objects[0]] for each in objects]
            logged[key] = importlib.import_module(name).Table(columns=list(objects[0]), data=rows)
    return logged


def request_of(job: Mapping[str, Any], *, build: str) -> tuple[TrackingConfig, dict[str, Any], Path]:
    """Settings, config and folder that a job.json asks its trackers for a run with. build: tells this build of the
    stage from others."""
    context, stage = job["context"], job["config"]
    settings = TrackingConfig.model_validate(context["tracking"])
    about = {"run": job["run"], "stage": job["name"], "kind": stage["kind"], "preset": context["preset"]}
    of_run = {field: filled(getattr(settings, field), **about, build=build) for field in ("group", "name", "id")}
    of_run["id"] = re.sub(r"[^A-Za-z0-9_-]", "-", of_run["id"])
    config = {**stage, "nanodag": {**about, "key": Path(job["workspace"]).name}}
    return settings.model_copy(update=of_run), config, Path(context["trackers_folder"])


def follow(name: str, workspace: Path, is_done: Callable[[], bool]) -> None:
    """Pass a stage's metrics on to one tracker, until is_done, which waits a while each time, says that all are
    written. What was passed on before, by the process of an earlier try, is left out."""
    job = json.loads((workspace / "job.json").read_text())
    (settings, config, folder), path = request_of(job, build=secrets.token_hex(4)), workspace / FOLDER / f"{name}.json"
    if path.exists():
        state = json.loads(path.read_text())
    else:
        state = {"id": settings.id, "url": "", "step": -1}
        path.parent.mkdir(exist_ok=True)
        write_json(path, state)  # before the run is opened: whoever is killed in between continues it all the same
    run, url = OPENED_BY[name](settings.model_copy(update={"id": state["id"]}), config, folder)
    write_json(path, state := state | {"url": url})
    if url:
        log.info("%s: %s", name, url)
    tail, begin, is_over = Tail(workspace / "metrics.jsonl"), state["step"], False
    while not is_over:
        is_over = is_done()  # asked before the lines are read: those are then all
        lines = [json.loads(line) for line in tail.lines()]
        for line in lines:
            about = {key: line.pop(key, None) for key in ("step", "event", "total", "time")}
            if about["step"] > begin and (values := _logged(name, line)):
                run.log({f"{job['name']}/{metric}": value for metric, value in values.items()}, about["step"])
                state["step"] = max(state["step"], about["step"])
        if lines:
            write_json(path, state)
    run.finish()


def main() -> None:
    name, workspace = sys.argv[1], Path(sys.argv[2])
    logs.set_up()

    def is_done() -> bool:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if readable and not os.read(sys.stdin.fileno(), len(_DONE)):
            os._exit(0)  # the stage's process is gone: the run stays open for its next try
        return bool(readable)

    try:
        if published := sys.argv[3:]:
            refer(name, workspace, *published)
        else:
            follow(name, workspace, is_done)
    except Exception as error:  # noqa: BLE001 - a tracker may raise whatever it likes, and the stage goes on
        what = "no reference to the artifact" if sys.argv[3:] else "no more metrics"
        log.warning("%s gets %s of this stage: %s: %s", name, what, type(error).__name__, error)
    sys.stderr.flush()
    os._exit(0)  # not by way of what trackers do at exit


if __name__ == "__main__":
    main()
