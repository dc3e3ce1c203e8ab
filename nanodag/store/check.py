"""Reads every byte of attempts and says which are not what they were."""

from dataclasses import dataclass

from nanodag.errors import ArtifactNotFound, CorruptArtifact, NewerFormat
from nanodag.store.artifacts import Store


@dataclass(frozen=True, kw_only=True)
class Finding:
    """state: `whole`, `damaged`, `newer` (only a newer nanodag reads it) or `unfinished` (its writer is at it, or was
    killed). text: what is wrong."""

    key: str
    attempt: str
    stage: str
    state: str
    num_bytes: int
    text: str


def check(store: Store, key: str, attempt: str) -> Finding:
    """Hash every file of an attempt; a remote one is pulled for that."""
    stage, num_bytes = "", 0
    try:
        artifact = store.attempt(key, attempt)
        stage, num_bytes = artifact.stage, artifact.num_bytes
        store.materialize(artifact)
        store.records(artifact)
        state, text = "whole", ""
    except ArtifactNotFound:
        is_there = attempt in store.attempts(key)
        state, text = ("unfinished", "no manifest yet") if is_there else ("damaged", "it is not in the store")
    except NewerFormat as error:
        state, text = "newer", str(error)
    except CorruptArtifact as error:
        state, text = "damaged", str(error)
    return Finding(key=key, attempt=attempt, stage=stage, state=state, num_bytes=num_bytes, text=text)


def targets(store: Store, name: str) -> list[tuple[str, str]]:
    """What a name means: all that a run refers to, or every attempt of the key that begins so, or with an empty name
    every attempt there is. Raises ArtifactNotFound when it means nothing."""
    keys = store.keys()
    if not name:
        return [(key, attempt) for key in keys for attempt in store.attempts(key)]
    if name in store.runs():
        entries = store.read_run(name).stages.values()
        return [(entry.key, entry.made.attempt) for entry in entries if entry.made is not None]
    prefix, _, attempt = name.partition("/")
    keys = [key for key in keys if key.startswith(prefix)]
    if len(keys) != 1:
        raise ArtifactNotFound(
            f"{name!r} is no run of {store.url}, and {len(keys)} keys begin so. Keys may be abbreviated as long as one "
            "begins so; runs are listed by: nanodag status"
        )
    return [(keys[0], a) for a in store.attempts(keys[0]) if a.startswith(attempt)]
