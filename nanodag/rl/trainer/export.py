"""Writes the trained model as a Hugging Face directory, for the sampler after each step and as the stage's product."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanodag.sampler.fingerprints import Fingerprints

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
SHARD_BYTES = 4 << 30
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def write_model(
    weights: Iterator[tuple[str, Tensor]],
    folder: Path,
    *,
    source: Path,
    is_writer: bool,
    dtype: torch.dtype,
    fingerprints: Fingerprints | None = None,
) -> None:
    """Write weights and, beside them, the files of `source` that are not weights: config, tokenizer, chat template.

    weights: (name, tensor) pairs of the model as transformers names them; each tensor is valid until the next is asked
    for. Every rank walks through them; only the writer keeps and writes, one shard of at most 4 GiB at a time. The
    folder appears under its name only when it is whole. fingerprints: gets every tensor as the writer holds it.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    if is_writer:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    names: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    total = size = 0
    files: list[str] = []

    def flush() -> None:
        nonlocal held, size
        files.append(f"part-{len(files):05d}")
        save_file(held, temporary / files[-1], metadata={"format": "pt"})
        names.update(dict.fromkeys(held, files[-1]))
        held, size = {}, 0

    for name, tensor in weights:
        if not is_writer:
            continue
        num_bytes = tensor.numel() * tensor.element_size()
        if held and size + num_bytes > SHARD_BYTES:
            flush()
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if fingerprints is not None:
            fingerprints.add(name, held[name])
        size += num_bytes
        total += num_bytes
    if not is_writer:
        return
    flush()
    _name_shards(temporary, files, names, total)
    _copy_beside(source, temporary, dtype)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(temporary, folder)


def _name_shards(folder: Path, files: list[str], names: dict[str, str], total: int) -> None:
    """Give shards the names that transformers looks for, with an index when there are several."""
    if len(files) == 1:
        os.rename(folder / files[0], folder / "model.safetensors")
        return
    final = {part: f"model-{number:05d}-of-{len(files):05d}.safetensors" for number, part in enumerate(files, start=1)}
    for part, name in final.items():
        os.rename(folder / part, folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: final[part] for name, part in sorted(names.items())},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def _copy_beside(source: Path, folder: Path, dtype: torch.dtype) -> None:
    for file in sorted(source.iterdir()):
        if not file.is_file() or file.name.endswith(WEIGHT_SUFFIXES):
            continue
        if file.name == "config.json":
            config = json.loads(file.read_text(encoding="utf-8"))
            config.pop("torch_dtype", None)  # the name before transformers 5
            config["dtype"] = DTYPE_NAMES[dtype]
            (folder / file.name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(file, folder / file.name)
