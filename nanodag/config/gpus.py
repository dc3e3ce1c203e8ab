"""How many GPUs of a node a stage takes."""

from nanodag.config.kinds.evaluation import EvalStage
from nanodag.config.kinds.rl import RLStage
from nanodag.config.stage_base import StageBase


def num_gpus_of(stage: StageBase, available: int) -> int:
    """How many GPUs of a node a stage on GPUs takes: one for each rank there, and for RL as many as all its samplers
    have, where that is more; embedded samplers do with the `available` ones where these are fewer. Ranks and samplers
    share them, but where samplers have GPUs of their own. An evaluation takes those of one sampler at least."""
    num_ranks = int(stage.resources.num_ranks) // stage.resources.num_nodes
    if isinstance(stage, RLStage) and stage.placement == "separate":
        assert isinstance(stage.sampler.gpus, tuple)  # derived
        own = stage.sampler.gpus
        return max([num_ranks + len(own), *(number + 1 for number in own)])  # a number counts from the node's first
    if isinstance(stage, RLStage):
        gpus = int(stage.sampler.replicas) * stage.sampler.tensor_parallel if stage.has_samplers else 0
        return max(num_ranks, gpus if stage.sampler.engine == "sglang" else min(gpus, available))
    return stage.sampler.tensor_parallel if isinstance(stage, EvalStage) else num_ranks


def spare_gpus_of(stage: StageBase) -> int:
    """How many more it takes where nobody holds them: an evaluation, those of its other samplers."""
    return (int(stage.sampler.replicas) - 1) * stage.sampler.tensor_parallel if isinstance(stage, EvalStage) else 0
