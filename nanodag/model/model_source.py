"""Existing Hugging Face models and adapters as a stage names them: `file:folder`, `hub:owner/name[@revision]`.

Only safetensors weights are taken: a pickle can run code when it is loaded. With a mirror, `hub:owner/name` is the
folder <mirror>/owner/name where that is there. No torch.
"""

import fnmatch
import re
from pathlib import Path
from typing import Any

from nanodag.data.digests import file_sha256
from nanodag.errors import ConfigError, SourceError
from nanodag.errors.words import listed
from nanodag.model.headers import ADAPTER_CONFIG

WANTED = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken"),
    *("chat_template.*", "*processor_config.json", "LICENSE*", "README.md", ADAPTER_CONFIG),
)
_HUB = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def model_identity(model: str, mirror: Path | None = None) -> dict[str, Any]:
    """Identity of a model in a stage's key: the sha256 of its files, or its name on the hub at a commit.

    Raises ConfigError for a name of another form, SourceError when nothing lies there.
    """
    folder = _local_folder(model, mirror)
    if folder is not None:
        return {"kind": "model", "files": [[p.name, file_sha256(p)] for p in wanted_files(folder)]}
    name, revision = _hub_name(model)
    return {"kind": "model", "name": name, "commit": _commit(name, revision)}


def local_files(model: str, mirror: Path | None = None) -> list[Path] | None:
    """The files that would be taken of a model on this host; None when it must come from the hub. Raises as above."""
    folder = _local_folder(model, mirror)
    return wanted_files(folder) if folder is not None else None


def model_commit(model: str) -> str:
    """The commit of a model on the hub. Raises SourceError when the hub does not know it, or does not answer."""
    return _commit(*_hub_name(model))


def fetched(model: str, mirror: Path | None = None) -> Path:
    """The folder of a model on this machine, fetched from the hub where it lies there. Raises as `model_identity`."""
    if (folder := _local_folder(model, mirror)) is not None:
        return folder
    import huggingface_hub

    name, revision = _hub_name(model)
    commit = _commit(name, revision)
    return Path(huggingface_hub.snapshot_download(name, revision=commit, allow_patterns=list(WANTED)))


def _hub_name(model: str) -> tuple[str, str]:
    match = _HUB.fullmatch(model)
    if match is None:
        raise ConfigError(f"Model {model!r} is neither file:folder nor hub:owner/name[@revision].")
    return match["name"], match["revision"] or ""


def _local_folder(model: str, mirror: Path | None) -> Path | None:
    """The folder that a model is on this host, None when it must come from the hub."""
    if model.startswith("file:"):
        folder = Path(model.removeprefix("file:")).expanduser().absolute()
        if not folder.is_dir():
            raise SourceError(f"Model {model!r}: there is no folder {folder}.")
        return folder
    name, _ = _hub_name(model)
    mirrored = mirror / name if mirror is not None else None
    is_there = mirrored is not None and any((mirrored / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    return mirrored if is_there else None


def wanted_files(folder: Path) -> list[Path]:
    """Files of a model folder that are taken. Raises SourceError when config or weights are missing."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and any(fnmatch.fnmatch(p.name, w) for w in WANTED))
    names = [p.name for p in files]
    has_config = not {"config.json", ADAPTER_CONFIG}.isdisjoint(names)
    if {"config.json", ADAPTER_CONFIG} <= {*names} and not any(n.startswith("model") for n in names):
        raise SourceError(f"{folder} holds adapters alone: import their base, with this folder as `adapter`.")
    if not has_config or not any(n.endswith(".safetensors") for n in names):
        raise SourceError(
            f"{folder} is no model that can be taken: it needs config.json and *.safetensors; found {listed(names)}. "
            "Convert other weights with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
        )
    return files


def _commit(name: str, revision: str) -> str:
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    import httpx2  # what huggingface_hub speaks HTTP with: a missing network is its error, not an OSError
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().model_info(name, revision=revision or None).sha)
    except (OSError, ValueError, httpx2.HTTPError) as cause:
        try:
            folder = huggingface_hub.snapshot_download(name, revision=revision or None, local_files_only=True)
        except (OSError, ValueError):
            raise SourceError(
                f"Model hub:{name}: the hub does not answer ({cause}) and no copy is in this machine's cache. Check "
                "the name and the network; or download it elsewhere and name it file:FOLDER."
            ) from cause
        return Path(folder).name
