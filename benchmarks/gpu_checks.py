"""What benchmarks.gpu checks rather than times: branches that only CUDA takes, and two steps of every stage."""

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SYLLABLES = ("ba", "de", "fi", "go", "hul", "ker", "lim", "mon", "nup", "ra", "ste", "tri")
HEADS, KV_HEADS, HEAD_DIM = 14, 2, 64


def start(device: Any, folder: Path) -> dict[str, Any]:
    """A rank of its own: NCCL on its GPU, and the peak of its matrix products."""
    from torch import distributed as dist

    from nanodag.train.deepspeed_engine import start_ranks
    from nanodag.train.peak import matmul_peak

    here = start_ranks(device.kind)
    total = torch.ones(4, device=here)
    dist.all_reduce(total)
    return {"device": str(here), "sum": float(total.sum()), "peak_teraflops": matmul_peak(device.kind) / 1e12}


def measured_peak(device: Any, folder: Path) -> dict[str, Any]:
    """The peak as it would be measured, were the GPU not known: below its data sheet, but not by half."""
    from nanodag.train import peak

    if not device.is_gpu:
        return {}
    return {str(dtype).removeprefix("torch."): peak._measured_on_gpu(dtype) / 1e12 for dtype in (torch.bfloat16,)}


def documents(device: Any, folder: Path) -> dict[str, Any]:
    """Attention inside documents."""
    from nanodag.model.attention import document_attention

    ids = np.tile(np.repeat([0, 1, 2], [500, 700, 848]), (2, 1))
    return _compared(device, 2, 2048, lambda here, dtype: document_attention(ids))


def responses(device: Any, folder: Path) -> dict[str, Any]:
    """Attention of responses that share a prompt."""
    from nanodag.model.attention import group_attention

    row = _row()
    arrays = row.prompts, row.responses
    return _compared(device, 1, row.num_tokens, lambda here, dtype: group_attention(*arrays))


def window(device: Any, folder: Path) -> dict[str, Any]:
    """Attention of such responses through a sliding window."""
    from nanodag.model.attention import group_attention

    row = _row()
    return _compared(
        device, 1, row.num_tokens, lambda here, dtype: partial(group_attention(row.prompts, row.responses), window=100)
    )


def _row() -> Any:
    from nanodag.rl.rollouts.rollout import Rollout, prompt_span
    from nanodag.rl.trainer.rows import pack
    from tests.rl.rollouts import sampled_span

    rollouts = [
        Rollout(
            group_id=str(group),
            prompt_id=str(group),
            sample_index=index,
            spans=(
                prompt_span([1] * (60 + 50 * group)),
                sampled_span([2] * (1 + 97 * index), [-1.0] * (1 + 97 * index), version=0),
            ),
            finish_reason="stop",
            reward=float(index),
        )
        for group in range(2)
        for index in range(6)
    ]
    return pack(rollouts, budget_tokens=1 << 14)[0]


def _compared(device: Any, rows: int, length: int, attend: Callable[..., Any]) -> dict[str, Any]:
    """Largest differences of value and gradients from float32 on the CPU, over the largest number there is."""
    torch.manual_seed(0)
    exact = [torch.randn(rows, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    mix = torch.randn(rows, length, HEADS, HEAD_DIM)
    here = torch.device("cuda", 0) if device.is_gpu else torch.device("cpu")

    def results(place: torch.device, dtype: torch.dtype) -> list[Tensor]:
        tensors = [tensor.to(place, dtype).requires_grad_() for tensor in exact]
        out = attend(place, dtype)(*tensors)
        return [out, *torch.autograd.grad((out.float() * mix.to(place)).sum(), tensors)]

    wanted = results(torch.device("cpu"), torch.float32)
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        pairs = zip(results(here, dtype), wanted, strict=True)
        errors = [float((one.float().cpu() - other).abs().max() / other.abs().max()) for one, other in pairs]
        found[str(dtype).removeprefix("torch.")] = dict(zip(("out", "query", "key", "value"), errors, strict=True))
    return found


def head(device: Any, folder: Path) -> dict[str, Any]:
    """Log-probabilities and their gradients, in blocks."""
    from unittest.mock import patch

    from nanodag.model.head import selected_logprobs

    torch.manual_seed(0)
    here = torch.device(device.kind)
    hidden, weight, targets = torch.randn(600, 64), torch.randn(5000, 64) / 8, torch.randint(0, 5000, (600,))
    results = []
    for place in (torch.device("cpu"), here):
        tensors = [tensor.to(place).requires_grad_() for tensor in (hidden, weight)]
        with patch("nanodag.model.head.HEAD_BLOCK_BYTES", 1 << 20):
            logprobs, _ = selected_logprobs(*tensors, targets.to(place))
            results.append([logprobs, *torch.autograd.grad(logprobs.sum(), tensors)])
    pairs = zip(*results, strict=True)
    return {"largest": max(float((one.cpu() - other.cpu()).abs().max()) for one, other in pairs)}


def waits(device: Any, folder: Path) -> dict[str, Any]:
    """How often CUDA would be waited for between a micro-batch's copy and its backward pass: PyTorch warns of each."""
    import warnings

    from benchmarks.gpu_parts import model_folder
    from nanodag.config.kinds.rl import RLStage
    from nanodag.model.folder import load
    from nanodag.rl.losses import Totals
    from nanodag.rl.trainer.policy import Policy, to_row
    from nanodag.rl.trainer.update import PolicyObjective, Scored

    if not device.is_gpu:
        return {}
    here = torch.device("cuda", 0)
    policy = Policy(load(model_folder("toy", folder, "cuda")), temperature=1.0).to(here, torch.bfloat16)
    objective = PolicyObjective(RLStage.of(kind="rl", data=["file:x"], aggregation="sequence"))

    def step() -> Tensor:
        row = to_row(_row(), here)
        logprobs, entropies = policy(row)
        old, advantages = logprobs.detach(), torch.ones_like(logprobs)
        loss, _ = objective(Scored(row, logprobs, entropies, old, advantages, None), Totals(100, 10, 100))
        return loss

    step().backward()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        loss = step()
        torch.cuda.set_sync_debug_mode("default")
        loss.backward()
    places = [f"{Path(one.filename).name}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)]
    return {"before_backward": len(places), "places": sorted(set(places))[:10]}


CHECKS: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    "start": start,
    "measured_peak_teraflops": measured_peak,
    "documents": documents,
    "responses": responses,
    "window": window,
    "head": head,
    "waits": waits,
}


def stage_jobs(device: str, folder: Path) -> Iterator[tuple[str, str, Path]]:
    """The name, module and job file of each stage in turn: tokenizer, pretraining, midtraining, SFT, RL, evaluation."""
    from nanodag.config import resolve
    from nanodag.worker.job import Job, write_job

    draw = random.Random(1)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(500)]
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 60))) for _ in range(2000)]
    prose = folder / "prose.jsonl"
    prose.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    on_gpu = device == "cuda"
    steps = {"sequence_length": 256, "batch_tokens": 4096, "micro_batch_tokens": 2048, "horizon_tokens": 8192}
    steps |= {"precision": "bf16" if on_gpu else "fp32", "compile": on_gpu, "validation_tokens": 2048}
    steps |= {"optimizer": {"name": "muon", "learning_rate": 0.01, "matrix_lr": 0.01}, "sample_prompts": ["river"]}
    shape = {"depth": 2, "width": 128, "num_heads": 2, "num_kv_heads": 1, "head_width": 64, "mlp_width": 256}
    shape |= {"tied_embeddings": True, "max_positions": 512}
    problems = {"url": "python:nanodag.data.lists:sort?count=3&size=400&seed=1", "adapter": "problem"}
    problems |= {"held_out": 0.2, "held_out_by": "prompt"}
    written = {"url": f"file:{prose}", "held_out": 0.1}
    tables: dict[str, dict[str, Any]] = {
        "tokenizer": {"kind": "tokenizer", "data": [written], "vocabulary": 512},
        "pretrain": {"kind": "pretrain", "inputs": {"tokenizer": "tokenizer"}, "data": [written], "shape": shape}
        | {"zero_stage": 1}
        | steps,
        "midtrain": {"kind": "midtrain", "inputs": {"model": "pretrain"}, "data": [problems], "zero_stage": 2} | steps,
        "sft": {"kind": "sft", "inputs": {"model": "midtrain"}, "data": [problems], "zero_stage": 3} | steps,
        "rl": {
            "kind": "rl",
            "inputs": {"model": "sft"},
            "data": [problems],
            "reward": "exact",
            "sampler": {"context": 128, "max_batch": 16, "deterministic": not on_gpu},
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_new_tokens": 16,
            "num_steps": 2,
            "precision": "bf16" if on_gpu else "fp32",
            "eval_every": 1,
            "eval_prompts": 4,
            "micro_batch_tokens": 512,
        },
        "eval": {
            "kind": "eval",
            "inputs": {"model": "rl"},
            "benchmarks": [
                {"name": "sort", "form": "problems", "source": problems, "limit": 8},
                {"name": "bits_per_byte", "source": {"url": f"file:{prose}", "adapter": "text"}, "limit": 8},
            ],
            "precision": "bf16" if on_gpu else "fp32",
            "max_new_tokens": 16,
        },
    }
    file = folder / "pipeline.yaml"  # which is JSON, too: what is `auto` follows from this machine
    resources = {"num_ranks": 1, "threads": 2, "device": device}
    tables = {name: table | {"seed": 1, "resources": resources} for name, table in tables.items()}
    file.write_text(json.dumps({"presets": {"gpu": {"device": device, "stages": tables}}}))
    stages = resolve(file, "gpu").pipeline.stages
    modules = {"tokenizer": "nanodag.tokenizer.train", "rl": "nanodag.rl", "eval": "nanodag.evaluation"}
    for name, stage in stages.items():
        workspace = folder / name
        workspace.mkdir()
        inputs = {key: folder / before / "output" for key, before in stage.inputs.items()}
        job = Job(name=name, run="gpu", config=stage, inputs=inputs, workspace=workspace, context={"mirror": "none"})
        yield name, modules.get(name, "nanodag.train"), write_job(job)
