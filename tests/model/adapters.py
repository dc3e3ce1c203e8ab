"""Tiny models with adapters, left merged and left alone by the same writers as a stage's."""

from pathlib import Path

import torch

from nanodag.model.adapter_folder import leave_adapter
from nanodag.model.folder import load, save
from nanodag.model.lora import ADAPTER, add_lora, merged, save_adapter

ALPHA, RANK = 12.0, 4


def leave_both(folder: Path, base: Path, *, dtype: torch.dtype = torch.float32, scores: bool = False, seed: int = 1):
    """Folders `merged` and `alone` of a base with adapters that are not zero; with `scores` a head that is not."""
    model, draw = load(base, scores=scores), torch.Generator().manual_seed(seed)
    add_lora(model, rank=RANK, alpha=ALPHA, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".up") or name == "score.weight":
                parameter.normal_(0, 0.1, generator=draw)
    weights = {name: tensor.detach().to(dtype) for name, tensor in model.named_parameters()}
    for name in ("merged", "alone"):
        whole = dict(merged(weights.items(), scale=ALPHA / RANK))
        save(folder / name, whole, tokenizer=base, source=base, model=model)
        save_adapter(folder / name / ADAPTER, weights, alpha=ALPHA, dtype=torch.float32)
    leave_adapter(folder / "alone", base={"key": "b" * 40, "digest": "d" * 64})
    return folder / "merged", folder / "alone"
