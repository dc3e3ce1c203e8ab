"""Plans RL: trainer ranks, samplers beside them, what else runs; and its time, by the tokens of a step, all that is
sampled, and what runs at the same time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

from nanodag.config.derive import state_of
from nanodag.config.footprint import lora_parameters, saved_bytes
from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_parts import RewardConfig
from nanodag.config.rl_sections import HELD_OUT
from nanodag.errors.words import size
from nanodag.inference.number_formats import width_of
from nanodag.plan import host_memory
from nanodag.plan.case import Case, Changed, Formula, changed
from nanodag.plan.evaluation import PlannedSamplers, items_of, planned_samplers, prompt_of
from nanodag.plan.host_memory import programs_of
from nanodag.plan.sizes import SIZES, Sizes, held_out_share
from nanodag.plan.speeds import SPEEDS, Asked, PlannedDevices, overlapped_s, weights_s
from nanodag.plan.stage_plan import Fault, Process, StagePlan
from nanodag.plan.supervised import artifact_bytes, held_to_train, loaded_bytes


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tokens of a step. prompt, answer: of one rollout, on average. groups: that are trained. samples, sampled: drawn.
    kept: of the answers in its files of rollouts. trained: that pass the trainer, a group's prompt once."""

    prompt: float
    answer: float
    groups: float
    samples: int
    sampled: float
    kept: float
    trained: float

    @property
    def length(self) -> int:
        return int(self.prompt + self.answer)


def samplers_of(case: Case[RLStage]) -> PlannedSamplers:
    """The stage's samplers, in numbers; servers that somebody else runs take nothing of this machine."""
    stage, sampler = case.stage, case.stage.sampler
    replicas = max(1, int(sampler.replicas))
    planned = planned_samplers(
        case,
        sampler,
        precision=str(sampler.precision),
        replicas=replicas,
        slots=-(-int(sampler.max_batch) // replicas),
        context=min(int(sampler.context), case.model.max_positions),
        memory_fraction=float(sampler.memory_fraction),
        used=mean_prompt(case) + stage.rollout.max_new_tokens,
    )
    return replace(planned, process=replace(planned.process, count=int(sampler.replicas)))


def planned_steps(stage: RLStage, sizes: Sizes) -> int | None:
    """Steps of the stage: num_steps, or num_epochs over its prompts; None where nobody knows how many these are."""
    if not stage.num_epochs:
        return stage.num_steps
    prompts = 0.0
    for source in stage.data:
        whole = sizes.of(source.url)
        if whole is None or whole.rows is None:
            return None
        prompts += whole.rows * (1 - held_out_share(source)) * (source.epochs or 1.0)
    return max(1, math.ceil(stage.num_epochs * prompts / stage.rollout.prompts_per_step))


def plan_rl(case: Case[RLStage]) -> StagePlan:
    steps = planned_steps(case.stage, case.sizes)
    if steps is None:
        return case.plan(notes=("how many prompts it has is not known yet",))
    if case.known_model is None:
        return case.plan(steps=steps, notes=("its model is not known yet",))
    case = replace(case, stage=case.stage.model_copy(update={"num_steps": steps}))
    stage, model, rollout, precision = case.stage, case.model, case.stage.rollout, str(case.stage.optimizer.precision)
    samplers, step = samplers_of(case), step_of(case)
    flops = steps * (step.trained * model.training_flops(step.length) + step.sampled * model.forward_flops(step.length))
    trainer, sampler = _by_placement(stage, _trainer(case), samplers.process)
    controller = {"process": host_memory.BYTES["controller"], "data": case.sizes.held_to_read(stage.data)}
    beside = (Process(name="controller", host=controller), _rewards(case))
    programs = programs_of(stage, max(step.samples, asked_at_once(stage)))
    files = int(steps * step.kept * SIZES["rollout_token_bytes"])
    return case.plan(
        parameters=model.total,
        tokens=int(steps * step.trained),
        steps=steps,
        flops=flops,
        read_bytes=int(steps * prompts_a_step(stage) * step.prompt * 4),
        processes=((trainer,) * stage.has_trainer + (sampler,) * stage.has_samplers + (*beside, *programs)),
        num_gpus=stage.num_gpus(case.machine.num_gpus) if case.device == "cuda" else 0,
        at_once=samplers.at_once,
        longest_prompt=min(int(stage.sampler.context), model.max_positions) - rollout.max_new_tokens,
        disk_bytes=_disk(case) + files,
        kept_bytes=artifact_bytes(stage, model) + files,
        seconds=seconds_of(case, samplers, step, lent=trainer.host.get("lent", 0)),
        share=case.trainers(precision).shares.trainer,
        notes=_notes(stage, step, programs),
    )


def _rewards(case: Case[RLStage]) -> Process:
    """The processes of rewards, each with the stage's reward models."""
    count = case.stage.rollout.reward_processes
    if not case.judges:
        return Process(name="rewards", count=count, host={"process": host_memory.BYTES["rewards"]})
    held = {"reward models": sum(4 * model.total for _, model in case.judges)}
    device = next((d for d in (_device_of(reward) for reward, _ in case.judges) if d == "cuda"), "cpu")
    return host_memory.computing(
        "rewards", device, held, cpu={"process": host_memory.BYTES["reward_model"]}, count=count
    )


def _device_of(reward: RewardConfig) -> str:
    return str(reward.options.get("device", "cpu")).partition(":")[0]


def _notes(stage: RLStage, step: Step, programs: Sequence[Process]) -> tuple[str, ...]:
    rollout = stage.rollout
    spread = f"{step.groups:.0f} of {rollout.prompts_per_step} groups a spread"
    notes = [f"responses are taken to have {step.answer:.0f} of {rollout.max_new_tokens} tokens, and {spread}"]
    if stage.has_samplers and not int(stage.sampler.replicas):
        notes.append("its time is not known, as servers of others alone sample: sampler.urls or urls_file")
    if programs:
        taken = ", ".join(f"{process.count} x {size(process.on_host)} of {process.name}" for process in programs)
        notes.append(f"{rollout.generate.name} is taken to hold {taken}; what your own code loads comes on top")
    return tuple(notes)


def _too_large(case: Case[RLStage]) -> tuple[str, object]:
    """The trainer's micro-batch, or the samplers' batch where nothing is trained."""
    if case.stage.has_trainer:
        return "optimizer.micro_batch_tokens", case.stage.optimizer.micro_batch_tokens
    return "sampler.max_batch", case.stage.sampler.max_batch


def _void(plan: StagePlan, case: Case[RLStage]) -> Iterator[Fault]:
    """Faults that would make results void: a batch smaller than asked, a prompt without room, answers that are cut."""
    if not plan.processes:
        return
    stage, sampler, rollout, samplers = case.stage, case.stage.sampler, case.stage.rollout, samplers_of(case)
    context, positions, batch = int(sampler.context), case.model.max_positions, int(sampler.max_batch)
    if samplers.at_once < min(batch, prompts_a_step(stage) * rollout.samples_per_prompt):
        why = f"samples at once, and the cache has room for {samplers.at_once}: {size(samplers.room)} a sampler, "
        why += f"{size(samplers.needed_bytes)} a sample of {context} tokens"
        mend = (f"sampler.max_batch={samplers.at_once}",) if samplers.at_once else ()
        yield Fault(setting="sampler.max_batch", found=str(batch), why=why, mend=mend)
    room = min(context, positions) - rollout.max_new_tokens
    prompts = [case.sizes.longest_prompt(source.url, case.model.vocabulary) or 0 for source in stage.data]
    if room < (needed := max(prompts, default=0)):
        why = f"leaves {room} tokens for a prompt, and the data has prompts of about {needed}"
        if needed + rollout.max_new_tokens <= positions:
            mend = (f"sampler.context={needed + rollout.max_new_tokens}",)
        else:
            mend = (f"rollout.max_new_tokens={max(1, positions - needed)}",)
        yield Fault(setting="sampler.context", found=str(context), why=why, mend=mend)


def _trainer(case: Case[RLStage]) -> Process:
    """One rank: policy, and where the algorithm has them reference, critic and teacher."""
    stage, model, optimizer, algorithm = case.stage, case.model, case.stage.optimizer, case.stage.algorithm
    ranks, whole = int(stage.resources.num_ranks), width_of(str(optimizer.precision)) * model.total
    asked = whole // ranks if optimizer.zero_stage == 3 else whole
    state, held = held_to_train(stage, model, int(optimizer.micro_batch_tokens) // optimizer.sequence_parallel)
    if algorithm.has_reference:
        held["reference"] = asked
    if algorithm.has_critic:
        held["critic"] = state_of(stage, model, num_ranks=ranks, is_critic=True).total
    if algorithm.teacher.model != "none":
        held["teacher"] = asked
    compiler = host_memory.compiler_bytes(model, compiled=optimizer.compile, device=case.device)
    return host_memory.computing(
        "trainer",
        case.device,
        held,
        cuda={"model": loaded_bytes(model, in_shares=optimizer.zero_stage == 3), "offloaded": state.host},
        cpu={"offloaded": state.host, "process": host_memory.BYTES["trainer"] + compiler},
        count=ranks // stage.resources.num_nodes,
    )


def _by_placement(stage: RLStage, trainer: Process, sampler: Process) -> tuple[Process, Process]:
    """Processes with what they keep while the other works, and GPUs that they have to themselves. Samplers on nodes of
    their own are planned as one node of them: their GPUs count beside, their host memory on a machine like this one."""
    if stage.resources.device == "cpu" or stage.placement == "beside":
        return trainer, sampler
    if stage.placement == "separate":
        count = sampler.count // max(1, stage.sampler.nodes)
        own = stage.own_gpus or count * sampler.gpus
        return replace(trainer, own_gpus=trainer.count), replace(sampler, count=count, own_gpus=own)
    # The sampler's graphs are not released, and CUDA's contexts stay.
    left = ("cuda", "graphs and activations")
    sampler = replace(sampler, resting=sum(sampler.device.get(name, 0) for name in left))
    names = ("weights", "gradients", "optimizer", "buffers", "reference", "critic", "teacher")
    states = {name: trainer.device[name] for name in names if name in trainer.device}
    if stage.lends_states is not True:
        return replace(trainer, resting=trainer.device["cuda"] + sum(states.values())), sampler
    # During a sync, before the sampler's cache is there, the trainer has its weights.
    host = {**trainer.host, "lent": sum(states.values()) - states["buffers"]}
    resting = trainer.device["cuda"] + max(0, states["weights"] - sampler.device["cache"])
    return replace(trainer, resting=resting, host=host), sampler


def _disk(case: Case[RLStage]) -> int:
    """Checkpoints, the artifact, and weights on their way where memory has no room for them."""
    stage, total = case.stage, case.model.total
    exported, copies = artifact_bytes(stage, case.model), 2 + stage.rollout.max_staleness
    weights = exported + copies * _sent_bytes(case)
    weights += (1 + copies) * exported if stage.best_metric else 0  # the best so far, and those without a score yet
    weights += exported * (stage.num_steps // stage.keep_weights_every) if stage.keep_weights_every else 0
    learned = lora_parameters(case.model.shape, stage.lora_rank) if stage.lora_rank else total
    checkpoint = saved_bytes(case.model.parameters, stage.optimizer_name, learned)
    return (stage.keep_checkpoints + 1) * checkpoint + weights


def _sent_bytes(case: Case[RLStage]) -> int:
    """Bytes of a sync: of the adapters, or of all weights."""
    stage, total = case.stage, case.model.total
    sent = lora_parameters(case.model.shape, stage.lora_rank) if stage.weights.lora_sync == "adapter" else total
    return sent * width_of(str(stage.optimizer.precision))


def _candidates(case: Case[RLStage]) -> Iterator[Changed]:
    """Changes of the trainer, from the smallest on; then a cache of half the size with each of them, and so on, as long
    as it holds a sample."""
    for of_sampler, smaller in _smaller_caches(case):
        for of_trainer, smallest in _smaller_trainers(smaller):
            yield (*of_sampler, *of_trainer), smallest


def _smaller_caches(case: Case[RLStage]) -> Iterator[Changed]:
    """The stage, then with samplers that decode fewer samples at once in a smaller cache."""
    yield (), case.stage
    cache_bytes = int(case.stage.sampler.cache_bytes) // 2
    while cache_bytes:
        updates = {"sampler.cache_bytes": cache_bytes}
        fitting = samplers_of(replace(case, stage=changed(case.stage, updates)[1])).at_once
        if not fitting:
            return
        yield changed(case.stage, updates | {"sampler.max_batch": min(fitting, int(case.stage.sampler.max_batch))})
        cache_bytes //= 2


def _smaller_trainers(stage: RLStage) -> Iterator[Changed]:
    """Smaller micro-batches that hold a rollout, then with checkpointing, then with optimizer states in host memory."""
    longest, most = int(stage.sampler.context), int(stage.optimizer.micro_batch_tokens)
    micros = [most] + [tokens for tokens in (1 << k for k in range(20, 3, -1)) if longest <= tokens < most]
    if longest < micros[-1]:
        micros.append(longest)
    offloads = ("none", "cpu") if stage.resources.device == "cuda" else ("none",)
    for offload, checkpointing, micro in product(offloads, (False, True), micros):
        updates = {"optimizer.micro_batch_tokens": micro, "optimizer.activation_checkpointing": checkpointing}
        yield changed(stage, updates | {"resources.offload_optimizer": offload})


def step_of(case: Case[RLStage]) -> Step:
    """A step's tokens, of prompts and answers of the mean lengths."""
    rollout, prompt = case.stage.rollout, mean_prompt(case)
    answer = case.inputs.answer_share * rollout.max_new_tokens
    is_chosen = bool(rollout.over_sampling) or not rollout.is_sampled
    is_filtered = any(entry.name == "nonzero_spread" for entry in rollout.filters) and not is_chosen
    groups = rollout.prompts_per_step * (_spread(case) if is_filtered else 1.0)
    samples = prompts_a_step(case.stage) * rollout.samples_per_prompt
    existing = 0 if rollout.is_sampled else rollout.prompts_per_step  # groups of files
    return Step(
        prompt=prompt,
        answer=answer,
        groups=groups,
        samples=samples,
        sampled=samples * answer,
        kept=(samples + existing * rollout.samples_per_prompt) * answer,
        trained=groups * (prompt + rollout.samples_per_prompt * answer),
    )


def _spread(case: Case[RLStage]) -> float:
    """Share of groups whose rewards differ; `auto` for n answers that are right or wrong: 1 - 2 C(2n, n) / 4^n, the
    mean over Jeffreys's prior of how often the model is right."""
    if (share := case.inputs.groups_with_spread) != "auto":
        return share
    size = case.stage.rollout.samples_per_prompt
    return 1 - 2 * math.comb(2 * size, size) / 4**size


def mean_prompt(case: Case[RLStage]) -> float:
    """Tokens of a prompt, on average over the sources."""
    return fmean(case.sizes.mean_prompt(source.url, case.model.vocabulary) for source in case.stage.data)


def prompts_a_step(stage: RLStage) -> int:
    """Prompts that a step asks."""
    rollout = stage.rollout
    return (rollout.over_sampling or rollout.prompts_per_step) if rollout.is_sampled else 0


def asked_at_once(stage: RLStage) -> int:
    """Held-out samples that one evaluation asks for."""
    return stage.evaluation.eval_prompts * stage.evaluation.eval_samples if HELD_OUT in stage.evaluated else 0


def asked_of(case: Case[RLStage], step: Step) -> tuple[list[Asked], float]:
    """All that a stage samples: its steps, held-out prompts and benchmarks; and the tokens of all their prompts."""
    stage, rollout, evaluation = case.stage, case.stage.rollout, case.stage.evaluation
    last, longest = stage.num_steps, rollout.max_new_tokens

    def times(name: str) -> int:
        return sum(evaluation.is_time(name, number, num_steps=last) for number in range(last + 1))

    most, lag = rollout.partial_rollout_tokens or longest, rollout.max_staleness * (rollout.order == "arrival")
    held_out, held_out_times = asked_at_once(stage), times(HELD_OUT)
    asked = [Asked(last, step.samples, step.answer, most, lag)] if step.samples else []
    asked += [Asked(held_out_times, held_out, step.answer, longest)] if held_out else []
    read = last * prompts_a_step(stage) * step.prompt
    read += held_out_times * held_out / evaluation.eval_samples * step.prompt
    for benchmark in evaluation.benchmarks:
        items, each = items_of(benchmark, case.sizes), times(benchmark.name)
        most = longest if benchmark.max_new_tokens == "auto" else benchmark.max_new_tokens
        asked.append(Asked(each, items * benchmark.num_samples, step.answer / longest * most, most))  # as much of it
        read += each * items * prompt_of(benchmark, case)
    return asked, read


def seconds_of(case: Case[RLStage], samplers: PlannedSamplers, step: Step, *, lent: int) -> float | None:
    """Seconds by the clock. Sampling and training are added up unless they overlap on devices apart: on the same one
    they share it. None where servers of others sample, or the GPU is not known. lent: bytes that a rank lends the
    samplers."""
    stage, steps = case.stage, case.stage.num_steps
    if (training := _training_s(case, step)) is None or (sampling := _sampling_s(case, samplers, step)) is None:
        return None
    if (judging := _judging_s(case, step)) is None:
        return None
    is_beside = case.device == "cuda" and all(_device_of(reward) == "cpu" for reward, _ in case.judges)
    sampling = max(sampling, judging) if is_beside else sampling + judging
    start = SPEEDS["start"][case.device] + case.sizes.in_memory(stage.data) / SPEEDS["parsed_bytes"]
    ahead = stage.rollout.max_staleness - (stage.rollout.partial_rollouts == "correct")
    overlaps = stage.placement == "separate" and stage.has_trainer and ahead > 0
    both = overlapped_s(sampling, training, steps) if overlaps else sampling + training
    return start + both + steps * (SPEEDS["rl_step"][case.device] + _moving_s(case, samplers, lent))


def _training_s(case: Case[RLStage], step: Step) -> float | None:
    stage, optimizer, trainers = case.stage, case.stage.optimizer, case.trainers(str(case.stage.optimizer.precision))
    if not trainers.peak:
        return None
    trained = stage.num_steps * step.trained * (optimizer.epochs_per_step if stage.has_trainer else 0)
    passes = 4 / 3 if stage.algorithm.has_reference else 1.0
    passes += 1 / 3 if optimizer.activation_checkpointing else 0.0
    return trained * passes * case.model.training_flops(step.length) / (trainers.shares.trainer * trainers.peak)


def _judging_s(case: Case[RLStage], step: Step) -> float | None:
    """Seconds in which reward models score what is sampled, a group's prompt once; None where a GPU is not known."""
    rollout, seconds = case.stage.rollout, 0.0
    tokens = case.stage.num_steps * (step.sampled + prompts_a_step(case.stage) * step.prompt)
    for reward, model in case.judges:
        count = rollout.reward_processes * int(reward.options.get("threads", 1))
        devices = PlannedDevices(machine=case.machine, device=_device_of(reward), precision="fp32", count=count)
        if not devices.peak:
            return None
        seconds += tokens * model.forward_flops(step.length) / (devices.shares.likelihood * devices.peak)
    return seconds


def _sampling_s(case: Case[RLStage], samplers: PlannedSamplers, step: Step) -> float | None:
    stage, model, count = case.stage, case.model, samplers.process.count
    if not stage.has_samplers:
        return 0.0
    if not count:
        return None
    sampler, (asked, read) = stage.sampler, asked_of(case, step)
    devices = case.devices(str(sampler.precision), count, str(sampler.engine), gpus_each=sampler.tensor_parallel)
    decoding = devices.decoding_s(model, asked, context=step.length, at_once=max(1, samplers.at_once // count))
    reading = read * model.forward_flops(step.length) / (devices.shares.likelihood * devices.peak)
    return None if decoding is None else decoding + reading


def _moving_s(case: Case[RLStage], samplers: PlannedSamplers, lent: int) -> float:
    """Seconds a step for weights on their way, and for states that go to the host and back; on a CPU not counted."""
    stage, weights, total = case.stage, case.stage.weights, case.model.total
    if case.device == "cpu" or not stage.has_trainer:
        return 0.0
    seconds = 2 * lent / SPEEDS["pcie_bytes"]
    if stage.resources.offload_optimizer == "cpu":
        learned = lora_parameters(case.model.shape, stage.lora_rank) if stage.lora_rank else total
        updates = stage.optimizer.updates_per_step * stage.optimizer.epochs_per_step
        seconds += updates * learned / int(stage.resources.num_ranks) * SPEEDS["host_adamw"]
    if stage.has_samplers:
        way = weights.sync_backend if weights.sync == "distributed" else weights.sync
        num_bytes = _sent_bytes(case)
        seconds += weights_s(num_bytes, way, bucket_bytes=weights.sync_bucket_bytes, samplers=samplers.process.count)
    return seconds


RL = Formula(plan_rl, _void, _too_large, _candidates)
SELECT = replace(RL, prepared=lambda case: replace(case, stage=case.stage.as_rl()))
