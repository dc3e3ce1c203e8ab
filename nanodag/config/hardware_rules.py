"""Rules by which each `auto` of a stage that trains follows from a machine, with reasons and numbers."""

from dataclasses import dataclass

from nanodag.host.machine import GIB

LEAST_FLOPS_A_RANK = {"cpu": 2e10, "cuda": 1e13}  # of a step
MAX_CPU_RANKS = 16
FULL_TOKENS = {"cpu": 8192, "cuda": 32768}
LEAST_TOKENS = 8192  # of a micro-batch on a GPU
RL_TOKENS = {"cpu": 4096, "cuda": 16384}
RL_TOKENS_UNKNOWN = 9216
RL_CORES_A_RANK = 4
ROOM_IN_TURNS = 0.9  # of a GPU's room, for a trainer that samplers lend theirs: contexts and SGLang's graphs stay
LEAST_BF16_WIDTH = 256
PROCESS_BYTES = GIB
TRITON_CAPABILITY = 7.0


@dataclass(frozen=True)
class Rule:
    """Rule for an `auto`, as `nanodag config` says it, and its reason. setting: its name in a stage. limit: what the
    rule's text leaves room for, on a GPU."""

    setting: str
    rule: str
    reason: str
    limit: int = 0


# fmt: off
RULES = {
    "device": Rule("device", "GPUs where the machine has some",
         "One GPU computes as much as thousands of cores. `device=cpu` moves all stages at once."),
    "device_stage": Rule("resources.device", "the pipeline's `device`",
         "A stage may be sent elsewhere on its own."),
    "device_cpu": Rule("resources.device", "a stage of this kind multiplies no matrices",
         "A tokenizer, an import or a report would hold a GPU that another stage waits for."),
    "nodes": Rule("resources.nodes", "the machine's nodes, for stages that train",
         "This machine counts as one node; more are described by a text, or set with `cluster.hostfile`."),
    "ranks_cuda": Rule("resources.num_ranks", "all GPUs, as long as a step has 10 TFLOP for each",
         "Less is done in 20 ms at half of an H100's peak; then starting kernels and exchanging gradients take longer "
         "than computing. Reasoned, not measured."),
    "ranks_cpu": Rule("resources.num_ranks", "one a core, as long as a step has 20 GFLOP for each",
         "Measured on two cores: two ranks of one thread make 24,000 tokens a second, one rank of two threads 20,000, "
         "one thread 15,400: waking a thread costs as much as a small product. Beyond two cores it is reasoned: at "
         f"most {MAX_CPU_RANKS} ranks, as each holds the weights and packs its own rows, and at most a quarter of the "
         "cores idle."),
    "ranks_none": Rule("resources.num_ranks", "one process, as the kind has no ranks",
         "Only stages that train are spread."),
    "ranks_one": Rule("resources.num_ranks", "one rank with all threads, for a model of unknown size",
         "Each rank on a CPU would hold the whole model, and nobody knows how large that is."),
    "ranks_rl_cpu": Rule("resources.num_ranks", f"one for every {RL_CORES_A_RANK} cores",
         "RL's rows are long, so threads pay, and samplers of one thread each want cores too."),
    "ranks_given": Rule("resources.num_ranks", "nodes x gpus_per_node",
         "`gpus_per_node` was given."),
    "threads": Rule("resources.threads", "the cores, shared out to the ranks of a node",
         "More threads than cores take turns."),
    "precision": Rule("precision", "bf16 where the device multiplies it fast, else fp32",
         "GPUs from compute capability 8, AMX and AVX512-BF16 multiply it at least twice as fast. Others emulate it: "
         "AVX2 makes 5 GFLOP a CPU-second in bf16 and 60 in fp32."),
    "precision_evaluation": Rule("precision", "bf16 on a GPU that multiplies it fast, else fp32",
         "An evaluation on a CPU is short, so that scores without the rounding of bf16 cost little; on a GPU large "
         "models are scored in what they were trained in."),
    "precision_rl": Rule("optimizer.precision", f"fp32 on a CPU for a model narrower than {LEAST_BF16_WIDTH}",
         "In bf16 trainer and sampler differ by up to 0.3 nats a token, in fp32 by 0.01 (measured); so small a model "
         "trains in minutes either way."),
    "micro": Rule("micro_batch_tokens", "the most that divides a step and fits, at most {limit}",
         f"{FULL_TOKENS['cuda']:,} tokens fill any GPU, and {FULL_TOKENS['cpu']:,} any CPU; more only take memory. "
         "Reasoned from the sizes of products, not measured on a GPU.", limit=FULL_TOKENS["cuda"]),
    "checkpointing": Rule("activation_checkpointing",
         f"on a GPU where {LEAST_TOKENS:,} tokens, or a rank's whole step, do not fit without",
         "It costs a third of the time, and smaller micro-batches would leave a GPU idle for more than that."),
    "compile": Rule("compile", "wherever there is a compiler for the device",
         "Norms, rotations and gates become one pass over memory; Triton knows GPUs from capability 7."),
    "compile_rl": Rule("optimizer.compile", "on GPUs, and on CPUs in bf16",
         "On a CPU it helps bf16 by a quarter, and fp32 hardly (measured)."),
    "offload": Rule("resources.offload_optimizer",
         "cpu where the optimizer's states would take over half of the GPU's share, and it can be offloaded",
         "They are read once a step over PCIe, which costs less than micro-batches that are too small."),
    "micro_rl": Rule("optimizer.micro_batch_tokens",
         "the most that fits beside the samplers, at most {limit}, and a whole rollout",
         "Samplers have the share that `sampler.memory_fraction` says. A rollout cannot be cut.",
         limit=RL_TOKENS["cuda"]),
    "placement_beside": Rule("placement", "beside the trainer, each with its share of the memory",
         "Nobody waits for memory. GPUs of their own are never chosen: on half of the GPUs a rank holds twice the "
         "states. Reasoned, not measured."),
    "placement_shared": Rule("placement",
         "in turns, as beside the samplers the optimizer's states would have to stay in host memory",
         "Twice a step over PCIe for weights and states costs less than updating them on a CPU. Not measured."),
    "lends_states": Rule("lends_states", "on GPUs in turns with the samplers",
         "On a CPU the states would move from memory to memory."),
    "sampler_gpus": Rule("sampler.gpus",
         "the last half of the node's GPUs with placement: separate, else none of their own",
         "Which share pays depends on the lengths of prompts and answers; `seconds_trainer_waits` tells."),
    "micro_rl_unknown": Rule("optimizer.micro_batch_tokens",
         f"{RL_TOKENS_UNKNOWN:,}, or a whole rollout, for a model of unknown size",
         "What slime's scripts give one GPU for small models."),
}
# fmt: on


def reason_of(origin: str) -> str:
    """Reason of the rule in a value's origin; empty where no rule is."""
    reasons = (rule.reason for rule in RULES.values() if rule.rule.partition("{")[0] in origin)
    return next(reasons, "") if origin.startswith("derived: ") else ""
