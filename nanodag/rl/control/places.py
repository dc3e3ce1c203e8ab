"""GPUs of a stage's processes on one node: of the trainer's ranks, of samplers, and of who shares memory with whom."""

from collections.abc import Sequence
from dataclasses import dataclass

from nanodag.errors import ConfigError


@dataclass(frozen=True)
class Places:
    """Values of CUDA_VISIBLE_DEVICES. trainer: of every rank on this node, which takes the one of its local rank.
    samplers: of each sampler, its own alone."""

    trainer: str
    samplers: tuple[str, ...]

    def senders(self, num_ranks: int) -> list[list[int]]:
        """For each sampler the trainer's ranks on its GPUs, in its ranks' order: memory of a GPU can be shared with who
        is there alone. num_ranks: of this node. Raises ConfigError for a sampler on a GPU without a rank."""
        rank_of = {gpu: rank for rank, gpu in enumerate(self.trainer.split(",")[:num_ranks])}
        each = [gpus.split(",") for gpus in self.samplers]
        if alone := [gpu for gpus in each for gpu in gpus if gpu not in rank_of]:
            raise ConfigError(
                f"weights.sync: ipc, and a sampler is on GPU {alone[0]}, where no rank of the trainer is (they are on "
                f"{', '.join(rank_of)}). Lower sampler.replicas, or use weights.sync: disk."
            )
        return [[rank_of[gpu] for gpu in gpus] for gpus in each]


def places_of(
    gpus: Sequence[str], *, own: Sequence[int], num_ranks: int, replicas: int, tensor_parallel: int = 1
) -> Places:
    """The places of a stage's processes on one node.

    gpus: that the stage has there, as CUDA_VISIBLE_DEVICES names them. own: those of samplers alone, by number; none
    where samplers are on the trainer's, one after the other and then from the first again. num_ranks: of this node.
    Raises ConfigError where a side has too few.
    """
    if missing := [number for number in own if number >= len(gpus)]:
        raise ConfigError(
            f"sampler.gpus names GPU {missing[0]}, and the stage has {len(gpus)} ({', '.join(gpus)}). Lower it, or let "
            "the stage have more of the node's GPUs."
        )
    trainers = [gpu for number, gpu in enumerate(gpus) if number not in own]
    samplers = [gpus[number] for number in own] or list(gpus)
    if len(trainers) < num_ranks and own:
        raise ConfigError(
            f"{num_ranks} ranks have {len(trainers)} GPUs beside the samplers' {len(samplers)} "
            f"({', '.join(samplers)}). Lower resources.num_ranks or sampler.gpus."
        )
    if len(samplers) < tensor_parallel:
        raise ConfigError(
            f"sampler.tensor_parallel {tensor_parallel} splits a model over more than the {len(samplers)} GPUs that "
            f"samplers have here ({', '.join(samplers)}). Lower it, or raise sampler.gpus."
        )
    firsts = [number * tensor_parallel for number in range(replicas)]
    return Places(
        trainer=",".join(trainers),
        samplers=tuple(
            ",".join(samplers[(first + n) % len(samplers)] for n in range(tensor_parallel)) for first in firsts
        ),
    )
