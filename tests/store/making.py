"""Small artifacts for tests of the store, good and forged."""

import hashlib
import json
from pathlib import PurePosixPath

import fsspec

KEY = "a" * 40


def publish(store, folder, key=KEY, **changes):
    given = {"kind": "sft", "stage": "sft", "config": {}, "lineage": {}, "sources": {}, "metrics": {"loss": 1.5}}
    return store.publish(key, folder, **{**given, "cost": {}, "environment": {}, **changes})


def key(letter):
    return letter * 40


def made_from(artifact):
    """Lineage of what was made from this artifact alone."""
    return {"model": {f: getattr(artifact, f) for f in ("stage", "kind", "key", "attempt", "digest")}}


def save(checkpoints, step, content="weights"):
    """Commit a checkpoint of one file in a folder; returns where it is."""
    folder = checkpoints.begin(step)
    (folder / "rank-0").mkdir()
    (folder / "rank-0" / "state").write_text(content)
    return checkpoints.commit(step)


def product_in(folder):
    """A product of two files, one of them in a folder."""
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_bytes(b"abcdefgh")
    (folder / "sub" / "more").write_text("x")
    return folder


def forge(store, artifact, change):
    """Have a manifest say something else, sealed as by somebody who means it."""
    path = f"{artifact.folder}/manifest.json"
    raw = json.loads(read_file(store, path))
    raw.pop("seal")
    change(raw)
    seal = hashlib.sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    write_file(store, path, json.dumps({**raw, "seal": seal}))


def _place(store, path):
    """The file system and the path there of a file of a store, local or not: past whatever nanodag does about it."""
    return fsspec.url_to_fs(f"{store.url}/{path}")


def read_file(store, path):
    system, place = _place(store, path)
    return system.cat_file(place).decode()


def write_file(store, path, content):
    """Put a file into a store, in the place of one that may be there. content: text or bytes."""
    system, place = _place(store, path)
    system.makedirs(PurePosixPath(place).parent.as_posix(), exist_ok=True)
    if system.exists(place):
        system.rm_file(place)  # one that was published may not be written
    system.pipe_file(place, content.encode() if isinstance(content, str) else content)


def names_in(store, folder):
    system, place = _place(store, folder)
    system.invalidate_cache()
    return sorted(PurePosixPath(name).name for name in system.ls(place, detail=False)) if system.exists(place) else []
