"""Work of an RL stage, and the time that it takes."""

from dataclasses import dataclass
from statistics import fmean

from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_evaluation import HELD_OUT
from nanodag.inference.number_formats import width_of
from nanodag.plan import cpu_work, host_memory
from nanodag.plan.case import Case
from nanodag.plan.cpu_work import CpuWork, core_of
from nanodag.plan.evaluation import items_of, prompt_of
from nanodag.plan.sampling import PlannedSamplers
from nanodag.plan.speeds import GPU_SHARES, RL_STEP_S, START_S, decoding_seconds, gpu_peak

STEP_S = 0.06
"""CPU-seconds of an RL step beside its tokens: ZeRO's optimizer step, new weights."""
SAMPLE_S = 1.5e-4
"""CPU-seconds of a sample beside its tokens: two messages, its reward, its record."""


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


def step_of(case: Case[RLStage]) -> Step:
    """A step's tokens, with answers as long as the habit says."""
    rollout, prompt = case.stage.rollout, mean_prompt(case)
    most, words = rollout.max_new_tokens, case.model.vocabulary
    answer = fmean(case.sizes.mean_answer(source.url, words, case.habit, most=most) for source in case.stage.data)
    is_chosen = bool(rollout.over_sampling) or not rollout.is_sampled
    is_filtered = any(entry.name == "nonzero_spread" for entry in rollout.filters) and not is_chosen
    groups = rollout.prompts_per_step * (case.spread if is_filtered else 1.0)
    samples = prompts_a_step(case.stage) * rollout.samples_per_prompt
    again = rollout.num_replayed if rollout.is_sampled else rollout.prompts_per_step  # groups that exist
    return Step(
        prompt=prompt,
        answer=answer,
        groups=groups,
        samples=samples,
        sampled=samples * answer,
        kept=(samples + again * rollout.samples_per_prompt) * answer,
        trained=groups * (prompt + rollout.samples_per_prompt * answer),
    )


def mean_prompt(case: Case[RLStage]) -> float:
    """Tokens of a prompt, on average over the sources."""
    return fmean(case.sizes.mean_prompt(source.url, case.model.vocabulary) for source in case.stage.data)


def prompts_a_step(stage: RLStage) -> int:
    """Prompts that a step asks."""
    rollout = stage.rollout
    return (rollout.over_sampling or rollout.num_fresh) if rollout.is_sampled else 0


def asked_at_once(stage: RLStage) -> int:
    """Held-out samples that one evaluation asks for."""
    evaluation = stage.evaluation
    has_held_out = evaluation.validation or any(source.held_out for source in stage.data)
    return evaluation.eval_prompts * evaluation.eval_samples if has_held_out else 0


@dataclass(frozen=True)
class _Evaluated:
    """Work of all evaluations of a stage. read, sampled: tokens of prompts, of answers."""

    answers: float
    read: float
    sampled: float


def _evaluated(case: Case[RLStage], step: Step) -> _Evaluated:
    evaluation, last, longest = case.stage.evaluation, case.stage.num_steps, case.stage.rollout.max_new_tokens

    def times(name: str) -> int:
        return sum(evaluation.is_time(name, number, num_steps=last) for number in range(last + 1))

    answers = float(times(HELD_OUT) * asked_at_once(case.stage))
    read, sampled = answers / evaluation.eval_samples * step.prompt, answers * step.answer
    for benchmark in evaluation.benchmarks:
        questions = times(benchmark.name) * items_of(benchmark, case.sizes)
        most = longest if benchmark.max_new_tokens == "auto" else benchmark.max_new_tokens
        answers += questions * benchmark.num_samples
        read += questions * prompt_of(benchmark, case)
        sampled += questions * benchmark.num_samples * step.answer / longest * most  # as much of its limit
    return _Evaluated(answers, read, sampled)


def seconds_of(case: Case[RLStage], samplers: PlannedSamplers, step: Step) -> tuple[float | None, float | None]:
    """Seconds by the clock, and of a CPU's cores. None where servers of others sample: nobody knows how fast they
    are."""
    stage, model, machine = case.stage, case.model, case.machine
    count = samplers.process.count if stage.has_samplers else 0
    if stage.has_samplers and not count:
        return None, None
    rollout, optimizer, evaluated = stage.rollout, stage.optimizer, _evaluated(case, step)
    sampled, trained = stage.num_steps * step.sampled + evaluated.sampled, stage.num_steps * step.trained
    trained *= optimizer.epochs_per_step if stage.has_trainer else 0
    if case.device == "cuda":
        return _gpu_seconds(case, samplers, step.length, trained=trained, sampled=sampled), None
    ranks, threads, cores = int(stage.resources.num_ranks), int(stage.resources.threads), machine.cores
    core, sampler = core_of(machine, str(optimizer.precision)), core_of(machine, str(stage.sampler.precision))
    training = core.training(model, trained, step.length, checkpointing=bool(optimizer.activation_checkpointing))
    if stage.algorithm.has_reference:
        training += core.reading(model, trained, step.length)
    updates = stage.num_steps * optimizer.updates_per_step * optimizer.epochs_per_step
    training += CpuWork(0.0, updates * ranks * STEP_S)
    cached = step.length * model.token_bytes(width_of(str(stage.sampler.precision)))
    read = stage.num_steps * prompts_a_step(stage) * step.prompt + evaluated.read
    decoding = sampler.decoding(model, sampled, cached_bytes=cached)
    decoding += CpuWork(0.0, sampler.reading(model, read, int(step.prompt), scored=0.0).total)
    handling = (stage.num_steps * step.samples + evaluated.answers) * SAMPLE_S
    compiler = host_memory.compiler(model, compiled=optimizer.compile, device="cpu")
    start = ranks * (host_memory.TRAINER_S + compiler.seconds) * stage.has_trainer
    start += count * host_memory.SAMPLER_S + host_memory.CONTROLLER_S
    start += case.sizes.in_memory(stage.data) / host_memory.PARSED_BYTES_S
    start += rollout.reward_processes * host_memory.REWARDS_S
    total = training.total + decoding.total + handling
    training_s = training.on(threads) / min(ranks, cores)
    decoding_s = decoding.total / max(1, min(count, cores)) + handling
    one_after_another = max(training_s, decoding_s) if rollout.max_staleness else training_s + decoding_s
    seconds = start / min(cores, 1 + ranks) + max(one_after_another, total / (cpu_work.OVERLAP * cores))
    return seconds, start + total


def _gpu_seconds(
    case: Case[RLStage], samplers: PlannedSamplers, length: int, *, trained: float, sampled: float
) -> float | None:
    """Sampling and training one after the other: where they run at the same time they share the device."""
    stage, model, count = case.stage, case.model, max(1, samplers.process.count)
    engine, width = str(stage.sampler.engine), width_of(str(stage.sampler.precision))
    peak = gpu_peak(case.machine, str(stage.optimizer.precision), ranks=int(stage.resources.num_ranks))
    decoding = decoding_seconds(
        machine=case.machine,
        engine=engine,
        samplers=count,
        tokens=sampled,
        weight_bytes=width * model.total,
        cache_bytes=length * model.token_bytes(width),
        flops_per_token=model.forward_flops(length),
        at_once=max(1, samplers.at_once // count),
    )
    if not peak or decoding is None:
        return None
    passes = 4 / 3 if stage.algorithm.has_reference else 1.0
    passes += 1 / 3 if stage.optimizer.activation_checkpointing else 0.0
    training = trained * passes * model.training_flops(length)
    return START_S + decoding + training / (GPU_SHARES[engine].trainer * peak) + stage.num_steps * RL_STEP_S
