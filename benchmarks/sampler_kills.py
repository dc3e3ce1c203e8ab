"""What lost samplers cost an RL stage: `python -m benchmarks.sampler_kills [--steps 40] [--every 20] [--rounds 1]`.

An RL stage with two embedded samplers, once undisturbed and once with a random one of the two killed (SIGKILL) every 20
seconds, in turn. A random model of 0.9 million parameters with bytes as tokens, prompts that it cannot answer, a reward
with spread; the trainer has one rank.

Printed: wall seconds of both sides and their ratio, CPU-seconds of all their processes, how many samplers were killed,
and whether the ledgers and the weights are the same: nothing may be lost, and a deterministic sampler leaves no trace.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanodag.config.derive_sampler import derive_sampler
from nanodag.config.kinds.rl import RLStage
from nanodag.host.machine import detect
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.worker.job import Job, write_job
from nanodag.worker.launch import worker_environment

REWARD = '''
def letters(prompt, completion):
    """Share of ASCII letters."""
    return sum(c.isascii() and c.isalpha() for c in completion) / max(len(completion), 1)
'''
LIMIT_S = 3600.0


@dataclass(frozen=True)
class Side:
    """One stage that was run."""

    wall_s: float
    cpu_s: float
    num_kills: int
    ledger: str
    weights: str


def save_model(folder: Path) -> None:
    """A Qwen3 of random weights, with a tokenizer of bytes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=266,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer({bytes([value]): value for value in range(256)}, folder)


def make_job(folder: Path, model: Path, num_steps: int) -> Job:
    """The stage: each step 8 prompts x 16 samples x 128 tokens."""
    workspace = folder / "workspace"
    workspace.mkdir(parents=True)
    (folder / "kills_reward.py").write_text(REWARD)
    prompts = [{"prompt": f"word {n}", "answer": "x", "prompt_id": f"p{n}"} for n in range(200)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    config: dict[str, Any] = {
        "kind": "rl",
        "inputs": {},
        "data": [{"url": f"file:{folder}/prompts.jsonl", "held_out": 0.1}],
        "seed": 7,
        "resources": {"num_ranks": 1, "threads": 1, "device": "cpu"},
        "reward": "kills_reward:letters",
        "sampler": {"context": 256, "max_batch": 64, "replicas": 2},
        "prompts_per_step": 8,
        "samples_per_prompt": 16,
        "max_new_tokens": 128,
        "num_steps": num_steps,
        "learning_rate": 1e-4,
        "precision": "fp32",
        "eval_every": num_steps,
        "eval_prompts": 4,
        "checkpoint_every": 10,
        "micro_batch_tokens": 4096,
        "tracking": [],
    }
    stage = derive_sampler("rl", RLStage.of(**config), detect(), None, {})
    job = Job(name="rl", run="bench", config=stage, inputs={"model": model}, workspace=workspace)
    write_job(job)
    return job


def samplers_of(pid: int) -> list[int]:
    """The samplers among a process's children."""
    found = []
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, entry.read_text().split()):
            if b"nanodag.sampler" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def kill_every(seconds: float, process: "subprocess.Popen[bytes]", stop: threading.Event, kills: list[int]) -> None:
    """Until told to stop: a random one of the process's samplers, so often."""
    draw = random.Random(0)
    while not stop.wait(seconds):
        try:
            victim = draw.choice(samplers_of(process.pid))
            os.kill(victim, signal.SIGKILL)
        except (IndexError, OSError):  # none is there at this moment
            continue
        kills.append(victim)


def run_side(job: Job, *, kill_every_s: float) -> Side:
    """Run the stage to its end. kill_every_s: 0 for an undisturbed one."""
    environment = worker_environment(1)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(job.workspace.parent), environment.get("PYTHONPATH")])
    )
    before, began = os.times(), time.monotonic()
    kills: list[int] = []
    stop = threading.Event()
    with (job.workspace / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "nanodag.rl", str(job.workspace / "job.json")],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    killer = threading.Thread(target=kill_every, args=(kill_every_s, process, stop, kills))
    if kill_every_s:
        killer.start()
    try:
        code = process.wait(LIMIT_S)
    finally:
        stop.set()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    wall_s, after = time.monotonic() - began, os.times()
    if code != 0:
        raise SystemExit((job.workspace / "worker.log").read_text()[-4000:])
    return Side(
        wall_s=wall_s,
        cpu_s=sum(getattr(after, n) - getattr(before, n) for n in ("children_user", "children_system")),
        num_kills=len(kills),
        ledger=(job.records / "ledger.jsonl").read_text(),
        weights=hashlib.sha256((job.output / "model.safetensors").read_bytes()).hexdigest(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        save_model(model)
        for number in range(asked.rounds):
            sides = []
            for side, every in (("undisturbed", 0.0), ("killed", asked.every)):
                sides.append(
                    run_side(make_job(Path(name) / f"{side}-{number}", model, asked.steps), kill_every_s=every)
                )
                print(f"{side:12} {sides[-1].wall_s:6.1f} s wall, {sides[-1].cpu_s:6.1f} CPU-s", flush=True)
            quiet, killed = sides
            lines = len(killed.ledger.splitlines())
            print(f"{killed.num_kills} samplers killed; wall {killed.wall_s / quiet.wall_s:.2f} times, ", end="")
            print(f"CPU {killed.cpu_s / quiet.cpu_s:.2f} times", flush=True)
            print(f"ledger ({lines} lines) the same: {killed.ledger == quiet.ledger}, ", end="")
            print(f"weights the same: {killed.weights == quiet.weights}", flush=True)


if __name__ == "__main__":
    main()
