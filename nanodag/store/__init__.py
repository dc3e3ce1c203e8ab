"""The store decides what is done: immutable artifacts under keys, and resumable checkpoints inside a stage."""

from nanodag.store.artifacts import Store
from nanodag.store.atomic import write_json
from nanodag.store.checkpoints import Checkpoints
from nanodag.store.manifest import Artifact, canonical_json, content_digest, stage_key

__all__ = ["Artifact", "Checkpoints", "Store", "canonical_json", "content_digest", "stage_key", "write_json"]
