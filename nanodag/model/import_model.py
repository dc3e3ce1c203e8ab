"""Takes an existing Hugging Face model as a stage's output: `python -m nanodag.model.import_model job.json`.

Forms: `file:folder`, `hub:owner/name[@revision]`. Only safetensors weights are taken: a pickle can run code when it is
loaded. With a mirror, `hub:owner/name` is the folder <mirror>/owner/name where that is there.
"""

import fnmatch
import json
import logging
import re
import shutil
import time
from pathlib import Path
from typing import Any

from nanodag.data.digests import file_sha256
from nanodag.errors import ConfigError, SourceError
from nanodag.errors.words import listed
from nanodag.model.architecture import MODEL_CODE
from nanodag.worker.job import Job, MetricsLog, finish, load_job

log = logging.getLogger("nanodag.model.import_model")

WANTED = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken"),
    *("chat_template.*", "LICENSE*", "README.md"),
)
_HUB = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def model_identity(model: str, mirror: Path | None = None) -> dict[str, Any]:
    """Identity of a model in a stage's key: the sha256 of its files, or its name on the hub at a commit.

    Raises ConfigError for a name of another form, SourceError when nothing lies there.
    """
    folder = _local_folder(model, mirror)
    if folder is not None:
        return {"kind": "model", "files": [[p.name, file_sha256(p)] for p in _wanted_files(folder)]}
    name, revision = _hub_name(model)
    return {"kind": "model", "name": name, "commit": _commit(name, revision)}


def local_files(model: str, mirror: Path | None = None) -> list[Path] | None:
    """The files that would be taken of a model on this host; None when it must come from the hub. Raises as above."""
    folder = _local_folder(model, mirror)
    return _wanted_files(folder) if folder is not None else None


def model_commit(model: str) -> str:
    """The commit of a model on the hub. Raises SourceError when the hub does not know it, or does not answer."""
    return _commit(*_hub_name(model))


def fetched(model: str) -> Path:
    """The folder of a model on this machine, fetched from the hub where it lies there. Raises as `model_identity`."""
    return _local_folder(model, None) or _download(*_hub_name(model))


def main() -> None:
    job = load_job()
    began = time.monotonic()
    metrics_log = MetricsLog(job)
    metrics_log.write(0, total=1, event="phase", phase="copying", unit="phases")
    metrics = import_model(job)
    metrics_log.write(1, total=1, unit="phases", **metrics)
    metrics_log.close()
    finish(job, metrics=metrics, cost={"work_seconds": time.monotonic() - began})


def import_model(job: Job) -> dict[str, Any]:
    """Copy the model's files into the job's output; returns the architecture and the number of bytes."""
    folder = _local_folder(job.config.model, job.mirror) or _download(*_hub_name(job.config.model))
    job.output.mkdir(exist_ok=True)
    num_bytes = 0
    for path in _wanted_files(folder):
        shutil.copyfile(path, job.output / path.name)  # through the hub cache's links to the bytes
        num_bytes += path.stat().st_size
    config = json.loads((job.output / "config.json").read_text())
    if job.config.model_code != "own":
        config[MODEL_CODE] = job.config.model_code
        (job.output / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    _name_ends(job.output, config)
    architecture = (config.get("architectures") or ["unknown"])[0]
    log.info("Imported %s from %s: %s, %d bytes", job.config.model, folder, architecture, num_bytes)
    return {"architecture": architecture, "bytes": num_bytes}


def _name_ends(folder: Path, config: dict[str, Any]) -> None:
    """Have generation_config.json name what ends a text, the chat template's end of turn included. Without a fast
    tokenizer, which training and sampling need, the model stays as it is."""
    from nanodag.model.generation import GENERATION_FILE, generation_config  # it may have to render the template

    if (folder / "tokenizer.json").is_file():
        text = json.dumps(generation_config(folder, config), indent=1, sort_keys=True)
        (folder / GENERATION_FILE).write_text(f"{text}\n")


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
    return mirrored if mirrored is not None and (mirrored / "config.json").is_file() else None


def _wanted_files(folder: Path) -> list[Path]:
    """Files of a model folder that are taken. Raises SourceError when config or weights are missing."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and any(fnmatch.fnmatch(p.name, w) for w in WANTED))
    names = [p.name for p in files]
    if "config.json" not in names or not any(n.endswith(".safetensors") for n in names):
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


def _download(name: str, revision: str) -> Path:
    import huggingface_hub

    commit = _commit(name, revision)
    return Path(huggingface_hub.snapshot_download(name, revision=commit, allow_patterns=list(WANTED)))


if __name__ == "__main__":
    main()
