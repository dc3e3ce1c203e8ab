"""Time of RL: the tokens of a step, all that is sampled, and what of it runs at the same time."""

import math
from dataclasses import dataclass
from statistics import fmean

from nanodag.config.footprint import lora_parameters
from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_sections import HELD_OUT
from nanodag.inference.number_formats import width_of
from nanodag.plan import speeds
from nanodag.plan.case import Case
from nanodag.plan.evaluation import PlannedSamplers, items_of, prompt_of
from nanodag.plan.speeds import Asked, overlapped_s, weights_s


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
    """A step's tokens, of prompts and answers of the mean lengths."""
    rollout, prompt = case.stage.rollout, mean_prompt(case)
    answer = case.inputs.answer_share * rollout.max_new_tokens
    is_chosen = bool(rollout.over_sampling) or not rollout.is_sampled
    is_filtered = any(entry.name == "nonzero_spread" for entry in rollout.filters) and not is_chosen
    groups = rollout.prompts_per_step * (_spread(case) if is_filtered else 1.0)
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
    return (rollout.over_sampling or rollout.num_fresh) if rollout.is_sampled else 0


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
    start = speeds.START_S[case.device] + case.sizes.in_memory(stage.data) / speeds.PARSED_BYTES_S
    ahead = stage.rollout.max_staleness - (stage.rollout.partial_rollouts == "correct")
    overlaps = stage.placement == "separate" and stage.has_trainer and ahead > 0
    both = overlapped_s(sampling, training, steps) if overlaps else sampling + training
    return start + both + steps * (speeds.RL_STEP_S[case.device] + _moving_s(case, samplers, lent))


def _training_s(case: Case[RLStage], step: Step) -> float | None:
    stage, optimizer, trainers = case.stage, case.stage.optimizer, case.trainers(str(case.stage.optimizer.precision))
    if not trainers.peak:
        return None
    trained = stage.num_steps * step.trained * (optimizer.epochs_per_step if stage.has_trainer else 0)
    passes = 4 / 3 if stage.algorithm.has_reference else 1.0
    passes += 1 / 3 if optimizer.activation_checkpointing else 0.0
    return trained * passes * case.model.training_flops(step.length) / (trainers.shares.trainer * trainers.peak)


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
    seconds = 2 * lent / speeds.PCIE_BYTES_S
    if stage.resources.offload_optimizer == "cpu":
        learned = lora_parameters(case.model.shape, stage.lora_rank) if stage.lora_rank else total
        updates = stage.optimizer.updates_per_step * stage.optimizer.epochs_per_step
        seconds += updates * learned / int(stage.resources.num_ranks) * speeds.HOST_ADAMW_S
    if stage.has_samplers:
        way = weights.sync_backend if weights.sync == "distributed" else weights.sync
        num_bytes = total * width_of(str(stage.optimizer.precision))
        seconds += weights_s(num_bytes, way, bucket_bytes=weights.sync_bucket_bytes, samplers=samplers.process.count)
    return seconds
