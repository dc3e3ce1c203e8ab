"""Difference of trainer and sampler in a mixture of experts, with and without replayed experts.

    python -m benchmarks.router_replay --seeds 1 2 3

A tiny random Qwen3-MoE is trained for a few RL steps by a stage with one rank, whose sampler runs over transformers'
cache one by one. Columns: step; mean size of old less sampler log-probability in nats a token; the largest; each
without and with `router_replay`. Step 1 is of the same weights and rollouts in both. moved: share of tokens of step 1
that the trainer's class routes to other experts in some layer.
"""

import argparse
import statistics
import tempfile
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nanodag.model.attention import document_attention
from nanodag.model.folder import load
from nanodag.model.transformers_model import TransformersModel, replay_routes
from nanodag.rl.rollouts.rollout import read_rollouts
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.worker.job import Job, write_job
from tests.model.model_types import make_tiny, taken_by_transformers
from tests.rl import stages

SIZES = {"hidden_size": 64, "num_experts": 8, "moe_intermediate_size": 64, "head_dim": 16, "norm_topk_prob": True}
STEP = {"prompts_per_step": 7, "samples_per_prompt": 8, "max_new_tokens": 32, "eval_prompts": 0, "filters": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    for precision in ("fp32", "bf16"):
        found: dict[tuple[bool, int, str], list[float]] = {}
        moved = []
        for seed in options.seeds:
            for replays in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    job = _job(Path(folder), seed, precision, options.steps, replays)
                    stages.run(job)
                    for line in stages.metrics(job):
                        for name in ("mismatch_absolute", "mismatch_largest"):
                            found.setdefault((replays, line["step"], name), []).append(line[name])
                    if replays:
                        moved.append(_moved(job, precision))
        print(f"{precision}, moved {', '.join(f'{share:.2%}' for share in moved)}")
        for step in range(1, options.steps + 1):
            cells = [
                f"{statistics.mean(found[replays, step, name]):.2e}"
                for name in ("mismatch_absolute", "mismatch_largest")
                for replays in (False, True)
            ]
            print(f"| {step} | {' | '.join(cells)} |", flush=True)


def _job(folder: Path, seed: int, precision: str, num_steps: int, replays: bool) -> Job:
    make_tiny("qwen3_moe", folder / "moe", vocab_size=stages.VOCABULARY, seed=seed, **SIZES)
    save_tokenizer(stages.BYTES, folder / "moe")
    taken_by_transformers(folder / "moe")
    settings = {**STEP, "num_steps": num_steps, "seed": seed, "precision": precision, "router_replay": replays}
    sampler = {"context": 64, "max_batch": 64, "deterministic": True}
    job = stages.make_job(folder, **settings, learning_rate=1e-3, sampler=sampler, micro_batch_tokens=2048)
    job = replace(job, inputs={"model": folder / "moe"})
    write_job(job)
    return job


def _moved(job: Job, precision: str) -> float:
    model = load(job.inputs["model"])
    replay_routes(model)
    assert isinstance(model, TransformersModel) and model.routing is not None
    if precision == "bf16":
        model = model.bfloat16()
    num_tokens = num_moved = 0
    for rollout in read_rollouts(job.records / "rollouts" / "step-00000001.jsonl"):
        ids = torch.tensor([(*rollout.prompt_token_ids, *rollout.response_token_ids)[:-1]])
        with torch.no_grad():
            model(ids, ids, attend=document_attention(np.zeros(ids.shape, dtype=np.int64)), want="hidden")
        own = model.routing.chosen().numpy()
        kept = np.frombuffer(b64decode(rollout.routed_experts), np.int32).reshape(own.shape)
        num_moved += int((np.sort(own) != np.sort(kept)).any(axis=(1, 2)).sum())
        num_tokens += len(own)
    return num_moved / num_tokens


if __name__ == "__main__":
    main()
