"""Tiny supervised stages in real workers: a byte-sized tokenizer, generated prose, problems from nanodag.data.lists."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from nanodag.config.pipeline import read_stage
from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
from nanodag.worker.job import Job, write_job
from tests import forks

WORDS = ("river", "stone", "light", "winter", "house", "garden", "train", "letter", "music", "paper", "green", "silent")
RESOURCES = {"num_ranks": 1, "threads": 1, "device": "cpu"}
SHAPE = {"depth": 2, "width": 32, "num_heads": 2, "num_kv_heads": 2, "head_width": 16, "mlp_width": 64}
OPTIMIZER = {"name": "muon", "learning_rate": 0.01, "matrix_lr": 0.01}


def write_prose(path: Path, num_documents: int = 300) -> None:
    """Documents of 5 to 60 words, one JSON object a line."""
    draw = random.Random(1)
    lines = (" ".join(draw.choices(WORDS, k=draw.randint(5, 60))) for _ in range(num_documents))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def write_tokenizer(folder: Path) -> None:
    """300 tokens: all bytes, special tokens, the commonest merges."""
    draw = random.Random(2)
    texts = [" ".join(draw.choices(WORDS, k=40)) for _ in range(50)]
    save_tokenizer(train_bpe(iter(texts), 300), folder)


def with_inputs(folder: Path) -> Path:
    """The folder, with prose and a tokenizer in it."""
    write_prose(folder / "prose.jsonl")
    write_tokenizer(folder / "tokenizer")
    return folder


def pretrain(folder: Path, **changes: Any) -> dict[str, Any]:
    """Config of a pretrain stage on `folder`/prose.jsonl: 12 steps, a checkpoint every 3."""
    return {
        "kind": "pretrain",
        "inputs": {"tokenizer": "tokenizer"},
        "seed": 3,
        "data": [{"url": f"file:{folder / 'prose.jsonl'}", "held_out": 0.1}],
        "resources": RESOURCES,
        "shape": {**SHAPE, "tied_embeddings": True, "max_positions": 128},
        **{"sequence_length": 64, "batch_tokens": 512, "micro_batch_tokens": 256, "horizon_tokens": 512 * 12},
        **{"optimizer": OPTIMIZER, "precision": "fp32", "compile": False, "sample_prompts": ["river stone"]},
        **{"validation_tokens": 512, "validation_every": 4, "checkpoint_every": 3, "log_every": 1},
        **changes,
    }


def sft(folder: Path, **changes: Any) -> dict[str, Any]:
    """Config of an sft stage: one pass over 240 sorting problems, in bf16, with patience."""
    problems = {"url": "python:nanodag.data.lists:sort?count=3&size=240&seed=1", "adapter": "problem", "held_out": 0.1}
    return {
        **{name: value for name, value in pretrain(folder).items() if name != "shape"},
        "kind": "sft",
        "inputs": {"model": "pretrain"},
        "data": [problems],
        "horizon_tokens": 0,
        "num_epochs": 1,
        "precision": "bf16",
        "patience": 3,
        "sample_prompts": ["Sort: 3 1 2"],
        **changes,
    }


def make_job(workspace: Path, config: dict[str, Any], inputs: dict[str, Path]) -> Path:
    """A workspace with a job.json; returns the workspace."""
    workspace.mkdir(parents=True)
    stage = read_stage(config)
    write_job(Job(name=stage.kind, run="test", config=stage, inputs=inputs, workspace=workspace))
    return workspace


def start(workspace: Path, *, num_ranks: int = 1, fresh: bool = False) -> forks.Forked | subprocess.Popen[bytes]:
    """The worker as the launcher would start it; one rank that need not be a fresh interpreter is a fork."""
    job, log = workspace / "job.json", workspace / "worker.log"
    environment = {**os.environ, **forks.CPU_ONLY}
    if num_ranks == 1 and not fresh:
        return forks.start_module("nanodag.train", job, environment=environment, log=log)
    torchrun = ["-m", "nanodag.train.torchrun", "--standalone", f"--nproc_per_node={num_ranks}"]
    command = [sys.executable, *(torchrun if num_ranks > 1 else []), "-m", "nanodag.train", str(job)]
    with log.open("ab") as stream:
        return subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)


def finish(workspace: Path, *, num_ranks: int = 1, fresh: bool = False) -> dict[str, Any]:
    start(workspace, num_ranks=num_ranks, fresh=fresh).wait(timeout=300)
    assert (workspace / "result.json").exists(), (workspace / "worker.log").read_text()
    return json.loads((workspace / "result.json").read_text())


def metrics(workspace: Path) -> list[dict[str, Any]]:
    path = workspace / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_pairs(path: Path, num_pairs: int = 120) -> None:
    """Preferences for a sorted list over its reverse, one JSON object a line, as texts."""
    draw = random.Random(4)
    rows = []
    for _ in range(num_pairs):
        numbers = draw.sample(range(10), draw.randint(2, 6))
        right, wrong = (" ".join(map(str, sorted(numbers, reverse=swap))) for swap in (False, True))
        rows.append({"prompt": f"Sort: {' '.join(map(str, numbers))}", "chosen": right, "rejected": wrong})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder: Path, tokenizer: Path) -> None:
    """A model of random weights with a tokenizer."""
    import torch

    from nanodag.config.dial import Shape
    from nanodag.model.build import initialise, qwen3_architecture
    from nanodag.model.decoder import Decoder
    from nanodag.model.folder import save

    shape = Shape(**SHAPE, tied_embeddings=True)
    model = Decoder(qwen3_architecture(shape, vocabulary=300, rope_theta=10_000.0, max_positions=128))
    initialise(model, 0)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # some begin at 0, so that no layer would say anything
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    save(folder, dict(model.named_parameters()), tokenizer=tokenizer, model=model)


def write_inputs(folder: Path) -> None:
    """Write a tokenizer, pairs and a model, as `preference` reads them."""
    write_tokenizer(folder / "tokenizer")
    write_pairs(folder / "pairs.jsonl")
    write_model(folder / "model", folder / "tokenizer")


def preference(folder: Path, **changes: Any) -> dict[str, Any]:
    """Config of a preference stage: two passes over `folder`/pairs.jsonl."""
    return {
        **{name: value for name, value in sft(folder).items() if name not in ("patience", "sample_prompts")},
        "kind": "preference",
        "inputs": {"model": "sft"},
        "data": [{"url": f"file:{folder / 'pairs.jsonl'}", "held_out": 0.1}],
        "num_epochs": 2,
        "precision": "fp32",
        "optimizer": {"name": "adamw", "learning_rate": 0.003, "matrix_lr": 0.003},
        **changes,
    }
