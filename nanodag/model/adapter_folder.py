"""Folder of adapters alone, in peft's format, that a stage leaves in the place of a merged model, and the way back:
`python -m nanodag.model.adapter_folder BASE ADAPTER FOLDER`."""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanodag.model.architecture import read_json
from nanodag.model.decoder import Decoder
from nanodag.model.folder import load, read_tensors, write_like
from nanodag.model.headers import ADAPTER_CONFIG, INDEX, tensor_shapes, weight_files, weights_digest
from nanodag.model.lora import ADAPTER, PEFT, PEFT_PREFIX, merged_onto
from nanodag.store.atomic import write_json
from nanodag.store.manifest import BASE

HEAD = "score.weight"  # of a reward model, trained whole


def leave_adapter(folder: Path, *, base: Mapping[str, str]) -> None:
    """Take the weights out of a merged model's folder, and leave its adapters in their place.

    base: key and digest of the artifact that they adapt. BASE has these, and the merged weights' digest.
    """
    config, tensors = read_json(folder / ADAPTER / ADAPTER_CONFIG), load_file(folder / ADAPTER / PEFT)
    config["base_model_name_or_path"] = base.get("key")
    if HEAD in tensor_shapes(folder):
        tensors[PEFT_PREFIX + HEAD] = read_tensors(folder, [HEAD])[0]
        config |= {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    write_json(folder / BASE, {**base, "merged": weights_digest(folder)})
    for path in [*weight_files(folder), folder / INDEX]:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / ADAPTER)
    save_file(tensors, folder / PEFT, metadata={"format": "pt"})
    write_json(folder / ADAPTER_CONFIG, config)


def merge_onto(base: Path, adapter: Path, folder: Path) -> None:
    """Write the model of a folder of adapters alone, in the precision and by the formula of its trainer. Says so on
    standard output where its weights are not those to the bit."""
    config, dtype = read_json(adapter / ADAPTER_CONFIG), getattr(torch, read_json(adapter / "config.json")["dtype"])
    learned = {name.removeprefix(PEFT_PREFIX): tensor.to(dtype) for name, tensor in load_file(adapter / PEFT).items()}
    model, scale = load(base, is_deferred=True, scores=HEAD in learned), config["lora_alpha"] / config["r"]

    def parameters() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            tensor = learned.get(name, parameter.detach())
            if tensor.is_meta:
                tensor = torch.empty_like(tensor, device="cpu", dtype=dtype)
                parameter.stored.read_into(tensor)  # type: ignore[attr-defined]
            yield name, tensor

    adapters = {name: tensor for name, tensor in learned.items() if name != HEAD}
    weights: Any = merged_onto(parameters(), adapters, scale=scale, source=str(adapter))
    if not isinstance(model, Decoder):  # whose checkpoints have other tensors than its classes
        weights = {**model.checkpoint(dict(weights)), **{n: t for n, t in learned.items() if n == HEAD}}.items()
    write_like(adapter, folder, weights, dtype=dtype)
    for name in (ADAPTER_CONFIG, BASE):
        (folder / name).unlink()
    for path in weight_files(folder):
        path.chmod(0o444)  # as in an artifact; safetensors writes for this user alone
    if weights_digest(folder) != read_json(adapter / BASE)["merged"]:
        print("The merged weights differ from those of its training in their last bits: another machine multiplied.")


if __name__ == "__main__":
    merge_onto(*map(Path, sys.argv[1:]))
