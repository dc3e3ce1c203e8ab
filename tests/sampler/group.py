"""A trainer's rank 0, as samplers see it."""

from pathlib import Path
from threading import Thread

import torch
from transformers import AutoModelForCausalLM

from nanodag.inference.client import SamplerClient
from nanodag.inference.weight_bodies import Bucket
from nanodag.sampler.weight_group import WeightGroup, open_store


class Trainer:
    """Rank 0 of a group of two, which broadcasts a checkpoint's tensors from a thread."""

    def __init__(self, name: str) -> None:
        self.store = open_store("127.0.0.1", 60)
        self.name = name
        self.work: Thread | None = None
        self.group: WeightGroup | None = None

    def broadcast(self, folder: Path, *, each_alone: bool = False, **instead: torch.Tensor | None) -> list[Bucket]:
        """Begin; returns the two buckets that it sends, the first of one tensor. each_alone: a broadcast for each
        tensor. instead: of those of these names, with _ for a dot; None for none."""
        model = AutoModelForCausalLM.from_pretrained(folder)
        found = {name: instead.get(name.replace(".", "_"), tensor) for name, tensor in model.named_parameters()}
        named = [(name, tensor) for name, tensor in found.items() if tensor is not None]
        parts = [named[:1], named[1:]]
        self.work = Thread(target=self._run, args=(parts, each_alone), daemon=True)
        self.work.start()
        return [
            Bucket([n for n, _ in part], ["float32"] * len(part), [list(p.shape) for _, p in part]) for part in parts
        ]

    def _run(self, parts, each_alone) -> None:
        if self.group is None:
            self.group = WeightGroup(self.store, name=self.name, rank=0, size=2, timeout_s=60)
        for part in [[pair] for whole in parts for pair in whole] if each_alone else parts:
            self.group.broadcast(torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in part]))

    async def give(self, client: SamplerClient, folder: Path, version: int) -> None:
        """A whole update, the group made first if need be."""
        is_new = self.group is None
        buckets = self.broadcast(folder)
        if is_new:
            await client.join_weight_group(name=self.name, port=self.store.port, rank=1, size=2)
        await client.begin_weight_update()
        for bucket in buckets:
            await client.receive_weights(bucket, group=self.name, version=version if bucket is buckets[-1] else None)
        await client.end_weight_update()
        self.work.join()


async def begin_broadcast(client: SamplerClient, trainer: Trainer, folder: Path, **how) -> list[Bucket]:
    """The buckets of an update whose session is open, by a group that is made for it."""
    buckets = trainer.broadcast(folder, **how)
    await client.join_weight_group(name=trainer.name, port=trainer.store.port, rank=1, size=2)
    await client.begin_weight_update()
    return buckets
