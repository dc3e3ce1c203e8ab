"""Host memory of a process of each kind before its first tensor, shared pages counted by their share.

Measured on a CPU after the imports: trainer 205 MB, sampler 177, evaluation 361 (lm-eval among it), controller 56. A
trainer has 110 MB more once DeepSpeed has started, which loads torch's compiler whether anything is compiled or not. A
layer that torch does compile costs another 140. Read off runs of `pocket`, and not explained: 60 MB more of a trainer,
120 more of an evaluation. With CUDA a process maps more; 3 GiB is not measured.
"""

from collections.abc import Mapping
from typing import NamedTuple

from nanodag.config.footprint import CUDA_BYTES
from nanodag.config.model_size import ModelSize
from nanodag.model.architecture import cpu_layer_fits
from nanodag.plan.stage_plan import Process

MB = 1_000_000
TRAINER = 375 * MB
SAMPLER = 177 * MB
EVALUATION = 480 * MB
CONTROLLER = 110 * MB
REWARDS = 60 * MB
TOKENIZER = 60 * MB
REPORT = 270 * MB
IMPORT = 60 * MB
LAUNCHER = 150 * MB
"""torchrun's own, where a stage has several ranks; the watchdog's is lost beside it."""
CUDA = 3 << 30
"""Host memory of a process that uses a GPU, beside what it holds."""
PACKER = 20 * MB
"""Memory of the buffer that rows are packed in."""
PARSED = 3.0
"""Bytes in memory for each byte of a JSON file, which is read as a whole."""
PARQUET = 45 * MB
"""Memory of the library that reads parquet."""
WINDOWED = 1.7
"""Bytes in memory for each byte that is shuffled at once, tokenised texts among them: measured with parquet."""
HOST_SHARE = 0.95
"""Share of a machine's memory that processes can fill."""


# CPU-seconds before the first step, measured with torch 2.13 on two cores.
TRAINER_S = 4.5
SAMPLER_S = 3.0
EVALUATION_S = 3.4
CONTROLLER_S = 2.5
REWARDS_S = 1.5
SHORT_S = 1.0
"""CPU-seconds of a worker without a model."""
PARSED_BYTES_S = 100e6
"""Bytes of a JSON file that are read as a whole, in a second of a core."""


class Compiler(NamedTuple):
    """Cost of torch's compiler in a process: bytes of host memory, CPU-seconds before the first step."""

    num_bytes: int = 140 * MB
    seconds: float = 4.5


def compiler(model: ModelSize, *, compiled: object, device: str) -> Compiler:
    """Cost of the compiler in a trainer; nothing where it does not start. compiled: as the stage's setting says. On a
    CPU our own code takes most layers all the same."""
    shape = model.shape
    is_ours = device == "cpu" and cpu_layer_fits(
        width=shape.width, head_dim=shape.head_width, mlp_width=shape.mlp_width
    )
    return Compiler() if compiled and not is_ours else Compiler(0, 0.0)


def computing(
    name: str,
    device: str,
    held: Mapping[str, int],
    *,
    cuda: Mapping[str, int] | None = None,
    cpu: Mapping[str, int],
    count: int = 1,
    gpus: int = 1,
    reserve: int = 0,
) -> Process:
    """Processes that hold something on their device. cuda, cpu: bytes of host memory beside it, by the device; with
    CUDA also CUDA's own. gpus, reserve: of each, on a GPU or on a CPU."""
    if device == "cuda":
        host = {"process": CUDA, **(cuda or {})}
        return Process(name=name, count=count, device={**held, "cuda": CUDA_BYTES}, host=host, gpus=gpus)
    return Process(name=name, count=count, host={**held, **cpu}, reserve=reserve)
