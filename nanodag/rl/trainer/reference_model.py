"""The frozen policy that KL is measured from: the model that the stage began with, or a later one."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanodag.rl.trainer.policy import load_policy
from nanodag.rl.trainer.sequence_parallel import SequenceGroup
from nanodag.train.deepspeed_engine import TrainEngine
from nanodag.train.lent_memory import LentMemory

FILE_NAME = "reference.safetensors"


class Reference:
    """Every rank holds all of it, in the training precision. A refreshed one is part of a checkpoint."""

    def __init__(self, model_path: Path, *, temperature: float, engine: TrainEngine, group: SequenceGroup) -> None:
        policy = load_policy(model_path, temperature=temperature, group=group).requires_grad_(False)
        self.policy = policy.to(engine.device, engine.dtype)
        self._engine = engine
        self.lent = LentMemory(self.policy.parameters(), device=engine.device)

    @torch.no_grad()
    def refresh(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take the trainer's weights of now; every rank must call it."""
        parameters = dict(self.policy.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)

    def save(self, folder: Path) -> None:
        """Write it into a checkpoint, from rank 0."""
        if self._engine.rank == 0:
            parameters = self.policy.named_parameters()
            tensors = {name: self.lent.readable(tensor).cpu().contiguous() for name, tensor in parameters}
            save_file(tensors, folder / FILE_NAME)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take back what `save` wrote."""
        saved = load_file(folder / FILE_NAME)
        for name, parameter in self.policy.named_parameters():
            parameter.copy_(saved[name])
