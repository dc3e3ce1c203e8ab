"""Plans evaluation: likelihoods by the model that is trained, written answers by embedded samplers."""

from collections.abc import Iterator

from nanodag.config.footprint import CUDA_BYTES, width_of
from nanodag.config.kinds.evaluation import BenchmarkConfig, EvalStage
from nanodag.config.model_size import ModelSize
from nanodag.evaluation.forms import is_core, is_written
from nanodag.host.machine import Machine
from nanodag.inference.cache_size import cache_precision
from nanodag.plan import processes
from nanodag.plan.sampling import Samplers, embedded_samplers
from nanodag.plan.sizes import (
    bytes_per_token,
    downloaded,
    held_out_share,
    in_memory,
    longest_prompt,
    mean_prompt,
    size_of,
)
from nanodag.plan.speeds import EVALUATION_START_S, decoding_seconds, peak_of, shares_of
from nanodag.plan.stage_plan import Fault, Process, StagePlan

WRITTEN_SHARE = 0.5
"""Of max_new_tokens, that answers take on average."""
SCORED_LOGITS = 1 << 25  # MAX_LOGITS of nanodag.evaluation.scoring
UNKNOWN_ITEMS = 1000
PROMPT_ROOM = 512
"""Tokens of the longest prompt of a written benchmark that is not known."""
REPLICA_FLOPS = 2e11  # of nanodag.evaluation.writing: what starting another sampler costs
CORE_ITEMS, CORE_TOKENS = 9000, 6_000_000
"""Of CORE, 22 benchmarks of 500 items at most: items, and tokens read with their worked examples."""


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


def samplers_of(stage: EvalStage, model: ModelSize) -> Samplers | None:
    """The samplers that write answers; None where there is nothing to write."""
    context = min(needed_context(stage, model), model.max_positions)
    if not context:
        return None
    sampler = stage.sampler
    written = max(_written(stage, benchmark) for benchmark in stage.benchmarks if is_written(benchmark))
    replicas = max(1, min(int(sampler.replicas), int(written * model.forward_flops(500) / REPLICA_FLOPS)))
    return embedded_samplers(
        model,
        precision=str(stage.precision),
        device=str(stage.resources.device),
        replicas=replicas,
        max_batch=replicas * int(sampler.max_batch),
        context=context,
        cache_bytes=int(sampler.cache_bytes),
        takes_weights=False,
    )


def plan_evaluation(name: str, stage: EvalStage, model: ModelSize | None, machine: Machine) -> StagePlan:
    """The plan of an evaluation. model: None where its size is not known."""
    device = str(stage.resources.device)
    sources = [b.source for b in stage.benchmarks if b.source is not None]
    read = sum(int(_items(b) * _row_bytes(b)) for b in stage.benchmarks)
    if model is None:
        return StagePlan(
            name=name, kind=stage.kind, device=device, read_bytes=read, notes=("its model is not known yet",)
        )
    samplers = samplers_of(stage, model)
    scored, prompts, written = _tokens(stage, model)
    tokens = scored + prompts + written
    return StagePlan(
        name=name,
        kind=stage.kind,
        device=device,
        parameters=model.total,
        tokens=int(tokens),
        flops=tokens * model.forward_flops(500),
        read_bytes=read,
        download_bytes=downloaded(sources, read),
        processes=_processes(stage, model, samplers),
        num_gpus=(samplers.process.count if samplers is not None else 1) if device == "cuda" else 0,
        at_once=None if samplers is None else samplers.at_once,
        longest_prompt=None if samplers is None else model.max_positions - stage.max_new_tokens,
        disk_bytes=int(4 * read) + processes.MB,
        kept_bytes=int(4 * read) + processes.MB,
        seconds=_seconds(stage, model, machine, samplers, scored=scored, prompts=prompts, written=written),
        start_seconds=EVALUATION_START_S[device],
        share=shares_of(machine, device, str(stage.precision)).likelihood,
        is_beside=True,
    )


def faults_of_evaluation(stage: EvalStage, model: ModelSize | None) -> Iterator[Fault]:
    """Answers that would be cut, prompts without room, and a cache without room for one sample."""
    if model is None or (widest := _widest(stage, model)) is None:
        return
    prompt, answer = _longest(widest, model), stage.answer_tokens(widest)
    needed = prompt + answer
    if needed > model.max_positions:
        room = model.max_positions - prompt
        why = f"tokens and a prompt of about {prompt} are more than the model's {model.max_positions} positions: items "
        why += f"of {widest.name} would not be asked"
        mend = (f"max_new_tokens={room}",) if room > 0 and answer == stage.max_new_tokens else ()
        yield Fault(setting="max_new_tokens", found=str(answer), why=why, mend=mend)
    samplers = samplers_of(stage, model)
    if samplers is not None and not samplers.at_once:
        why = f"bytes hold no sample of {needed} tokens, which takes {samplers.needed_bytes}"
        mend = (f"sampler.cache_bytes={samplers.needed_bytes}",)
        yield Fault(setting="sampler.cache_bytes", found=str(samplers.room), why=why, mend=mend)


def _items(benchmark: BenchmarkConfig) -> int:
    if is_core(benchmark):
        return CORE_ITEMS
    found = size_of(benchmark.source.url) if benchmark.source is not None else None
    rows = found.rows if found is not None and found.rows is not None else UNKNOWN_ITEMS
    if benchmark.source is not None and (share := held_out_share(benchmark.source)):
        rows = int(rows * share)
    return min(rows, benchmark.limit) if benchmark.limit else rows


def _written(stage: EvalStage, benchmark: BenchmarkConfig) -> float:
    """Tokens that are written for a benchmark."""
    return _items(benchmark) * benchmark.num_samples * WRITTEN_SHARE * stage.answer_tokens(benchmark)


def _row_bytes(benchmark: BenchmarkConfig) -> float:
    found = size_of(benchmark.source.url) if benchmark.source is not None else None
    return found.row_bytes if found is not None else 500.0


def _tokens(stage: EvalStage, model: ModelSize) -> tuple[float, float, float]:
    """Tokens scored, of prompts, and written."""
    scored = prompts = written = 0.0
    for benchmark in stage.benchmarks:
        items, shots = _items(benchmark), 1 + benchmark.num_fewshot
        if is_core(benchmark):
            scored += CORE_TOKENS * (benchmark.limit or CORE_ITEMS) / CORE_ITEMS
        elif is_written(benchmark):
            url = benchmark.source.url if benchmark.source is not None else ""
            prompts += items * shots * (mean_prompt(url, model.vocabulary) if url else PROMPT_ROOM)
            written += _written(stage, benchmark)
        else:
            scored += items * shots * _row_bytes(benchmark) / bytes_per_token(model.vocabulary)
    return scored, prompts, written


def _processes(stage: EvalStage, model: ModelSize, samplers: Samplers | None) -> tuple[Process, ...]:
    """The worker with the model that scores; a single sampler is in its process, several are processes beside it."""
    device, precision, shape = str(stage.resources.device), str(stage.precision), model.shape
    wide, scored = width_of(precision), int(stage.micro_batch_tokens)
    held = {
        "weights": wide * model.total,
        "activations": scored * wide * (6 * shape.width + 3 * shape.mlp_width) + scored * 512,
        "logits": min(SCORED_LOGITS, scored * model.vocabulary // 4) * (wide + 4),
    }
    sources = [b.source for b in stage.benchmarks if b.source is not None]
    base = {"process": processes.EVALUATION, "data": int(processes.PARSED * in_memory(sources))}
    if device == "cuda":
        host = {"process": processes.CUDA, "model": 4 * model.total, "data": base["data"]}
        worker = Process(name="worker", device={**held, "cuda": CUDA_BYTES}, host=host, gpus=1)
        return (worker,) if samplers is None else (worker, samplers.process)
    if samplers is None:
        return (Process(name="worker", host={**held, **base}),)
    if samplers.process.count > 1:
        return Process(name="worker", host={**held, **base}), samplers.process
    inner = {f"sampler's {name}": num for name, num in samplers.process.host.items() if name != "process"}
    return (Process(name="worker", host={**held, **base, **inner}),)


def _seconds(
    stage: EvalStage,
    model: ModelSize,
    machine: Machine,
    samplers: Samplers | None,
    *,
    scored: float,
    prompts: float,
    written: float,
) -> float | None:
    device, precision, threads = str(stage.resources.device), str(stage.precision), int(stage.resources.threads)
    peak = peak_of(machine, device, precision, ranks=1, threads=threads)
    if not peak:
        return None
    share = shares_of(machine, device, precision)
    reading = (scored + prompts) * model.forward_flops(500) / (share.likelihood * peak)
    if samplers is None:
        return EVALUATION_START_S[device] + reading
    count = samplers.process.count
    decoding = decoding_seconds(
        machine=machine,
        device=device,
        precision=precision,
        engine="embedded",
        samplers=count,
        threads=max(1, threads // count),
        tokens=written,
        weight_bytes=width_of(precision) * model.total,
        cache_bytes=500 * model.token_bytes(width_of(cache_precision(precision, device))),
        flops_per_token=model.forward_flops(500),
        at_once=max(1, samplers.at_once // count),
    )
    return None if decoding is None else EVALUATION_START_S[device] + reading + decoding
