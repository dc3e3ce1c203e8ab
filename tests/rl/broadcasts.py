"""A trainer's rank 0 that gives the weights of a checkpoint, and what samplers that have them say."""

import asyncio
from pathlib import Path

import torch
from safetensors.torch import load_file

from nanodag.config.rl_sections import WeightsSection
from nanodag.model.folder import write_like
from nanodag.rl.trainer.weight_sender import WeightGiver
from nanodag.sampler.fingerprints import Fingerprints

TIMEOUT_S = 20.0


class Weights:
    """What `Shares` is on one rank, over the tensors of a checkpoint. before(names): called at each bucket."""

    dtype = torch.float32

    def __init__(self, folder: Path) -> None:
        self.take(folder)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        self.num_bytes = {name: tensor.nbytes for name, tensor in self.tensors.items()}
        self.before = lambda names: None

    def take(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")

    def keep(self) -> None:
        self.kept = dict(self.tensors)

    def together(self, names, *, kept=False):
        if not kept:
            self.before(names)
        held = self.kept if kept else self.tensors
        return torch.cat([held[name].reshape(-1).view(torch.uint8) for name in names])


class Trainer:
    """Rank 0 of a trainer: answers what `ask` asks for. checked: whether each bucket's fingerprints were asked for."""

    def __init__(self, folder: Path) -> None:
        self.source = folder
        self.weights = Weights(folder)
        options = {"rank": 0, "prefix": ""}
        weights = WeightsSection(sync_bucket_bytes=2000, sync_timeout_s=TIMEOUT_S)
        self.giver = WeightGiver(self.weights, weights, **options, make_fingerprints=lambda: Fingerprints("checkpoint"))
        self.asked: list[str] = []
        self.checked: list[bool] = []

    async def ask(self, do, **arguments):
        self.asked.append(do)
        self.checked += [arguments[name] for name in arguments if name == "fingerprint"]
        return [await asyncio.to_thread(getattr(self, do, None) or getattr(self.giver, do), **arguments)]

    def export(self, folder, kept):
        assert kept
        write_like(self.source, Path(folder), self.giver.tensors(kept=True), dtype=torch.float32)
        return {}


def expected(folder, count=2):
    """Fingerprints of a checkpoint, as so many samplers that hold it give them."""
    found = Fingerprints("checkpoint")
    for name, tensor in load_file(folder / "model.safetensors").items():
        found.add(name, tensor)
    return [[found.all()]] * count
