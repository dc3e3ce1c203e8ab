"""Host memory that processes of each kind take, and the processes beside the controller that answer the policy.

`host_memory.yaml` says how each was measured.
"""

from collections.abc import Mapping

from nanodag.config.footprint import CUDA_BYTES
from nanodag.config.kinds.rl import RLStage
from nanodag.config.model_size import ModelSize
from nanodag.config.rl_parts import MAX_CALLS
from nanodag.host.beside import table_beside
from nanodag.model.architecture import cpu_layer_fits
from nanodag.plan.stage_plan import Process

MB = 1_000_000
BYTES = {name: int(MB * size) for name, size in table_beside(__file__).items()}
CUDA = 3 << 30
"""Host memory of a process that uses a GPU, beside what it holds: with CUDA it maps more. Not measured."""
PARSED = 3.0
"""Bytes in memory for each byte of a JSON file, which is read as a whole."""
WINDOWED = 1.7
"""Bytes in memory for each byte that is shuffled at once, tokenised texts among them: measured with parquet."""
HOST_SHARE = 0.95
"""Share of a machine's memory that processes can fill."""


def compiler_bytes(model: ModelSize, *, compiled: object, device: str) -> int:
    """Memory of torch's compiler in a trainer; 0 where it does not start. compiled: as the stage's setting says. On a
    CPU our own code takes most layers all the same."""
    shape = model.shape
    is_ours = device == "cpu" and cpu_layer_fits(
        width=shape.width, head_dim=shape.head_width, mlp_width=shape.mlp_width
    )
    return BYTES["compiler"] if compiled and not is_ours else 0


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


def programs_of(stage: RLStage, samples: int) -> tuple[Process, ...]:
    """The processes, as many as may run at once. samples: that are asked for together, unless the pool is kept full."""
    generate = stage.rollout.generate
    calls = min(MAX_CALLS, 2 * int(stage.sampler.max_batch))
    if stage.rollout.order != "arrival":
        calls = min(calls, samples)
    # By the entry's option, or what it has without one.
    option = generate.traits.options.get("at_once") if generate.traits is not None else None
    at_once = calls if option is None else int(generate.options.get("at_once", option.default))  # type: ignore[arg-type]
    if not (count := min(calls, at_once)):
        return ()
    prefix = generate.name.partition(":")[0]
    if prefix == "verifiers":
        return verifiers_processes(count)
    if generate.name == "agent":
        return (Process(name="agent", count=count, host={"process": BYTES["program"]}),)
    # That of openenv talks to its server.
    servers = {"environment": "environment", "openenv": "environment", "agent": "agent"}
    if generate.is_one_turn or (generate.traits is not None and prefix not in servers):
        return ()
    name = servers.get(prefix, "function")
    server = Process(name=name, host={"process": BYTES[name]})
    return server, Process(name="episode", count=count, host={"process": BYTES["episode"]})


def verifiers_processes(rollouts: int) -> tuple[Process, ...]:
    """The process of a taskset with so many rollouts at once, and its server of tools."""
    process = {"process": BYTES["verifiers"]}
    held = {**process, "rollouts": rollouts * BYTES["verifiers_rollout"]}
    return Process(name="verifiers", host=held), Process(name="verifiers' tools", host=process)
