"""What the parts of benchmarks.gpu measure, a process a case: `python -m benchmarks.gpu_parts CASE FOLDER`.

Every function takes the case's options, `device` among them, and returns numbers with their unit in the name. Seconds
are of wall time, after the device has finished; memory is what PyTorch's allocator held at most.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GIB = 1 << 30
SHAPES: dict[str, dict[str, Any]] = {
    "half-billion": {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096},
    "toy": {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
}
TIMED_S = 8.0  # of steps that are timed


class Device:
    """`cpu` or `cuda`: its clock and its memory."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_gpu = kind == "cuda"

    def wait(self) -> float:
        """The time when all that was asked of it is done."""
        if self.is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def memory_gib(self) -> float:
        """The most that was held since the last call."""
        if not self.is_gpu:
            return 0.0
        most = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        return most

    def seconds(self, work: Callable[[], Any]) -> float:
        began = self.wait()
        work()
        return self.wait() - began


def pretrain(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Steps of the engine as a pretraining stage makes them, with Muon, on random tokens in documents of 500."""
    from nanodag.config.dial import flops_per_token, num_parameters, shape_of
    from nanodag.config.supervised import OptimizerConfig
    from nanodag.model.build import initialise, qwen3_architecture
    from nanodag.model.decoder import Decoder, Layer
    from nanodag.train.deepspeed_engine import TrainEngine
    from nanodag.train.objective import next_token_loss, to_device
    from nanodag.train.peak import matmul_peak

    device, length, vocabulary = Device(options["device"]), options["sequence_length"], options["vocabulary"]
    shape = shape_of(options["depth"])
    architecture = qwen3_architecture(shape, vocabulary=vocabulary, rope_theta=10_000.0, max_positions=length)
    model = Decoder(architecture, compiled=options["compile"], activation_checkpointing=options["checkpointing"])
    initialise(model, 0)
    engine = TrainEngine(
        model,
        optimizer=OptimizerConfig(name="muon"),
        zero_stage=options["zero_stage"],
        precision=options["precision"],
        gradient_clipping=1.0,
        device=options["device"],
        leaf_modules=(Layer,),
    )
    state_gib = device.memory_gib()
    batches = [_batch(options["micro_batch_tokens"] // length, length, vocabulary) for _ in range(4)]
    count = options["micro_batches"]
    tokens = options["micro_batch_tokens"] * count

    def step(number: int) -> Tensor:
        total = torch.zeros((), device=engine.device)
        for index in range(count):
            loss = next_token_loss(engine, to_device(batches[(number + index) % 4], engine.device))
            engine.backward(loss / tokens, last=index == count - 1)
            total += loss.detach()
        engine.step(learning_rate=1e-3, matrix_lr=0.01)
        return total / tokens

    first = float(step(0))
    warm_up_s = device.seconds(lambda: [step(number) for number in range(1, 3)])
    timed, loss, began = [], torch.zeros(()), time.perf_counter()
    while len(timed) < 3 or time.perf_counter() - began < TIMED_S:
        timed.append(device.seconds(lambda: step(len(timed))))
    loss = step(0)
    speed = tokens / statistics.median(timed)
    peak = matmul_peak(options["device"])
    flops = flops_per_token(shape, vocabulary, length)
    return {
        "tokens_per_second": speed,
        "mfu": flops * speed / peak,
        "memory_gib": device.memory_gib(),
        "state_gib": state_gib,
        "step_s": statistics.median(timed),
        "steps_1_and_2_s": warm_up_s,
        "peak_teraflops": peak / 1e12,
        "parameters": num_parameters(shape, vocabulary)["total"],
        "micro_batch_tokens": options["micro_batch_tokens"],
        "first_loss": first,
        "last_loss": float(loss),
    }


def _batch(rows: int, length: int, vocabulary: int) -> Any:
    import numpy as np

    from nanodag.train.packing import Batch, document_piece, make_batch

    draw = np.random.default_rng(rows * length)
    pieces = []
    for _ in range(rows):
        sizes = [min(500, length - start) for start in range(0, length, 500)]
        pieces.append([document_piece(draw.integers(1, vocabulary, size - 1).tolist(), 0) for size in sizes])
    batch: Batch = make_batch(pieces, num_rows=rows, row_length=length, pad_id=0)
    return batch


def model_folder(name: str, folder: Path, device: str) -> Path:
    """A checkpoint of a shape with random weights, in bfloat16 for a GPU; written once a part."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = folder / name
    if not path.exists():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPES[name], tie_word_embeddings=True))
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(path)
    return path


def _prompts(options: dict[str, Any], count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    highest = SHAPES[options["model"]]["vocab_size"]
    return torch.randint(1, highest, (count, options["prompt_tokens"]), generator=generator).tolist()


def _sampler(options: dict[str, Any], path: Path, slots: int) -> Any:
    from nanodag.inference.engine_settings import EngineSettings
    from tests.sampler.reference import WholeEngine

    a = SHAPES[options["model"]]
    context = -(-(options["prompt_tokens"] + options["new_tokens"]) // 64) * 64
    head = a["hidden_size"] // a["num_attention_heads"]
    cache = slots * context * 2 * a["num_hidden_layers"] * a["num_key_value_heads"] * head * 4
    dtype = "bfloat16" if options["device"] == "cuda" else "float32"
    sizes = {"max_batch": slots, "context_length": context, "cache_bytes": cache}
    engine = WholeEngine(EngineSettings(model=path, dtype=dtype, device=options["device"], **sizes))
    assert engine.num_slots == slots, f"{engine.num_slots} slots instead of {slots}"
    return engine


def _requests(options: dict[str, Any], prompts: list[list[int]], samples: int = 1) -> list[Any]:
    from nanodag.inference.protocol import Request, SamplingParams

    params = SamplingParams(max_new_tokens=options["new_tokens"], ignore_eos=True, n=samples)
    return [Request(input_ids=prompt, params=params) for prompt in prompts]


def embedded(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Tokens a second of the embedded sampler, prompts included."""
    device = Device(options["device"])
    engine = _sampler(options, model_folder(options["model"], folder, options["device"]), options["batch"])
    requests = _requests(options, _prompts(options, options["batch"]))

    def run() -> None:
        engine.forget_prompts()
        engine.generate(requests)

    cold_s = device.seconds(run)
    return _generation(options, device, run, cold_s)


def generate(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same by transformers."""
    from transformers import AutoModelForCausalLM

    device = Device(options["device"])
    path = model_folder(options["model"], folder, options["device"])
    dtype = torch.bfloat16 if device.is_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(options["device"]).eval()
    prompts = torch.tensor(_prompts(options, options["batch"]), device=options["device"])
    new = options["new_tokens"]

    def run() -> None:
        with torch.inference_mode():
            out = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )
        assert out.shape[1] == options["prompt_tokens"] + new

    cold_s = device.seconds(run)
    return _generation(options, device, run, cold_s)


def _generation(options: dict[str, Any], device: Device, run: Callable[[], None], cold_s: float) -> dict[str, Any]:
    timed, began = [], time.perf_counter()
    while not timed or (len(timed) < 5 and time.perf_counter() - began < 30.0):
        timed.append(device.seconds(run))
    tokens = options["batch"] * options["new_tokens"]
    seconds = statistics.median(timed)
    return {
        "tokens_per_second": tokens / seconds,
        "token_ms": 1000 * seconds / options["new_tokens"],
        "first_run_s": cold_s,
        "memory_gib": device.memory_gib(),
    }


@contextlib.contextmanager
def _alone(trainer: Any, device: Device, seconds: dict[str, float]) -> Iterator[None]:
    """Inside, what the trainer's engine does is timed by its parts; the device is waited for between them, so the sum
    is more than a step takes."""
    engine, rows_of = trainer.engine, trainer._rows_of
    call, backward, update = type(engine).__call__, engine.backward, engine.step

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = device.wait()
            found = work(*args, **kwargs)
            seconds[name] = seconds.get(name, 0.0) + device.wait() - began
            return found

        return run

    trainer._rows_of = timed("pack_s", rows_of)
    type(engine).__call__ = timed("forward_s", call)
    engine.backward, engine.step = timed("backward_s", backward), timed("update_s", update)
    try:
        yield
    finally:
        trainer._rows_of, type(engine).__call__, engine.backward, engine.step = rows_of, call, backward, update


def rl(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One RL step: generation, training as a whole and by its parts, export, and the new weights in the sampler."""
    from nanodag.config.kinds.rl import RLStage
    from nanodag.rl.rollouts.rollout import Rollout, prompt_span
    from nanodag.rl.trainer.trainer import Trainer
    from tests.rl.rollouts import sampled_span

    device = Device(options["device"])
    path = model_folder(options["model"], folder, options["device"])
    longest = options["prompt_tokens"] + options["new_tokens"]
    config = RLStage.of(
        kind="rl",
        data=["file:x"],
        precision="bf16" if device.is_gpu else "fp32",
        zero_stage=options["zero_stage"],
        micro_batch_tokens=options["micro_batch_tokens"],
        max_new_tokens=options["new_tokens"],
        updates_per_step=2,
        prompts_per_step=options["prompts"],
        samples_per_prompt=options["samples"],
        compile=device.is_gpu,
        sampler={"context": longest + 2},
    )
    began = device.wait()
    trainer = Trainer(config, path, device=options["device"])
    numbers: dict[str, Any] = {"trainer_start_s": device.wait() - began, "trainer_gib": device.memory_gib()}
    sampler = _sampler(options, path, options["prompts"] * options["samples"])
    requests = _requests(options, _prompts(options, options["prompts"]), options["samples"])
    sampler.generate(requests)
    numbers["sampler_gib"] = device.memory_gib()
    sampler.forget_prompts()
    began = device.wait()
    completions = sampler.generate(requests)
    numbers["generate_s"] = device.wait() - began
    rollouts = [
        Rollout(
            group_id=str(number),
            prompt_id=str(number),
            sample_index=index,
            spans=(prompt_span(request.input_ids), sampled_span(one.output_ids, one.logprobs, version=0)),
            finish_reason="length",
            reward=float((number + index) % 3 == 0),
        )
        for number, (request, several) in enumerate(zip(requests, completions, strict=True))
        for index, one in enumerate(several)
    ]
    numbers["first_train_s"] = device.seconds(lambda: trainer.train(1, rollouts))  # compiles
    device.memory_gib()
    numbers["train_s"] = device.seconds(lambda: trainer.train(2, rollouts))
    numbers["train_gib"] = device.memory_gib()
    parts: dict[str, float] = {}
    with _alone(trainer, device, parts):
        reply = trainer.train(3, rollouts)
    numbers |= parts
    new = folder / f"new-{options['zero_stage']}"
    numbers["export_s"] = device.seconds(lambda: trainer.export(new))
    numbers["load_s"] = device.seconds(lambda: sampler.update_weights(sampler.load(new), new, "1"))
    tokens = reply["computed_tokens"]
    model_size = sum(parameter.numel() for parameter in sampler_parameters(options))
    numbers["train_tokens_per_second"] = tokens / numbers["train_s"]
    numbers["train_mfu"] = 6 * model_size * tokens / numbers["train_s"] / reply["peak_flops"]
    numbers["sampled_tokens_per_second"] = len(rollouts) * options["new_tokens"] / numbers["generate_s"]
    summed = reply["sums"]["summed"]
    numbers["mismatch_nats"] = summed["mismatch_absolute"] / summed["tokens"]  # it grows with each training
    return numbers


def sampler_parameters(options: dict[str, Any]) -> list[Tensor]:
    """The model's parameters, without memory."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        return list(Qwen2ForCausalLM(Qwen2Config(**SHAPES[options["model"]], tie_word_embeddings=True)).parameters())


def sync(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """New weights through a folder: written by the trainer's side, read and taken over by the sampler's; and what a
    check of all of them adds."""
    from nanodag.model.folder import write_like
    from nanodag.sampler.fingerprints import Fingerprints

    device = Device(options["device"])
    path = model_folder(options["model"], folder, options["device"])
    sampler = _sampler(options | {"prompt_tokens": 64, "new_tokens": 64}, path, 1)
    from safetensors.torch import load_file

    weights = {name: tensor.to(options["device"]) for name, tensor in load_file(path / "model.safetensors").items()}
    dtype = next(iter(weights.values())).dtype

    def timed(number: int) -> dict[str, float]:
        new, checked = folder / f"sync-{number}", folder / f"checked-{number}"
        prints, loaded = Fingerprints("checkpoint"), []

        def write(to: Path, **options: Any) -> None:
            write_like(path, to, iter(weights.items()), dtype=dtype, **options)

        found = {
            "write_s": device.seconds(lambda: write(new)),
            "read_s": device.seconds(lambda: loaded.append(sampler.load(new))),
            "take_over_s": device.seconds(lambda: sampler.update_weights(loaded[0], new, str(number))),
            "write_with_fingerprints_s": device.seconds(lambda: write(checked, on_tensor=prints.add)),
        }
        for written in (new, checked):  # they lie in memory
            shutil.rmtree(written)
        return found

    rounds = [timed(number) for number in range(4)]
    medians = {name: statistics.median(one[name] for one in rounds[1:]) for name in rounds[0]}
    size = sum(tensor.nbytes for tensor in weights.values())
    return {"megabytes": size / 1e6, **medians, "gigabytes_per_second": size / 1e9 / medians["write_s"]}


def check(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Branches that only CUDA takes, against the same in float32 on the CPU: largest differences, which bfloat16 makes
    about 0.01; and that a micro-batch waits for nothing."""
    from benchmarks.gpu_checks import CHECKS

    return {name: run(Device(options["device"]), folder) for name, run in CHECKS.items()}


def stages(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Two steps of each stage, in its own worker, the next on what the one before made."""
    from benchmarks.gpu_checks import stage_jobs

    numbers: dict[str, Any] = {}
    for name, module, job in stage_jobs(options["device"], folder):
        began = time.monotonic()
        log = job.parent / "worker.log"
        with log.open("wb") as stream:
            done = subprocess.run([sys.executable, "-m", module, str(job)], stdout=stream, stderr=subprocess.STDOUT)
        numbers[f"{name}_s"] = time.monotonic() - began
        if done.returncode or not (job.parent / "result.json").exists():
            numbers["failed"] = f"{name}: exit code {done.returncode}"
            numbers["log"] = log.read_text(errors="replace")[-4000:]
            break
    return numbers


def main() -> None:
    case, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        numbers = globals()[case["measure"]](case["options"], folder)
    except torch.OutOfMemoryError as error:
        numbers = {"out_of_memory": str(error).partition(". GPU")[0]}
    print("RESULT " + json.dumps(numbers), flush=True)
    os._exit(0)  # DeepSpeed's threads may abort a normal exit


if __name__ == "__main__":
    main()
