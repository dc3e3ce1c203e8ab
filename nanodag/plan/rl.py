"""Plans RL: trainer ranks, samplers beside them, and the time that either takes."""

from collections.abc import Iterator

from nanodag.config.footprint import (
    CUDA_BYTES,
    TrainState,
    activations,
    head_memory,
    lora_parameters,
    train_state,
    width_of,
    working,
)
from nanodag.config.kinds.rl import RLStage
from nanodag.config.model_size import ModelSize
from nanodag.config.stage_base import StageBase
from nanodag.errors.words import size
from nanodag.host.machine import Machine
from nanodag.inference.cache_size import cache_precision
from nanodag.plan import processes
from nanodag.plan.memory import Candidate, memory_faults
from nanodag.plan.sampling import Samplers, embedded_samplers, sglang_samplers
from nanodag.plan.sizes import downloaded, in_memory, longest_prompt, mean_prompt
from nanodag.plan.speeds import START_S, decoding_seconds, peak_of, shares_of
from nanodag.plan.stage_plan import Fault, Process, StagePlan
from nanodag.plan.supervised import artifact_bytes

ANSWER_SHARE = 0.5
"""Of max_new_tokens, that responses take on average."""
KEPT_GROUPS = 0.7
"""Of the groups of a step, that filters leave where no others were sampled in their place."""
STEP_S = {"cpu": 0.05, "cuda": 2.0}
"""Of an RL step, beside sampling and training: rewards, new weights."""
TOKEN_BYTES_ON_DISK = 30
"""Of a sampled token in the rollout files."""


def samplers_of(stage: RLStage, model: ModelSize, machine: Machine) -> Samplers:
    """The stage's samplers, in numbers."""
    sampler, device, precision = stage.sampler, str(stage.resources.device), str(stage.sampler.precision)
    replicas = int(sampler.replicas)
    context = min(int(sampler.context), model.max_positions)
    if sampler.engine == "sglang":
        return sglang_samplers(
            model,
            machine,
            precision=precision,
            device=device,
            replicas=replicas,
            tensor_parallel=sampler.tensor_parallel,
            max_batch=int(sampler.max_batch),
            context=context,
            memory_fraction=float(sampler.memory_fraction),
            cache_bytes=int(sampler.cache_bytes),
        )
    return embedded_samplers(
        model,
        precision=precision,
        device=device,
        replicas=replicas,
        max_batch=int(sampler.max_batch),
        context=context,
        cache_bytes=int(sampler.cache_bytes),
    )


def plan_rl(name: str, stage: RLStage, model: ModelSize | None, machine: Machine) -> StagePlan:
    """The plan of an RL stage. model: None where its size is not known."""
    device, rollout = str(stage.resources.device), stage.rollout
    if model is None:
        return StagePlan(
            name=name, kind=stage.kind, device=device, steps=stage.num_steps, notes=("its model is not known yet",)
        )
    samplers = samplers_of(stage, model, machine)
    prompt, answer = _prompt(stage, model), ANSWER_SHARE * rollout.max_new_tokens
    groups = rollout.prompts_per_step * (KEPT_GROUPS if rollout.filters and not rollout.over_sampling else 1.0)
    trained = groups * (prompt + rollout.samples_per_prompt * answer)
    sampled = _sampled_a_step(stage) * rollout.samples_per_prompt * answer
    flops = stage.num_steps * (
        trained * model.training_flops(int(prompt + answer)) + sampled * model.forward_flops(int(prompt + answer))
    )
    trainer = _trainer(stage, model)
    beside = [Process(name="controller", host={"process": processes.CONTROLLER})]
    beside.append(Process(name="rewards", count=rollout.reward_processes, host={"process": processes.REWARDS}))
    read = int(stage.num_steps * _sampled_a_step(stage) * prompt * 4)
    return StagePlan(
        name=name,
        kind=stage.kind,
        device=device,
        parameters=model.total,
        tokens=int(stage.num_steps * trained),
        steps=stage.num_steps,
        flops=flops,
        read_bytes=read,
        download_bytes=downloaded(stage.data, read),
        processes=(trainer, samplers.process, *beside),
        num_gpus=_num_gpus(stage, samplers, machine) if device == "cuda" else 0,
        at_once=samplers.at_once,
        longest_prompt=min(int(stage.sampler.context), model.max_positions) - rollout.max_new_tokens,
        disk_bytes=_disk(stage, model) + _rollouts(stage, sampled),
        kept_bytes=artifact_bytes(model, str(stage.optimizer.precision)) + _rollouts(stage, sampled),
        seconds=_seconds(stage, model, machine, samplers, trained=trained, sampled=sampled, length=prompt + answer),
        start_seconds=START_S[device],
        share=shares_of(machine, device, str(stage.optimizer.precision), str(stage.sampler.engine)).trainer,
        notes=(f"responses are taken to have {answer:.0f} of {rollout.max_new_tokens} tokens",),
    )


def faults_of_rl(plan: StagePlan, stage: RLStage, model: ModelSize | None, machine: Machine) -> list[Fault]:
    """What does not fit, and what would make the stage's results void."""
    if model is None:
        return []

    def rebuilt(changed: StageBase) -> StagePlan:
        assert isinstance(changed, RLStage)
        return plan_rl(plan.name, changed, model, machine)

    faults = memory_faults(
        plan,
        machine,
        setting="optimizer.micro_batch_tokens",
        found=stage.optimizer.micro_batch_tokens,
        candidates=_candidates(stage),
        rebuilt=rebuilt,
    )
    return [*faults, *_void(stage, model, machine)]


def _void(stage: RLStage, model: ModelSize, machine: Machine) -> Iterator[Fault]:
    """A batch smaller than asked, a prompt without room, an answer that cannot be as long as is asked."""
    sampler, rollout, samplers = stage.sampler, stage.rollout, samplers_of(stage, model, machine)
    context, wanted = int(sampler.context), int(sampler.max_batch)
    if samplers.at_once < min(wanted, _sampled_a_step(stage) * rollout.samples_per_prompt):
        why = f"samples at once, and the cache has room for {samplers.at_once}: {size(samplers.room)} a sampler, "
        why += f"{size(samplers.needed_bytes)} a sample of {context} tokens"
        yield Fault(setting="sampler.max_batch", found=str(wanted), why=why, mend=_smaller(samplers))
    room = min(context, model.max_positions) - rollout.max_new_tokens
    needed = max((longest_prompt(source.url, model.vocabulary) or 0 for source in stage.data), default=0)
    if room < needed:
        why = f"leaves {room} tokens for a prompt, and the data has prompts of about {needed}"
        if needed + rollout.max_new_tokens <= model.max_positions:
            mend = (f"sampler.context={needed + rollout.max_new_tokens}",)
        else:
            mend = (f"rollout.max_new_tokens={max(1, model.max_positions - needed)}",)
        yield Fault(setting="sampler.context", found=str(context), why=why, mend=mend)


def _smaller(samplers: Samplers) -> tuple[str, ...]:
    return (f"sampler.max_batch={samplers.at_once}",) if samplers.at_once else ()


def _num_gpus(stage: RLStage, samplers: Samplers, machine: Machine) -> int:
    """That it takes of a node; embedded samplers do with fewer than they are."""
    ranks = int(stage.resources.num_ranks) // stage.resources.num_nodes
    gpus = samplers.process.count * samplers.process.gpus
    return max(ranks, gpus if stage.sampler.engine == "sglang" else min(gpus, machine.num_gpus))


def _sampled_a_step(stage: RLStage) -> int:
    return stage.rollout.over_sampling or stage.rollout.prompts_per_step


def _prompt(stage: RLStage, model: ModelSize) -> float:
    means = [mean_prompt(source.url, model.vocabulary) for source in stage.data]
    return sum(means) / max(1, len(means))


def _trainer(stage: RLStage, model: ModelSize) -> Process:
    """One rank: policy, and where the algorithm has them reference, critic and teacher."""
    resources, optimizer, algorithm = stage.resources, stage.optimizer, stage.algorithm
    device, precision, shape = str(resources.device), str(optimizer.precision), model.shape
    ranks, micro = int(resources.num_ranks), int(optimizer.micro_batch_tokens) // optimizer.sequence_parallel
    trained = lora_parameters(shape, optimizer.lora_rank) if optimizer.lora_rank else None

    def state_of(trained: int | None = None) -> TrainState:
        return train_state(
            model.parameters,
            precision=precision,
            zero_stage=optimizer.zero_stage,
            num_ranks=ranks,
            device=device,
            offload_optimizer=resources.offload_optimizer == "cpu",
            offload_param=resources.offload_param == "cpu",
            trained=trained,
        )

    state = state_of(trained)
    checkpointing = bool(optimizer.activation_checkpointing)
    kept = activations(shape, micro, precision=precision, checkpointing=checkpointing)
    whole = width_of(precision) * model.total
    held = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "buffers": state.buffers,
        "activations": kept + working(shape, micro, precision),
        "logits": head_memory(shape, model.vocabulary, micro, precision=precision, device=device, scored=True),
    }
    if algorithm.has_reference:
        held["reference"] = whole
    if algorithm.has_critic:
        held["critic"] = state_of().total
    if algorithm.teacher.model != "none":
        held["teacher"] = whole
    compiler = processes.COMPILER if optimizer.compile else 0
    base = {"process": processes.TRAINER + compiler, "data": int(processes.PARSED * in_memory(stage.data))}
    count = ranks // resources.num_nodes
    if device == "cuda":
        host = {"process": processes.CUDA, "model": 4 * model.total, "offloaded": state.host}
        return Process(name="trainer", count=count, device={**held, "cuda": CUDA_BYTES}, host=host, gpus=1)
    return Process(name="trainer", count=count, host={**held, "offloaded": state.host, **base})


def _disk(stage: RLStage, model: ModelSize) -> int:
    """Checkpoints, the artifact, and weights on their way where memory has no room for them."""
    precision, copies = str(stage.optimizer.precision), 2 + stage.rollout.max_staleness
    weights = artifact_bytes(model, precision) + copies * width_of(precision) * model.total
    return (stage.keep_checkpoints + 1) * 12 * model.total + weights


def _rollouts(stage: RLStage, sampled: float) -> int:
    """The files of rollouts. sampled: tokens a step."""
    return int(stage.num_steps * sampled * TOKEN_BYTES_ON_DISK)


def _seconds(
    stage: RLStage,
    model: ModelSize,
    machine: Machine,
    samplers: Samplers,
    *,
    trained: float,
    sampled: float,
    length: float,
) -> float | None:
    """Sampling and training one after the other: where they run at the same time they share the device."""
    resources, device = stage.resources, str(stage.resources.device)
    precision, engine = str(stage.optimizer.precision), str(stage.sampler.engine)
    ranks = int(resources.num_ranks)
    peak = peak_of(machine, device, precision, ranks=ranks, threads=int(resources.threads))
    evaluations = stage.num_steps // stage.evaluation.eval_every + 1 if stage.evaluation.validation else 0
    evaluated = evaluations * stage.evaluation.eval_prompts * ANSWER_SHARE * stage.rollout.max_new_tokens
    cached = str(stage.sampler.precision)
    if engine == "embedded":
        cached = cache_precision(cached, device)
    decoding = decoding_seconds(
        machine=machine,
        device=device,
        precision=str(stage.sampler.precision),
        engine=engine,
        samplers=samplers.process.count,
        threads=max(1, int(resources.threads) // samplers.process.count),
        tokens=stage.num_steps * sampled + evaluated,
        weight_bytes=width_of(str(stage.sampler.precision)) * model.total,
        cache_bytes=length * model.token_bytes(width_of(cached)),
        flops_per_token=model.forward_flops(int(length)),
        at_once=max(1, samplers.at_once // samplers.process.count),
    )
    if not peak or decoding is None:
        return None
    passes = 4 / 3 if stage.algorithm.has_reference else 1.0
    passes += 1 / 3 if stage.optimizer.activation_checkpointing else 0.0
    passes *= stage.optimizer.epochs_per_step
    training = stage.num_steps * trained * passes * model.training_flops(int(length))
    share = shares_of(machine, device, precision, engine).trainer
    return START_S[device] + decoding + training / (share * peak) + stage.num_steps * STEP_S[device]


def _candidates(stage: RLStage) -> Iterator[Candidate]:
    """Smaller micro-batches that hold a rollout, then with checkpointing, then with the optimizer's states in host
    memory."""
    longest, given = int(stage.sampler.context), int(stage.optimizer.micro_batch_tokens)
    micros = [given] + [tokens for tokens in (1 << k for k in range(20, 3, -1)) if longest <= tokens < given]
    if longest < micros[-1]:
        micros.append(longest)
    offloads = ("none", "cpu") if stage.resources.device == "cuda" else ("none",)
    for offload in offloads:
        for checkpointing in (False, True):
            for micro in micros:
                optimizer: dict[str, int | bool] = {
                    "micro_batch_tokens": micro,
                    "activation_checkpointing": checkpointing,
                }
                said: dict[str, object] = {
                    f"optimizer.{n}": v for n, v in optimizer.items() if getattr(stage.optimizer, n) != v
                }
                if stage.resources.offload_optimizer != offload:
                    said["resources.offload_optimizer"] = offload
                changed = stage.model_copy(
                    update={
                        "optimizer": stage.optimizer.model_copy(update=optimizer),
                        "resources": stage.resources.model_copy(update={"offload_optimizer": offload}),
                    }
                )
                yield tuple(f"{name}={str(value).lower()}" for name, value in said.items()), changed
