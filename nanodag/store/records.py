"""Records of runs: what a run asked for, and which artifact each of its stages took."""

import json
import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from nanodag.errors import ArtifactNotFound, StoreError
from nanodag.store.atomic import locked
from nanodag.store.local_backend import LocalBackend
from nanodag.store.remote_backend import RemoteBackend
from nanodag.store.run_record import RunRecord, parse_record

log = logging.getLogger(__name__)

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class RunRecords:
    """The part of a Store that holds `runs/<run>.json`."""

    url: str
    local: Path
    _backend: LocalBackend | RemoteBackend

    def write_run(self, record: RunRecord) -> RunRecord:
        """Write or replace a run's record while no other process on this host changes it; returns it with its number.

        A new run gets the next `number`. Raises StoreError for a name that could leave the folder, or when the record
        that is there cannot be read: what it keeps alive is not known.
        """
        with self._changing(record.run):
            before = self.find_run(record.run)
            number = before.number if before is not None else self._next_number()
            return self._write(record.changed(number=number))

    def change_run(self, run: str, change: Callable[[RunRecord], RunRecord]) -> RunRecord:
        """Replace a run's record by what `change` makes of it, while no other process on this host changes it; returns
        the new one."""
        with self._changing(run):
            return self._write(change(self.read_run(run)))

    def find_run(self, run: str) -> RunRecord | None:
        """A run's record, or None where there is none. Raises StoreError when it cannot be read (parse_record)."""
        text = self._backend.read_texts([_path(run)]).get(_path(run))
        return parse_record(text, run, self.url) if text is not None else None

    def read_run(self, run: str) -> RunRecord:
        """A run's record. Raises ArtifactNotFound naming the runs there are, StoreError when it cannot be read."""
        record = self.find_run(run)
        if record is None:
            newest = ", ".join(self.runs()[-5:]) or "none yet"
            raise ArtifactNotFound(f"There is no run {run!r} in {self.url}. Newest runs: {newest}.")
        return record

    def own_run(self, run: str) -> RunRecord:
        """`read_run` of a record that is about to be acted upon: it names a pipeline file, and code.

        Raises StoreError when another user wrote it.
        """
        if not self._backend.is_own(_path(run)):
            raise StoreError(
                f"The record of run {run} in {self.url} was written by another user, and resuming it would run "
                "the code that it names. Start a run of your own: what is in the store is found."
            )
        return self.read_run(run)

    def runs(self) -> list[str]:
        """Names of all runs that have a readable record, oldest first."""
        return list(self.records_of_runs())

    def records_of_runs(self) -> dict[str, RunRecord]:
        """Every readable record by its run's name, oldest first; a warning names each other one."""
        records, unreadable = self._records()
        for error in unreadable.values():
            log.warning("%s It is passed over.", error)
        return records

    def all_records(self) -> dict[str, RunRecord]:
        """The same for who needs all of them. Raises StoreError naming the first one that cannot be read."""
        records, unreadable = self._records()
        for error in unreadable.values():
            raise error
        return records

    def unreadable_runs(self) -> dict[str, StoreError]:
        """Runs whose record cannot be read: name -> why."""
        return self._records()[1]

    def remove_run(self, run: str, *, unless: Callable[[RunRecord], bool] = lambda record: False) -> bool:
        """Remove a run's record; what it made stays until `gc`. False, and it stays, when `unless` says so of the
        record as it is by now."""
        with self._changing(run):
            record = self.find_run(run)
            if record is not None and unless(record):
                return False
            self._backend.remove(_path(run))
        return True

    def _changing(self, run: str) -> AbstractContextManager[int]:
        return locked(self.local / "locks" / f"run-{safe_name(run)}.lock", timeout_s=60.0, poll_s=0.01)

    def _write(self, record: RunRecord) -> RunRecord:
        self._backend.write_text(_path(record.run), json.dumps(record.model_dump(mode="json"), indent=1))
        return record

    def _next_number(self) -> int:
        return 1 + max((record.number for record in self._records()[0].values()), default=0)

    def _records(self) -> tuple[dict[str, RunRecord], dict[str, StoreError]]:
        """Records by their run's name, oldest first, and why each other one cannot be read."""
        records: dict[str, RunRecord] = {}
        unreadable: dict[str, StoreError] = {}
        names = {f"runs/{name}": name.removesuffix(".json") for name in self._backend.names("runs") if _is_record(name)}
        for path, text in self._backend.read_texts(list(names)).items():
            try:
                records[names[path]] = parse_record(text, names[path], self.url)
            except StoreError as error:
                unreadable[names[path]] = error
        return dict(sorted(records.items(), key=lambda item: (item[1].number, item[1].created))), unreadable


def _path(run: str) -> str:
    return f"runs/{safe_name(run)}.json"


def _is_record(name: str) -> bool:
    return name.endswith(".json") and SAFE_NAME.fullmatch(name) is not None


def safe_name(name: str) -> str:
    """The name, when it can be one of a folder or file in the store. Raises StoreError for all others."""
    if not SAFE_NAME.fullmatch(name):
        raise StoreError(f"{name!r} is not a name the store can use: letters, digits, '.', '_' and '-', at most 128.")
    return name
