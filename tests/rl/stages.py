"""A whole RL stage, tiny: a model of random weights, a tokenizer of bytes, prompts in a file, a reward with spread."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from nanodag.config.kinds.rl import RLStage
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.worker.job import Job, write_job
from nanodag.worker.launch import worker_environment
from tests.rl.models import save_tiny_model

BYTES = {bytes([value]): value for value in range(256)}
VOCABULARY = 266
REWARD = '''
def vowels(prompt, completion):
    """Share of ASCII letters: an untrained model gets a few, and can learn to write more."""
    return sum(c.isascii() and c.isalpha() for c in completion) / max(len(completion), 1)
'''


def make_job(folder: Path, **config: Any) -> Job:
    """The job of a stage of two steps of 2 prompts x 4 samples x 8 tokens, its files in `folder`."""
    model = save_tiny_model(folder / "model", vocabulary=VOCABULARY)
    save_tokenizer(BYTES, model)
    (folder / "tiny_reward.py").write_text(REWARD)
    prompts = [{"prompt": f"word {n}", "answer": "x", "prompt_id": f"p{n}"} for n in range(11)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    values = {
        "kind": "rl",
        "inputs": {},
        "data": [{"url": f"file:{folder}/prompts.jsonl", "held_out": 0.3}],
        "seed": 7,
        "resources": {"num_ranks": 1, "threads": 1, "device": "cpu"},
        "reward": "tiny_reward:vowels",
        "sampler": {"context": 64, "max_batch": 16},
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "max_new_tokens": 8,
        "num_steps": 2,
        "learning_rate": 1e-2,
        "precision": "fp32",
        "eval_every": 1,
        "eval_prompts": 3,
        "checkpoint_every": 1,
        "micro_batch_tokens": 64,
        "tracking": [],
    }
    workspace = folder / "workspace"
    workspace.mkdir(exist_ok=True)
    job = Job(
        name="rl",
        run="test",
        config=RLStage(**(values | config)),
        inputs={"model": model},
        workspace=workspace,
    )
    write_job(job)
    return job


def start(job: Job) -> "subprocess.Popen[bytes]":
    """The stage's worker, in a process group of its own, writing to worker.log."""
    environment = worker_environment(1)
    paths = [str(job.workspace.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with (job.workspace / "worker.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "nanodag.rl", str(job.workspace / "job.json")],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def run(job: Job) -> None:
    """Run the stage to its end; fails with its log."""
    process = start(job)
    code = process.wait(timeout=300)
    assert code == 0 and (job.workspace / "result.json").exists(), (job.workspace / "worker.log").read_text()[-6000:]


def metrics(job: Job, event: str = "step") -> list[dict[str, Any]]:
    """The lines of one event in metrics.jsonl."""
    written = job.metrics_path.read_text().rpartition("\n")[0]  # a line may be under way
    lines = [json.loads(line) for line in written.splitlines()]
    return [line for line in lines if line["event"] == event]
