"""Keys of results, and the manifest of an artifact: what it is, what it came from, what it cost.

A manifest is data that anybody may have written: it is checked before a name in it becomes a path.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from nanodag.errors import CorruptArtifact, NewerFormat
from nanodag.store.atomic import NOT_REGULAR

FORMAT_VERSION = 1
SHA256 = re.compile(r"[0-9a-f]{64}")


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no NaN (raises ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def stage_key(*, kind: str, code_version: int, config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """40 hex digits that name a stage's result.

    config: the result-changing part only, with the identities of the data that is read. inputs: input name -> content
    digest of the artifact. code_version: raised by hand when a kind's code changes what it makes.
    """
    recipe = {
        "format": FORMAT_VERSION,
        "kind": kind,
        "code_version": code_version,
        "config": config,
        "inputs": inputs,
        "sources": {},  # it is in every key that there is
    }
    return hashlib.sha256(canonical_json(recipe).encode()).hexdigest()[:40]


def content_digest(sha256_by_path: Mapping[str, str]) -> str:
    """64 hex digits over names and contents of an artifact's files, whatever their order, times or place."""
    digest = hashlib.sha256()
    for path in sorted(sha256_by_path):
        digest.update(f"{path}\0{sha256_by_path[path]}\n".encode())
    return digest.hexdigest()


MANIFEST = "manifest.json"
PARTS = ("files", "records")
ATTEMPT = re.compile(r"\d{4}(-[0-9a-f]{8})?$")
BASE = "adapter_base.json"  # of an artifact of adapters alone, whose model nanodag.model.adapter_folder makes


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """The manifest of one finished stage.

    key: stage key. attempt: name of its folder below the key, counted from 0001; `force` adds one. digest: content
    digest of `files`. files and records: relative path -> {"sha256", "bytes"}. config: resolved stage config. lineage:
    input name -> {stage, kind, key, attempt, digest}. sources: identities of the data read. metrics: what it reached.
    cost: seconds, tokens, flops. environment: code revision, package versions, device. created: seconds since 1970.
    """

    format: int
    key: str
    attempt: str
    kind: str
    stage: str
    digest: str
    files: Mapping[str, Mapping[str, Any]]
    records: Mapping[str, Mapping[str, Any]]
    config: Mapping[str, Any]
    lineage: Mapping[str, Mapping[str, Any]]
    sources: Any
    metrics: Mapping[str, Any]
    cost: Mapping[str, Any]
    environment: Mapping[str, Any]
    created: float

    @property
    def num_bytes(self) -> int:
        return sum(int(facts["bytes"]) for facts in self.files.values())

    @property
    def stored_bytes(self) -> int:
        return self.num_bytes + sum(int(facts["bytes"]) for facts in self.records.values())

    @property
    def is_adapter(self) -> bool:
        """True for adapters alone, over the model that is its input."""
        return BASE in self.files and "model" in self.lineage

    @property
    def folder(self) -> str:
        return f"artifacts/{self.key}/{self.attempt}"


def manifest_text(artifact: Artifact) -> str:
    """The JSON text of a manifest, with a seal: the sha256 of all the rest, so that a flipped bit in it is found.

    Refuses NaN (ValueError).
    """
    raw = json.loads(json.dumps(asdict(artifact), allow_nan=False, default=str))
    return json.dumps({**raw, "seal": _seal(raw)}, indent=1, sort_keys=True) + "\n"


def parse_manifest(text: str, *, key: str, attempt: str) -> Artifact:
    """The artifact that a manifest's text describes.

    Raises CorruptArtifact when it is not one, was changed, or is another's, NewerFormat when a newer nanodag wrote it.
    """
    where = f"artifacts/{key}/{attempt}"
    try:
        raw = json.loads(text)
        if raw["format"] > FORMAT_VERSION:
            raise NewerFormat(
                f"Artifact {where} has format {raw['format']}; this nanodag reads up to {FORMAT_VERSION}: update it."
            )
        if raw.pop("seal") != _seal(raw):
            raise CorruptArtifact(f"Artifact {where}: its {MANIFEST} was changed after it was written.")
        artifact = Artifact(**raw)
        hashes = {part: {name: _sha256(facts) for name, facts in getattr(artifact, part).items()} for part in PARTS}
        digest = content_digest(hashes["files"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptArtifact(f"Artifact {where} has no readable {MANIFEST} ({error}).") from error
    if (artifact.key, artifact.attempt) != (key, attempt):
        raise CorruptArtifact(f"Artifact {where} has the manifest of {artifact.folder}.")
    for name in [*artifact.files, *artifact.records]:
        if not is_inside(name):
            raise CorruptArtifact(f"Artifact {where} names the file {name!r}, which lies outside of it.")
    if artifact.digest != digest:
        raise CorruptArtifact(f"Artifact {where}: its {MANIFEST} has a digest that is not that of its files.")
    return artifact


def check_listing(artifact: Artifact, sizes: Mapping[str, int], parts: tuple[str, ...] = PARTS) -> None:
    """Compare a manifest with the files there are. sizes: path below the attempt's folder -> bytes.

    Raises CorruptArtifact naming the first file that is missing, has another size, is a link, or is in `files` without
    being named: a loader would read it.
    """
    for part in parts:
        for name, facts in getattr(artifact, part).items():
            size = sizes.get(f"{part}/{name}", -1)
            if size != facts["bytes"]:
                what = {-1: "is missing", NOT_REGULAR: "is no regular file"}.get(size, f"has {size} bytes")
                raise CorruptArtifact(
                    f"Artifact {artifact.folder}: file {part}/{name} {what}, its manifest says {facts['bytes']} bytes."
                )
    for path in sizes:
        part, _, name = path.partition("/")
        # .nfs*: what NFS makes of a file that is removed while somebody has it open.
        if part == "files" and name not in artifact.files and not PurePosixPath(name).name.startswith(".nfs"):
            raise CorruptArtifact(f"Artifact {artifact.folder}: its manifest names no file {path}, but it is there.")


def _seal(raw: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sha256(facts: Mapping[str, Any]) -> str:
    digest = facts["sha256"]
    if not SHA256.fullmatch(digest) or type(facts["bytes"]) is not int or facts["bytes"] < 0:
        raise ValueError(f"{dict(facts)} is not the sha256 and size of a file")
    return digest


def is_inside(name: str) -> bool:
    """True for a relative path in its plain form: no `..`, `.`, `//`, backslash or NUL."""
    return not ({"", ".", ".."} & set(name.split("/")) or "\\" in name or "\0" in name)
