"""Runs a stage again from what its artifact recorded, in a folder of its own, and compares the bytes."""

import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nanodag.config import resolve
from nanodag.config.kind import PAGE
from nanodag.config.kinds import find_kind, recorded_kind
from nanodag.config.pipeline import read_stage
from nanodag.errors import StoreError
from nanodag.errors.words import counted
from nanodag.host.machine import detect
from nanodag.run.build_stage import job_of, key_of, work
from nanodag.run.record import Run, StageResult, pipeline_file, result_of
from nanodag.store import Artifact, Store, content_digest
from nanodag.store.atomic import hashes_below
from nanodag.store.provenance import environment
from nanodag.worker.launch import Watch


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """digest: of what came out this time. files: name -> `same`, `differs`, `missing` or `new`. environment: what is
    not as it was, name -> (then, now). workspace: where the files lie, None when they were the same and are removed."""

    digest: str
    files: Mapping[str, str]
    metrics: Mapping[str, Any]
    environment: Mapping[str, tuple[Any, Any]]
    workspace: Path | None

    @property
    def is_same(self) -> bool:
        return all(state == "same" for state in self.files.values())


def reproduce(
    store: Store, artifact: Artifact, *, file: str, on_line: Callable[[str], None] = lambda line: None
) -> Reproduction:
    """Run the artifact's stage once more. Nothing is published, and nothing that the store has is touched.

    It waits for a device of this machine as any stage does, and `gc` leaves its folder alone meanwhile.

    Raises ArtifactNotFound when an input is gone, StoreError when another user wrote the artifact, or when the recipe
    cannot be the same any more: data have changed, or the kind's code version; StageFailed when the worker fails.
    """
    store.check_own(artifact)
    stage = _recipe(artifact)
    inputs = {
        label: result_of(str(source["stage"]), store.source(artifact, label), was_found=True)
        for label, source in artifact.lineage.items()
    }
    if stage.resources.device == "cuda" and not detect().num_gpus:
        raise StoreError(
            f"Artifact {artifact.folder} was made on {counted(stage.num_gpus(0), 'GPU')}, and this machine has "
            "none: reproduce it where there are as many."
        )
    path = pipeline_file(file)
    resolved = resolve(path, overrides=["tracking.trackers=[]"])  # a comparison is no run of a tracker's
    run = Run(f"reproduce-{artifact.key[:12]}", resolved, store, path.parent)
    _same_key(run, stage, inputs, artifact)
    name = f"reproduce-{artifact.key[:12]}-{secrets.token_hex(4)}"
    with store.building(name) as lock:
        workspace = store.workspace(name)
        job = job_of(run, artifact.stage, stage, inputs, workspace)
        result, _ = work(run, job, lock, Watch(on_line=on_line, stop=run.stop), steps_back=True)
        hashes = {name: facts["sha256"] for name, facts in hashes_below(job.output).items()}
        files = _compared({name: facts["sha256"] for name, facts in artifact.files.items()}, hashes)
        if is_same := set(files.values()) == {"same"}:
            shutil.rmtree(workspace)
    was, now = artifact.environment, environment(str(stage.resources.device))
    return Reproduction(
        digest=content_digest(hashes),
        files=files,
        metrics=result.metrics,
        environment={n: (was.get(n), now.get(n)) for n in {**was, **now} if was.get(n) != now.get(n)},
        workspace=None if is_same else workspace,
    )


def _recipe(artifact: Artifact) -> Any:
    if recorded_kind(artifact.kind).makes == PAGE:
        raise StoreError(
            f"Artifact {artifact.folder} is the report of a run, made from all its stages; reproduce one of these."
        )
    try:
        return read_stage(artifact.config)
    except ValidationError as error:
        raise StoreError(
            f"The config of artifact {artifact.folder} is not one that this nanodag has ({error.errors()[0]['msg']} at "
            f"{error.errors()[0]['loc']}). It was made by code {artifact.environment.get('revision', '?')}: check that "
            "out and reproduce it there."
        ) from error


def _same_key(run: Run, stage: Any, inputs: Mapping[str, StageResult], artifact: Artifact) -> None:
    key, sources = key_of(run, stage, inputs)
    if key == artifact.key:
        return
    changed = [url for url, identity in sources.items() if identity != artifact.sources.get(url)]
    if changed:
        raise StoreError(
            f"The data {changed[0]} are not what artifact {artifact.folder} was made from: they were "
            f"{artifact.sources.get(changed[0])}, and are {sources[changed[0]]}. Put those back first."
        )
    raise StoreError(
        f"Stage {artifact.stage} with the recorded config, inputs and data has another key now ({key[:12]}): kind "
        f"{stage.kind} makes something else since (code version {find_kind(stage.kind).code_version}). Artifact "
        f"{artifact.folder} was made by code {artifact.environment.get('revision', '?')}: reproduce it there."
    )


def _compared(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    verdicts = {name: "same" if digest == after.get(name) else "differs" for name, digest in before.items()}
    verdicts |= dict.fromkeys(before.keys() - after.keys(), "missing")
    verdicts |= dict.fromkeys(after.keys() - before.keys(), "new")
    return dict(sorted(verdicts.items()))
