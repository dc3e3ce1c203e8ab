"""Rollouts that exist: the files that `rollout.source: file:PATH` names, and the groups in them. No torch here.

A line is a rollout as a stage leaves it (nanodag.rl.rollouts.rollout), or as `nanodag rollouts --export` writes it.
Groups lie in the files and are read when their step comes; only where they begin is kept in memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, TypeVar

import orjson

from nanodag.data.digests import file_sha256
from nanodag.errors import ConfigError, SourceError
from nanodag.rl.rollouts.rollout import (
    Rollout,
    Span,
    from_record,
    parsed_lines,
    place_in_group,
    prompt_span,
    read_lines,
)

T = TypeVar("T")
FILE = "file:"
BESIDE = (".answers", ".scores-")
"""What stands in the names of files beside those of rollouts."""


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """The files of a source. steps: by number, where each file is what one step trained; else empty."""

    files: tuple[Path, ...]
    steps: Mapping[int, Path] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """Identity of their content in a key: the sha256 of each file."""
        if self.steps:
            return {"kind": "rollouts", "steps": {str(step): file_sha256(path) for step, path in self.steps.items()}}
        return {"kind": "rollouts", "files": [file_sha256(path) for path in self.files]}

    def states(self) -> list[tuple[int, int]]:
        """Size and time of change of each file; of one that is gone -1 and 0."""
        statuses = [path.stat() if path.exists() else None for path in self.files]
        return [(-1, 0) if status is None else (status.st_size, status.st_mtime_ns) for status in statuses]


def saved_files(source: str) -> SavedFiles:
    """The files that `file:PATH` names, sorted. Raises ConfigError where there is none."""
    path = Path(source.removeprefix(FILE))
    if path.is_dir():
        names = {file.stem.removeprefix("step-"): file for file in sorted(path.glob("step-*.jsonl"))}
        if steps := {int(step): file for step, file in names.items() if step.isdigit()}:
            return SavedFiles(tuple(steps.values()), steps)
        path /= "*.jsonl"
    files = [path] if path.is_file() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    files = [file for file in files if not any(part in file.name for part in BESIDE)]
    if not files:
        raise ConfigError(
            f"rollout.source {source} finds no file; name a .jsonl file, a pattern, or the folder `rollouts` in the "
            "records of an RL stage."
        )
    if others := [file for file in files if file.suffix != ".jsonl"]:
        raise ConfigError(
            f"rollout.source {source} finds {others[0].name}, which is no .jsonl; `nanodag rollouts RUN --export "
            "rollouts.jsonl` writes one."
        )
    return SavedFiles(tuple(files))


def check_steps(found: SavedFiles, *, num_steps: int) -> None:
    """Raise ConfigError for a step that the files of a stage's steps lack."""
    missing = [step for step in range(1, num_steps + 1) if step not in found.steps]
    if found.steps and missing:
        raise ConfigError(
            f"rollout.source {found.files[0].parent} has no step {missing[0]}, and num_steps is {num_steps}; lower "
            "num_steps, or name the files by a pattern, as step-*.jsonl, to train their groups in an order of its own."
        )


@dataclass(frozen=True, slots=True)
class Saved:
    """A rollout in a file. begin: of its line, in bytes. step: of its line, empty where it names none. asked: answer
    and messages of its prompt, where the line or a file beside has them."""

    begin: int
    step: str
    rollout: Rollout
    asked: Mapping[str, Any]


def read_saved(path: Path) -> Iterator[Saved]:
    """The rollouts of a file, in order. Raises as `parsed_lines`."""
    return parsed_lines(path, lambda line, begin: _parsed(line, begin, path))


def groups_in(found: Iterable[Saved], kept: Callable[[Saved], T]) -> list[list[T]]:
    """Whatever `kept` makes of the rollouts of one id and step, adjacent or not, by sample and branch; groups in the
    order in which the first of each comes."""
    groups: dict[tuple[str, str], list[tuple[tuple[int, int], T]]] = {}
    for saved in found:
        members = groups.setdefault((saved.step, saved.rollout.group_id), [])
        members.append((place_in_group(saved.rollout), kept(saved)))
    return [[member for _, member in sorted(members, key=itemgetter(0))] for members in groups.values()]


def places_of_groups(path: Path) -> list[list[int]]:
    """For each group of a file, where in it each rollout begins, in bytes: a file may not fit into memory. Rollouts
    that an earlier nanodag trained again count where they were trained first."""
    fresh = (saved for saved in read_saved(path) if "replayed" not in saved.rollout.metadata)
    return groups_in(fresh, attrgetter("begin"))


def group_at(path: Path, begins: Sequence[int]) -> list[Saved]:
    """The rollouts that begin at these places."""
    group = []
    with path.open("rb") as stream:
        for begin in begins:
            stream.seek(begin)
            group.append(_parsed(stream.readline(), begin, path))
    return group


def _parsed(line: bytes, begin: int, path: Path) -> Saved:
    record = orjson.loads(line)
    if isinstance(record, dict) and "response_ids" in record:
        prompt_part = {name: record[name] for name in ("answer", "messages") if record.get(name)}
        return Saved(begin, str(record.get("step", "")), _from_row(record), prompt_part)
    if isinstance(record, dict) and "spans" not in record:
        raise ValueError("it has neither spans nor response_ids; text without tokens is what an `sft` stage trains")
    rollout = from_record(record)
    beside = path.with_name(path.name.split(".")[0] + ".answers.jsonl")
    return Saved(begin, "", rollout, _asked(beside).get(rollout.prompt_id, {}))


def _from_row(row: Mapping[str, Any]) -> Rollout:
    """The rollout of a line of an export. Without versions, tokens outside the mask are a tool's."""
    try:
        ids = row["response_ids"]
        mask = row.get("mask") or [1] * len(ids)
        versions = row.get("versions") or [0 if is_trained else -1 for is_trained in mask]
        logprobs = row.get("logprobs") or [None] * len(ids)
        tokens = list(zip(ids, mask, logprobs, versions, strict=True))
        runs = [(is_tool, list(run)) for is_tool, run in groupby(tokens, key=lambda token: token[3] < 0)]
        return Rollout(
            group_id=str(row["group_id"]),
            prompt_id=str(row["prompt_id"]),
            sample_index=int(row["sample_index"]),
            spans=(
                prompt_span(row["prompt_ids"]),
                *(_span(run, is_tool=is_tool) for is_tool, run in runs),
            ),
            reward=row.get("reward"),
            reward_components=row.get("reward_components") or {},
            finish_reason=row.get("finish_reason", "stop"),
            branch=int(row.get("branch") or 0),
            role=row.get("role") or "",
        )
    except KeyError as error:
        raise ValueError(f"the key {error.args[0]!r} is missing") from error


def _span(tokens: Sequence[tuple[int, int, float | None, int]], *, is_tool: bool) -> Span:
    ids, mask, logprobs, versions = zip(*tokens, strict=True)
    if is_tool:
        return Span(kind="tool", token_ids=ids)
    known = () if None in logprobs else logprobs
    return Span(kind="sampled", token_ids=ids, mask=mask, logprobs=known, versions=versions)


@cache
def _asked(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return {line["prompt_id"]: line for line in read_lines(path, is_whole=True)}
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path}: not the answers of prompts: {error!r}.") from error
