"""Host memory of a process of each kind before its first tensor, shared pages counted by their share, and the
processes beside the controller that answer the policy.

Measured on a CPU after the imports: trainer 205 MB, sampler 177, evaluation 361 (lm-eval among it), controller 56. A
trainer has 110 MB more once DeepSpeed has started, which loads torch's compiler whether anything is compiled or not. A
layer that torch does compile costs another 140. Read off runs of `pocket`, and not explained: 60 MB more of a trainer,
120 more of an evaluation. A reward model's process has 500, with transformers. With CUDA a process maps more; 3 GiB is
not measured.

The process of an environment 16 MB, 57 with numpy and BM25;
an episode, which is its fork, 1.8 and 3.7 of its own. That of an agent's function 51 with the package `openai`, 16
without. That of a function with turns of its own 36, and 4 for each of its forks. An agent's program in the sandbox 17.
The process of a taskset of verifiers 198, as much again for its server of tools, 1.1
for each rollout. Not counted: programs of the tool `python`, 4 each and as many as cores; what a user's own code loads,
such as a corpus.
"""

from collections.abc import Mapping

from nanodag.config.footprint import CUDA_BYTES
from nanodag.config.kinds.rl import RLStage
from nanodag.config.model_size import ModelSize
from nanodag.config.rl_parts import MAX_CALLS
from nanodag.model.architecture import cpu_layer_fits
from nanodag.plan.stage_plan import Process

MB = 1_000_000
TRAINER = 375 * MB
SAMPLER = 177 * MB
EVALUATION = 480 * MB
CONTROLLER = 110 * MB
REWARDS = 60 * MB
REWARD_MODEL = 500 * MB
TOKENIZER = 60 * MB
REPORT = 270 * MB
IMPORT = 60 * MB
COMPILER = 140 * MB
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
ENVIRONMENT = 60 * MB
EPISODE = 4 * MB
AGENT = 55 * MB
FUNCTION = 40 * MB
PROGRAM = 20 * MB
VERIFIERS = 200 * MB
VERIFIERS_ROLLOUT = 1.1 * MB
HOST_SHARE = 0.95
"""Share of a machine's memory that processes can fill."""


def compiler_bytes(model: ModelSize, *, compiled: object, device: str) -> int:
    """Memory of torch's compiler in a trainer; 0 where it does not start. compiled: as the stage's setting says. On a
    CPU our own code takes most layers all the same."""
    shape = model.shape
    is_ours = device == "cpu" and cpu_layer_fits(
        width=shape.width, head_dim=shape.head_width, mlp_width=shape.mlp_width
    )
    return COMPILER if compiled and not is_ours else 0


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
        return (Process(name="agent", count=count, host={"process": PROGRAM}),)
    servers = {"environment": ENVIRONMENT, "openenv": ENVIRONMENT, "agent": AGENT}  # openenv's talks to its server
    if generate.is_one_turn or (generate.traits is not None and prefix not in servers):
        return ()
    name = "environment" if prefix == "openenv" else prefix if prefix in servers else "function"
    server = Process(name=name, host={"process": servers.get(prefix, FUNCTION)})
    return server, Process(name="episode", count=count, host={"process": EPISODE})


def verifiers_processes(rollouts: int) -> tuple[Process, ...]:
    """The process of a taskset with so many rollouts at once, and its server of tools."""
    held = {"process": VERIFIERS, "rollouts": int(rollouts * VERIFIERS_ROLLOUT)}
    return Process(name="verifiers", host=held), Process(name="verifiers' tools", host={"process": VERIFIERS})
