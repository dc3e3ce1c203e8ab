"""Small artifacts for tests of the store, good and forged."""

import json

from nanodag.store.manifest import _seal

KEY = "a" * 40


def publish(store, folder, key=KEY, **changes):
    given = {"kind": "sft", "stage": "sft", "config": {}, "lineage": {}, "sources": {}, "metrics": {"loss": 1.5}}
    return store.publish(key, folder, **{**given, "cost": {}, "environment": {}, **changes})


def product_in(folder):
    """A product of two files, one of them in a folder."""
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_bytes(b"abcdefgh")
    (folder / "sub" / "more").write_text("x")
    return folder


def forge(store, artifact, change):
    """Have a manifest say something else, sealed as by somebody who means it."""
    path = f"{artifact.folder}/manifest.json"
    raw = json.loads(store._backend.read_text(path))
    raw.pop("seal")
    change(raw)
    store._backend.write_text(path, json.dumps({**raw, "seal": _seal(raw)}))
