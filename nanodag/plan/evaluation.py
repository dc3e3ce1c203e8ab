"""Plans evaluation: likelihoods by the model that is trained, written answers by samplers."""

from collections.abc import Iterator
from dataclasses import dataclass

from nanodag.config.derive_sampler import REPLICA_FLOPS, SHARE_IN_EVALUATION, SHARE_OF_HOST
from nanodag.config.footprint import CUDA_BYTES, MAX_LOGITS
from nanodag.config.kinds.evaluation import BenchmarkConfig, EvalStage
from nanodag.config.model_size import ModelSize
from nanodag.config.stage_base import StageBase
from nanodag.evaluation.forms import is_written
from nanodag.host.machine import Machine
from nanodag.inference.number_formats import width_of
from nanodag.plan import processes
from nanodag.plan.core_sizes import core_items, core_tokens
from nanodag.plan.cpu_work import CpuWork, core_of
from nanodag.plan.memory import Candidate, memory_faults
from nanodag.plan.models import Habit
from nanodag.plan.programs import verifiers_processes
from nanodag.plan.sampling import PlannedSamplers, embedded_samplers, sglang_samplers
from nanodag.plan.sizes import (
    bytes_per_token,
    downloaded,
    held_out_share,
    in_memory,
    longest_prompt,
    mean_answer,
    mean_prompt,
    size_of,
)
from nanodag.plan.speeds import EVALUATION_START_S, GPU_SHARES, SGLANG_START_S, decoding_seconds, gpu_peak
from nanodag.plan.stage_plan import Fault, Process, StagePlan

ANSWERS_SHARE = 0.5
"""Of an item's tokens that are scored, those of its answers: their logits are computed."""
CONTINUATION_BYTES = 64 * 5.75
"""Text of an item of `continuation`: 32 words, and four phrases of 8."""
ITEM_S = 1e-3
"""CPU-seconds of an item beside its tokens: lm-eval's requests, its record, its share of the intervals."""
HASHED_S = 1.2e-5
"""CPU-seconds of a row that a hash counts among the held-out ones or not."""
UNKNOWN_ITEMS = 1000
CORE_RECORD_BYTES = 150
"""Of an item of CORE, whose record holds no text."""
PROMPT_ROOM = 512
"""Tokens of the longest prompt of a written benchmark that is not known."""


def needed_context(stage: EvalStage, model: ModelSize) -> int:
    """Tokens of the longest prompt and answer of its written benchmarks; 0 without one."""
    widest = _widest(stage, model)
    return 0 if widest is None else _longest(widest, model) + stage.answer_tokens(widest)


def _widest(stage: EvalStage, model: ModelSize) -> BenchmarkConfig | None:
    """The written benchmark with the longest prompt and answer."""
    written = [b for b in stage.benchmarks if is_written(b)]
    return max(written, key=lambda b: _longest(b, model) + stage.answer_tokens(b), default=None)


def _longest(benchmark: BenchmarkConfig, model: ModelSize) -> int:
    url = benchmark.source.url if benchmark.source is not None else ""
    found = longest_prompt(url, model.vocabulary) if url else None
    return (found or PROMPT_ROOM) * (1 + benchmark.num_fewshot)


def samplers_of(stage: EvalStage, model: ModelSize, machine: Machine) -> PlannedSamplers | None:
    """The samplers that write answers; None where there is nothing to write. As many embedded ones start as are worth
    it where no answer ends before its last token."""
    context = min(needed_context(stage, model), model.max_positions)
    if not context:
        return None
    sampler, device = stage.sampler, str(stage.resources.device)
    if sampler.engine == "sglang":
        return sglang_samplers(
            model,
            machine,
            precision=str(stage.precision),
            device=device,
            replicas=int(sampler.replicas),
            tensor_parallel=sampler.tensor_parallel,
            max_batch=int(sampler.replicas) * int(sampler.max_batch),
            context=context,
            memory_fraction=SHARE_IN_EVALUATION if device == "cuda" else SHARE_OF_HOST,
            cache_bytes=int(sampler.cache_bytes),
        )
    written = [b for b in stage.benchmarks if is_written(b)]
    used = max(stage.answer_tokens(b) + prompt_of(b, model) for b in written)
    most = max(items_of(b) * b.num_samples * (stage.answer_tokens(b) + prompt_of(b, model)) for b in written)
    replicas = max(1, min(int(sampler.replicas), int(most * model.forward_flops(0) / REPLICA_FLOPS)))
    return embedded_samplers(
        model,
        precision=str(stage.precision),
        device=device,
        replicas=replicas,
        max_batch=replicas * int(sampler.max_batch),
        context=context,
        cache_bytes=int(sampler.cache_bytes),
        used=used,
        takes_weights=False,
    )


def plan_evaluation(
    name: str, stage: EvalStage, model: ModelSize | None, machine: Machine, habit: Habit = "half"
) -> StagePlan:
    """The plan of an evaluation. model: None where its size is not known. habit: how long its answers are."""
    device = str(stage.resources.device)
    sources = [b.source for b in stage.benchmarks if b.source is not None]
    read = sum(int(items_of(b) * _row_bytes(b)) for b in stage.benchmarks)
    if model is None:
        return StagePlan(
            name=name, kind=stage.kind, device=device, read_bytes=read, notes=("its model is not known yet",)
        )
    samplers = samplers_of(stage, model, machine)
    longest = max(map(stage.answer_tokens, stage.benchmarks))
    tokens = _tokens(stage, model, habit)
    flops = tokens.all * model.forward_flops(500)
    seconds, cpu_seconds = _seconds(stage, model, machine, samplers, tokens)
    core = core_of(machine, str(stage.precision))
    return StagePlan(
        name=name,
        kind=stage.kind,
        device=device,
        parameters=model.total,
        tokens=int(tokens.all),
        flops=flops,
        read_bytes=read,
        download_bytes=downloaded(sources, read),
        processes=_processes(stage, model, samplers),
        num_gpus=max(1, samplers.process.count * samplers.process.gpus if samplers else 0) if device == "cuda" else 0,
        at_once=None if samplers is None else samplers.at_once,
        longest_prompt=None if samplers is None else model.max_positions - longest,
        disk_bytes=int(4 * read) + processes.MB,
        kept_bytes=int(4 * read) + processes.MB,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        share=GPU_SHARES[str(stage.sampler.engine)].likelihood if device == "cuda" else core.share(flops, cpu_seconds),
    )


def faults_of_evaluation(
    plan: StagePlan, stage: EvalStage, model: ModelSize | None, machine: Machine
) -> Iterator[Fault]:
    """What does not fit; answers that would be cut, prompts without room, and a cache without room for one sample."""
    if model is None:
        return

    def rebuilt(changed: StageBase) -> StagePlan:
        assert isinstance(changed, EvalStage)
        return plan_evaluation(plan.name, changed, model, machine)

    has_samplers = samplers_of(stage, model, machine) is not None
    yield from memory_faults(
        plan,
        machine,
        setting="sampler.cache_bytes" if has_samplers else "micro_batch_tokens",
        found=stage.sampler.cache_bytes if has_samplers else stage.micro_batch_tokens,
        candidates=_candidates(stage, model, machine),
        rebuilt=rebuilt,
    )
    if (widest := _widest(stage, model)) is None:
        return
    prompt, answer = _longest(widest, model), stage.answer_tokens(widest)
    needed = prompt + answer
    if needed > model.max_positions:
        room = model.max_positions - prompt
        why = f"tokens and a prompt of about {prompt} are more than the model's {model.max_positions} positions: items "
        why += f"of {widest.name} would not be asked"
        mend = (f"max_new_tokens={room}",) if room > 0 and answer == stage.max_new_tokens else ()
        yield Fault(setting="max_new_tokens", found=str(answer), why=why, mend=mend)
    samplers = samplers_of(stage, model, machine)
    if samplers is not None and not samplers.at_once:
        why = f"bytes hold no sample of {needed} tokens, which takes {samplers.needed_bytes}"
        mend = (f"sampler.cache_bytes={samplers.needed_bytes}",)
        yield Fault(setting="sampler.cache_bytes", found=str(samplers.room), why=why, mend=mend)


def _candidates(stage: EvalStage, model: ModelSize, machine: Machine) -> Iterator[Candidate]:
    """Smaller caches that hold a sample; then with one sampler; then in bf16 where the machine multiplies it fast."""
    fast = ("bf16",) if machine.multiplies_bf16_fast(str(stage.resources.device)) else ()
    for precision in dict.fromkeys((str(stage.precision), *fast)):
        for replicas in dict.fromkeys((int(stage.sampler.replicas), 1)):
            cache_bytes = int(stage.sampler.cache_bytes)
            while True:
                sampler = stage.sampler.model_copy(update={"cache_bytes": cache_bytes, "replicas": replicas})
                changed = stage.model_copy(update={"sampler": sampler, "precision": precision})
                said = {"sampler.cache_bytes": cache_bytes, "sampler.replicas": replicas, "precision": precision}
                given = (stage.sampler.cache_bytes, stage.sampler.replicas, stage.precision)
                different = [name for (name, value), old in zip(said.items(), given, strict=True) if value != old]
                yield tuple(f"{name}={said[name]}" for name in different), changed
                samplers = samplers_of(changed, model, machine)
                cache_bytes //= 2
                if samplers is None or cache_bytes < samplers.needed_bytes:
                    break


def items_of(benchmark: BenchmarkConfig) -> int:
    """Items that are asked, UNKNOWN_ITEMS where that is not known."""
    if benchmark.is_core:
        return core_items(benchmark.limit)
    found = size_of(benchmark.source.url) if benchmark.source is not None else None
    rows = found.rows if found is not None and found.rows is not None else UNKNOWN_ITEMS
    if benchmark.source is not None and (share := held_out_share(benchmark.source)):
        rows = int(rows * share)
    return min(rows, benchmark.limit) if benchmark.limit else rows


def prompt_of(benchmark: BenchmarkConfig, model: ModelSize) -> float:
    """Tokens of a written benchmark's prompt on average, with its worked examples."""
    url = benchmark.source.url if benchmark.source is not None else ""
    return (1 + benchmark.num_fewshot) * (mean_prompt(url, model.vocabulary) if url else PROMPT_ROOM)


def _row_bytes(benchmark: BenchmarkConfig) -> float:
    if benchmark.is_core:
        return CORE_RECORD_BYTES
    found = size_of(benchmark.source.url) if benchmark.source is not None else None
    return found.row_bytes if found is not None else 500.0


@dataclass(frozen=True)
class _Tokens:
    """Of all items. scored: by likelihood. prompts, written: of those that are answered in writing."""

    scored: float
    prompts: float
    written: float

    @property
    def all(self) -> float:
        return self.scored + self.prompts + self.written


def _tokens(stage: EvalStage, model: ModelSize, habit: Habit) -> _Tokens:
    scored = prompts = written = 0.0
    for benchmark in stage.benchmarks:
        items, shots = items_of(benchmark), 1 + benchmark.num_fewshot
        url = benchmark.source.url if benchmark.source is not None else ""
        if benchmark.is_core:
            scored += core_tokens(benchmark.limit, model.vocabulary)
        elif is_written(benchmark):
            prompts += items * prompt_of(benchmark, model)
            most = stage.answer_tokens(benchmark)
            written += (
                items
                * benchmark.num_samples
                * (mean_answer(url, model.vocabulary, habit, most=most) if url else most / 2)
            )
        else:
            is_cut = "continuation" in (benchmark.form, benchmark.name)
            text = CONTINUATION_BYTES if is_cut else _row_bytes(benchmark)
            scored += items * shots * text / bytes_per_token(model.vocabulary)
    return _Tokens(scored, prompts, written)


def _processes(stage: EvalStage, model: ModelSize, samplers: PlannedSamplers | None) -> tuple[Process, ...]:
    """Those of the stage, and verifiers' own where a benchmark asks it."""
    own = _own_processes(stage, model, samplers)
    asks_verifiers = any(b.source is not None and b.source.url.startswith("verifiers:") for b in stage.benchmarks)
    if samplers is None or not asks_verifiers:
        return own
    return (*own, *verifiers_processes(samplers.process.count * int(stage.sampler.max_batch)))


def _own_processes(stage: EvalStage, model: ModelSize, samplers: PlannedSamplers | None) -> tuple[Process, ...]:
    """The worker with the model that scores; a single sampler is in its process, several are processes beside it."""
    device, precision, shape = str(stage.resources.device), str(stage.precision), model.shape
    wide, scored = width_of(precision), int(stage.micro_batch_tokens)
    held = {
        "weights": wide * model.total,
        "activations": scored * wide * (6 * shape.width + 3 * shape.mlp_width) + scored * 512,
        "logits": min(MAX_LOGITS[device], scored * model.vocabulary // 4) * (wide + 4),
    }
    sources = [b.source for b in stage.benchmarks if b.source is not None]
    base = {"process": processes.EVALUATION, "data": int(processes.PARSED * in_memory(sources))}
    if device == "cuda":
        host = {"process": processes.CUDA, "model": 4 * model.total, "data": base["data"]}
        worker = Process(name="worker", device={**held, "cuda": CUDA_BYTES}, host=host, gpus=1)
        return (worker,) if samplers is None else (worker, samplers.process)
    if samplers is None:
        return (Process(name="worker", host={**held, **base}),)
    if samplers.process.count > 1 or stage.sampler.engine == "sglang":
        return Process(name="worker", host={**held, **base}), samplers.process
    inner = {f"sampler's {name}": num for name, num in samplers.process.host.items() if name != "process"}
    return (Process(name="worker", host={**held, **base, **inner}, reserve=samplers.process.reserve),)


def _seconds(
    stage: EvalStage, model: ModelSize, machine: Machine, samplers: PlannedSamplers | None, tokens: _Tokens
) -> tuple[float | None, float | None]:
    """By the clock, and of a CPU's cores."""
    if stage.resources.device == "cuda":
        return _gpu_seconds(stage, model, machine, samplers, tokens), None
    core, threads = core_of(machine, str(stage.precision)), int(stage.resources.threads)
    items = sum(items_of(benchmark) for benchmark in stage.benchmarks)
    mean = int(tokens.scored / max(1, items))
    reading = core.reading(model, tokens.scored, mean, scored=ANSWERS_SHARE)
    sources = [b.source for b in stage.benchmarks if b.source is not None]
    looked_at = [size_of(source.url) for source in sources if held_out_share(source)]
    rows = sum(found.rows or 0 for found in looked_at if found is not None)
    start = processes.EVALUATION_S + in_memory(sources) / processes.PARSED_BYTES_S + rows * HASHED_S + items * ITEM_S
    width = width_of(str(stage.precision))
    cached = needed_context(stage, model) / 2 * model.token_bytes(width)
    decoding = core.decoding(model, tokens.written, cached_bytes=cached)
    decoding += CpuWork(0.0, core.reading(model, tokens.prompts, mean, scored=0.0).total)
    count = 1 if samplers is None else samplers.process.count
    started = processes.SAMPLER_S * count if count > 1 else 0.0
    side_by_side = max(1, min(count, machine.cores))
    seconds = start + reading.on(threads) + (started + decoding.total) / side_by_side
    return seconds, start + started + reading.total + decoding.total


def _gpu_seconds(
    stage: EvalStage, model: ModelSize, machine: Machine, samplers: PlannedSamplers | None, tokens: _Tokens
) -> float | None:
    precision = str(stage.precision)
    peak = gpu_peak(machine, precision, ranks=1)
    if not peak:
        return None
    engine = str(stage.sampler.engine)
    share = GPU_SHARES[engine].likelihood
    reading = (tokens.scored + tokens.prompts) * model.forward_flops(500) / (share * peak)
    if samplers is None:
        return EVALUATION_START_S + reading
    count = samplers.process.count
    decoding = decoding_seconds(
        machine=machine,
        engine=engine,
        samplers=count,
        tokens=tokens.written,
        weight_bytes=width_of(precision) * model.total,
        cache_bytes=500 * model.token_bytes(width_of(precision)),
        flops_per_token=model.forward_flops(500),
        at_once=max(1, samplers.at_once // count),
    )
    start = EVALUATION_START_S + (SGLANG_START_S if engine == "sglang" else 0.0)
    return None if decoding is None else start + reading + decoding
