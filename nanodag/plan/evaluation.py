"""Plans evaluation: likelihoods by the model that is trained, written answers by samplers; and samplers of RL too."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from nanodag.config.derive_sampler import REPLICA_FLOPS, SGLANG_STATIC, SHARE_IN_EVALUATION, SHARE_OF_HOST
from nanodag.config.footprint import MAX_LOGITS, embedded_buffers
from nanodag.config.kinds.evaluation import BenchmarkConfig, EvalSamplerConfig, EvalStage
from nanodag.config.model_size import ModelSize
from nanodag.config.rl_parts import SamplerConfig
from nanodag.evaluation.forms import is_written
from nanodag.inference.cache_size import slot_tokens
from nanodag.inference.number_formats import width_of
from nanodag.plan import host_memory
from nanodag.plan.case import Case, Changed, Formula, S, changed
from nanodag.plan.host_memory import verifiers_processes
from nanodag.plan.sizes import SIZES, Sizes, bytes_per_token, core_items, core_tokens, held_out_share
from nanodag.plan.speeds import SPEEDS, Asked
from nanodag.plan.stage_plan import Fault, Process, StagePlan


@dataclass(frozen=True, kw_only=True)
class PlannedSamplers:
    """at_once: samples that all of them decode together. needed_bytes: of cache, for one sample of the context; room:
    of one sampler's cache. process: one of them."""

    at_once: int
    needed_bytes: int
    room: int
    process: Process


def planned_samplers(
    case: Case[S],
    sampler: SamplerConfig | EvalSamplerConfig,
    *,
    precision: str,
    replicas: int,
    slots: int,
    context: int,
    memory_fraction: float,
    used: float,
) -> PlannedSamplers:
    """Samplers of any engine. slots: samples that one of them may decode at once.

    An embedded one has a slot of the whole context for each sample. used: tokens of it that samples fill as a rule: on
    a CPU, pages of the cache that nothing was written to are never taken. RL's takes new weights beside those it has.
    The others share their cache out by the token; vLLM's new weights are beside those it has, too. Beside weights and
    cache they have graphs and activations, for which memory_fraction, of the GPU or the host's memory, leaves room.
    """
    model, machine, device = case.model, case.machine, case.device
    width, parallel = width_of(precision), sampler.tensor_parallel
    token, room = model.token_bytes(width), int(sampler.cache_bytes) // parallel
    if sampler.engine != "embedded":
        needed = context * token // parallel
        slots = max(0, min(slots, room // needed))
        whole = machine.gpu.memory if device == "cuda" and machine.gpu is not None else machine.memory
        share = int(memory_fraction * whole)
        held = {
            "weights": width * model.total * (2 if sampler.engine == "vllm" else 1) // parallel,
            "cache": room,
            "graphs and activations": share - int(SGLANG_STATIC * share),
        }
        filled = room
    else:
        tokens = slot_tokens(context)
        needed = tokens * token
        slots = min(slots, room // needed)
        held = {
            "weights": (2 if isinstance(sampler, SamplerConfig) else 1) * width * model.total,
            "logits and buffers": embedded_buffers(model.shape, model.vocabulary, slots, tokens),
            "cache": slots * needed,
        }
        filled = slots * min(needed, slot_tokens(math.ceil(used)) * token)
    cpu = {"cache": filled, "process": host_memory.BYTES["sampler"]}
    process = host_memory.computing(
        "sampler", device, held, cpu=cpu, count=replicas, gpus=parallel, reserve=held["cache"] - filled
    )
    return PlannedSamplers(at_once=slots * replicas, needed_bytes=needed, room=room, process=process)


def _widest(case: Case[EvalStage]) -> tuple[int, int, str]:
    """Tokens of the longest prompt and answer together of a written benchmark, and its name; empty without one."""
    widest = (0, 0, "")
    for benchmark in filter(is_written, case.stage.benchmarks):
        url = _url_of(benchmark)
        known = case.sizes.longest_prompt(url, case.model.vocabulary) if url else None
        prompt, answer = (known or SIZES["prompt_room"]) * (1 + benchmark.num_fewshot), int(benchmark.max_new_tokens)
        if prompt + answer > sum(widest[:2]):
            widest = (prompt, answer, benchmark.name)
    return widest


def samplers_of(case: Case[EvalStage]) -> PlannedSamplers | None:
    """The samplers that write answers; None where there is nothing to write. As many embedded ones start as are worth
    it where no answer ends before its last token."""
    stage, sampler, model = case.stage, case.stage.sampler, case.model
    if not (written := list(filter(is_written, stage.benchmarks))):
        return None
    lengths = [int(benchmark.max_new_tokens) + prompt_of(benchmark, case) for benchmark in written]
    replicas = int(sampler.replicas)
    if sampler.engine == "embedded":
        answers = [items_of(benchmark, case.sizes) * benchmark.num_samples for benchmark in written]
        most = max(number * length for number, length in zip(answers, lengths, strict=True))
        replicas = max(1, min(replicas, int(most * model.forward_flops(0) / REPLICA_FLOPS)))
    return planned_samplers(
        case,
        sampler,
        precision=str(stage.precision),
        replicas=replicas,
        slots=int(sampler.max_batch),
        context=min(sum(_widest(case)[:2]), model.max_positions),
        memory_fraction=SHARE_IN_EVALUATION if case.device == "cuda" else SHARE_OF_HOST,
        used=max(lengths),
    )


def scoring_gpus(stage: EvalStage) -> int:
    """GPUs that hold the model that scores likelihoods: all that the stage gets; none where all answers are written, as
    it is loaded when a benchmark first asks it."""
    is_scored = not all(map(is_written, stage.benchmarks))
    return int(stage.sampler.replicas) * stage.sampler.tensor_parallel if is_scored else 0


def plan_evaluation(case: Case[EvalStage]) -> StagePlan:
    stage, is_on_gpu = case.stage, case.device == "cuda"
    read = sum(int(items_of(b, case.sizes) * _row_bytes(b, case.sizes)) for b in stage.benchmarks)
    if case.known_model is None:
        return case.plan(read_bytes=read, notes=("it is served" if stage.is_served else "its model is not known yet",))
    model, samplers, (read_tokens, asked) = case.model, samplers_of(case), _tokens(case)
    tokens = read_tokens + sum(each.samples * each.answer for each in asked)
    gpus = max(scoring_gpus(stage), samplers.process.count * samplers.process.gpus if samplers else 0)
    on_disk = int(4 * read) + host_memory.MB
    return case.plan(
        parameters=model.total,
        tokens=int(tokens),
        flops=tokens * model.forward_flops(_context(model)),
        read_bytes=read,
        processes=_processes(case, samplers),
        num_gpus=max(1, gpus) if is_on_gpu else 0,
        at_once=samplers.at_once if samplers else None,
        longest_prompt=model.max_positions - max(int(b.max_new_tokens) for b in stage.benchmarks) if samplers else None,
        disk_bytes=on_disk,
        kept_bytes=on_disk,
        seconds=_seconds(case, samplers, read_tokens, asked, gpus=max(1, gpus)),
        share=case.devices(str(stage.precision), 1).shares.likelihood,
    )


def _too_large(case: Case[EvalStage]) -> tuple[str, object]:
    """The samplers' cache, or what is scored at once where there is nothing to write."""
    if samplers_of(case) is not None:
        return "sampler.cache_bytes", case.stage.sampler.cache_bytes
    return "micro_batch_tokens", case.stage.micro_batch_tokens


def _void(plan: StagePlan, case: Case[EvalStage]) -> Iterator[Fault]:
    """Faults that would make results void: cut answers, prompts without room, a cache too small for one sample."""
    if not plan.processes or (samplers := samplers_of(case)) is None:
        return
    positions, (prompt, answer, name) = case.model.max_positions, _widest(case)
    if prompt + answer > positions:
        room = positions - prompt
        why = f"tokens and a prompt of about {prompt} are more than the model's {positions} positions: items of {name} "
        why += "would not be asked"
        mend = (f"max_new_tokens={room}",) if room > 0 and answer == case.stage.max_new_tokens else ()
        yield Fault(setting="max_new_tokens", found=str(answer), why=why, mend=mend)
    if not samplers.at_once:
        why = f"bytes hold no sample of {prompt + answer} tokens, which takes {samplers.needed_bytes}"
        mend = (f"sampler.cache_bytes={samplers.needed_bytes}",)
        yield Fault(setting="sampler.cache_bytes", found=str(samplers.room), why=why, mend=mend)


def _candidates(case: Case[EvalStage]) -> Iterator[Changed]:
    """Smaller caches that hold a sample; then with one sampler; then in bf16 where the machine multiplies it fast."""
    stage = case.stage
    fast = ("bf16",) if case.machine.multiplies_bf16_fast(case.device) else ()
    precisions, counts = dict.fromkeys((str(stage.precision), *fast)), dict.fromkeys((int(stage.sampler.replicas), 1))
    for precision, replicas in product(precisions, counts):
        cache_bytes = int(stage.sampler.cache_bytes)
        while True:
            values = {"sampler.cache_bytes": cache_bytes, "sampler.replicas": replicas, "precision": precision}
            candidate = changed(stage, values)
            yield candidate
            samplers = samplers_of(replace(case, stage=candidate[1]))
            cache_bytes //= 2
            if samplers is None or cache_bytes < samplers.needed_bytes:
                break


def _url_of(benchmark: BenchmarkConfig) -> str:
    return benchmark.source.url if benchmark.source is not None else ""


def items_of(benchmark: BenchmarkConfig, sizes: Sizes) -> int:
    """Items that are asked, or a guess where that is not known."""
    if benchmark.is_core:
        return core_items(benchmark.limit)
    source, rows = benchmark.source, SIZES["unknown_items"]
    if source is not None:
        size = sizes.of(source.url)
        rows = size.rows if size is not None and size.rows is not None else rows
        rows = int(rows * (held_out_share(source) or 1))
    return min(rows, benchmark.limit or rows)


def prompt_of(benchmark: BenchmarkConfig, case: Case[S]) -> float:
    """Tokens of a written benchmark's prompt on average, with its worked examples."""
    url = _url_of(benchmark)
    return (1 + benchmark.num_fewshot) * (
        case.sizes.mean_prompt(url, case.model.vocabulary) if url else SIZES["prompt_room"]
    )


def _row_bytes(benchmark: BenchmarkConfig, sizes: Sizes) -> float:
    if benchmark.is_core:
        return SIZES["core_record_bytes"]
    size = sizes.of(benchmark.source.url) if benchmark.source is not None else None
    return size.row_bytes if size is not None else SIZES["unknown_bytes"]


def _tokens(case: Case[EvalStage]) -> tuple[float, list[Asked]]:
    """Tokens of all items that are read, to be scored by likelihood or as prompts; and the answers that are written."""
    asked: list[Asked] = []
    scored, words = 0.0, case.model.vocabulary
    for benchmark in case.stage.benchmarks:
        items, longest = items_of(benchmark, case.sizes), int(benchmark.max_new_tokens)
        if benchmark.is_core:
            scored += core_tokens(benchmark.limit, words)
        elif is_written(benchmark):
            scored += items * prompt_of(benchmark, case)
            asked.append(Asked(1, items * benchmark.num_samples, case.inputs.answer_share * longest, longest))
        else:
            is_cut = "continuation" in (benchmark.form, benchmark.name)
            text = SIZES["continuation_bytes"] if is_cut else _row_bytes(benchmark, case.sizes)
            scored += items * (1 + benchmark.num_fewshot) * text / bytes_per_token(words)
    return scored, asked


def _processes(case: Case[EvalStage], samplers: PlannedSamplers | None) -> tuple[Process, ...]:
    """The worker, with the model where one scores or it is on a CPU. There a single sampler is in its process, several
    are processes beside it. And verifiers' own where a benchmark asks it."""
    stage, model, wide = case.stage, case.model, width_of(str(case.stage.precision))
    scored, shape = int(stage.micro_batch_tokens), case.model.shape
    held = {
        "weights": wide * model.total,
        "activations": scored * wide * (6 * shape.width + 3 * shape.mlp_width) + scored * 512,
        "logits": min(MAX_LOGITS[case.device], scored * model.vocabulary // 4) * (wide + 4),
    }
    sources = [b.source for b in stage.benchmarks if b.source is not None]
    data = int(host_memory.PARSED * case.sizes.in_memory(sources))
    cpu = {"process": host_memory.BYTES["evaluation"], "data": data}
    beside: tuple[Process, ...] = () if samplers is None else (samplers.process,)
    reserve = 0
    is_inside = case.device == "cpu" and stage.sampler.engine == "embedded"
    if samplers is not None and is_inside and samplers.process.count == 1:
        beside, reserve = (), samplers.process.reserve
        cpu |= {f"sampler's {name}": num for name, num in samplers.process.host.items() if name != "process"}
    gpus = scoring_gpus(stage)
    if case.device == "cuda" and not gpus:
        worker = Process(name="worker", host={"process": host_memory.BYTES["evaluation"], "data": data})
    else:
        cuda = {"model": 4 * model.total, "data": data}
        worker = host_memory.computing("worker", case.device, held, cuda=cuda, cpu=cpu, gpus=gpus, reserve=reserve)
    if samplers is not None and any(source.url.startswith("verifiers:") for source in sources):
        beside += verifiers_processes(samplers.process.count * int(stage.sampler.max_batch))
    return worker, *beside


def _context(model: ModelSize) -> int:
    return min(SIZES["context"], model.max_positions // 2)


def _seconds(
    case: Case[EvalStage], samplers: PlannedSamplers | None, read: float, asked: Sequence[Asked], *, gpus: int
) -> float | None:
    stage, model, is_on_gpu = case.stage, case.model, case.device == "cuda"
    precision, engine = str(stage.precision), str(stage.sampler.engine)
    devices = case.devices(precision, gpus if is_on_gpu else int(stage.resources.threads), engine)
    if not devices.peak:
        return None
    rate = devices.shares.likelihood * devices.peak
    sources = [b.source for b in stage.benchmarks if b.source is not None]
    context = _context(model)
    seconds = SPEEDS["evaluation_start"][case.device] + case.sizes.in_memory(sources) / SPEEDS["parsed_bytes"]
    seconds += SPEEDS["item"] * sum(items_of(benchmark, case.sizes) for benchmark in stage.benchmarks)
    seconds += read * model.forward_flops(context) / rate
    if samplers is not None:
        count = samplers.process.count
        each = case.devices(precision, count, engine, gpus_each=stage.sampler.tensor_parallel)
        decoding = each.decoding_s(model, asked, context=context, at_once=max(1, samplers.at_once // count))
        if decoding is None:
            return None
        seconds += decoding + (SPEEDS["sglang_start"] if is_on_gpu and engine != "embedded" else 0.0)
    return seconds


EVALUATION = Formula(plan_evaluation, _void, _too_large, _candidates)
