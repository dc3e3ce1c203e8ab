"""Records of runs: what a run asked for, and which artifact each of its stages took."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from nanodag.errors import ArtifactNotFound, CorruptArtifact, StoreError
from nanodag.store.atomic import locked
from nanodag.store.local_backend import LocalBackend
from nanodag.store.remote_backend import RemoteBackend

log = logging.getLogger(__name__)

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class RunRecords:
    """The part of a Store that holds `runs/<run>.json`."""

    url: str
    local: Path
    _backend: LocalBackend | RemoteBackend

    def write_run(self, run: str, record: Mapping[str, Any]) -> None:
        """Write or replace a run's record; a new one is given the next `number`, which orders runs whatever clocks say.

        Raises StoreError for a name that could leave the folder.
        """
        path = f"runs/{safe_name(run)}.json"
        if "number" not in record:
            records = self._records()
            before = records.get(run, {}).get("number")
            highest = max((r.get("number", 0) for r in records.values()), default=0)
            record = {**record, "number": highest + 1 if before is None else before}
        self._backend.write_text(path, json.dumps(record, indent=1, sort_keys=True, default=str))

    def change_run(self, run: str, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Let `change` edit a run's record while no other process on this host does; returns the new record."""
        with self._changing(run):
            record = self.read_run(run)
            change(record)
            self.write_run(run, record)
        return record

    def replace_run(self, run: str, record: Mapping[str, Any]) -> None:
        """`write_run` while no other process on this host changes or removes that record."""
        with self._changing(run):
            self.write_run(run, record)

    def read_run(self, run: str) -> dict[str, Any]:
        """A run's record. Raises ArtifactNotFound naming the runs there are, CorruptArtifact when it is unreadable."""
        try:
            text = self._backend.read_text(f"runs/{safe_name(run)}.json")
        except FileNotFoundError:
            newest = ", ".join(self.runs()[-5:]) or "none yet"
            raise ArtifactNotFound(f"There is no run {run!r} in {self.url}. Newest runs: {newest}.") from None
        if (record := _parsed(text)) is None:
            raise CorruptArtifact(f"The record runs/{run}.json in {self.url} is damaged. Remove it and run again.")
        return record

    def own_run(self, run: str) -> dict[str, Any]:
        """`read_run` of a record that is about to be acted upon: it names a pipeline file, and code.

        Raises StoreError when another user wrote it.
        """
        if not self._backend.is_own(f"runs/{safe_name(run)}.json"):
            raise StoreError(
                f"The record of run {run} in {self.url} was written by another user, and resuming it would run "
                "the code that it names. Start a run of your own: what is in the store is found."
            )
        return self.read_run(run)

    def runs(self) -> list[str]:
        """Names of all runs that have a readable record, oldest first."""
        return list(self.records_of_runs())

    def records_of_runs(self) -> dict[str, dict[str, Any]]:
        """Every readable record by its run's name, oldest first."""
        records = self._records()
        order = sorted(records, key=lambda n: (records[n].get("number", 0), float(records[n].get("created", 0.0))))
        return {name: records[name] for name in order}

    def remove_run(self, run: str, *, unless: Callable[[Mapping[str, Any]], bool] = lambda record: False) -> bool:
        """Remove a run's record; what it made stays until `gc`. False, and it stays, when `unless` says so of the
        record as it is by now."""
        with self._changing(run):
            if run in self._run_names() and unless(self.read_run(run)):
                return False
            self._backend.remove(f"runs/{safe_name(run)}.json")
        return True

    def damaged_runs(self) -> list[str]:
        """Names of runs whose record cannot be read."""
        return sorted(set(self._run_names()) - set(self._records()))

    def _changing(self, run: str) -> AbstractContextManager[int]:
        return locked(self.local / "locks" / f"run-{safe_name(run)}.lock", timeout_s=60.0, poll_s=0.01)

    def _run_names(self) -> list[str]:
        return [n.removesuffix(".json") for n in self._backend.names("runs") if _is_record(n)]

    def _records(self) -> dict[str, dict[str, Any]]:
        paths = {f"runs/{name}.json": name for name in self._run_names()}
        found = {}
        for path, text in self._backend.read_texts(list(paths)).items():
            if (record := _parsed(text)) is None:
                log.warning("The record %s in %s is damaged; it is passed over.", path, self.url)
            else:
                found[paths[path]] = record
        return found


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _is_record(name: str) -> bool:
    return name.endswith(".json") and SAFE_NAME.fullmatch(name) is not None


def safe_name(name: str) -> str:
    """The name, when it can be one of a folder or file in the store. Raises StoreError for all others."""
    if not SAFE_NAME.fullmatch(name):
        raise StoreError(f"{name!r} is not a name the store can use: letters, digits, '.', '_' and '-', at most 128.")
    return name
