"""DPO, or a reward model, here and in TRL: the same model and pairs; CPU-seconds by PROTOCOL.md, and losses by step.

    python benchmarks/preference_vs_trl.py --trl-python /path/to/an/environment/with/trl/bin/python [--rounds 3]
        [--model /path/to/a/hugging-face/model] [--precision fp32] [--curves] [--kind reward_model]

A pair is a prompt of 64 tokens and two answers of 16 to 160. Counted from the loaded model to the last step: tokens,
reference passes (over all pairs, before training) and steps, of one process a side. The model is the random Qwen2 of
rl_vs_trl.py, or the one that --model names. TRL's reference passes are those of precompute_ref_log_probs.

--curves: all of 8 pairs in each of 100 steps, a row each, so that no order counts; the largest distance of two losses
is printed. Answers have 90 to 150 tokens there. A reward model is compared by its curve alone; both begin with a head
of zeros.
"""

import argparse
import json
import os
import pydoc_data.topics
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAIRS, STEPS, PAIRS_A_STEP, PROMPT = 64, 8, 8, 64
CURVE_PAIRS, CURVE_STEPS = 8, 100
RATE, BETA = 1e-5, 0.1


def prepare(folder: Path, model: Path | None, *, curves: bool) -> None:
    """Write the model with its tokenizer, and pairs whose prompts have so many tokens."""
    from benchmarks.rl_vs_trl import copy_model, write_random_model
    from nanodag.tokenizer.chat import load_renderer

    text = list(pydoc_data.topics.topics.values())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if model is None:
        write_random_model(folder / "model", text)
    else:
        copy_model(model, folder / "model")
    renderer, draw = load_renderer(folder / "model"), random.Random(0)
    # Without digits: transformers 5 splits a Qwen2's text by rules of its own, whatever tokenizer.json says.
    words = [word for word in " ".join(text).split() if word.isascii() and not any(map(str.isdigit, word))]

    def some(num_tokens: int) -> str:
        start = draw.randrange(len(words) - 200)
        return renderer._encoding.decode(renderer._encoding.encode(" ".join(words[start : start + 200]))[:num_tokens])

    rows: list[dict[str, Any]] = []
    shortest, longest = (90, 150) if curves else (16, 160)
    while len(rows) < (CURVE_PAIRS if curves else PAIRS):
        prompt = [{"role": "user", "content": some(PROMPT - draw.randrange(1, 50))}]
        if len(renderer.prompt(prompt)) == PROMPT:
            answers = {
                n: [{"role": "assistant", "content": some(draw.randint(shortest, longest))}]
                for n in ("chosen", "rejected")
            }
            rows.append({"prompt": prompt, **answers})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours(folder: Path, precision: str, curves: bool, kind: str) -> dict[str, Any]:
    from nanodag.config.pipeline import read_stage
    from nanodag.train.loop import Loop
    from nanodag.train.setup import PreparedStage
    from nanodag.worker.job import Job

    length = 384 if curves else 512
    settings: dict[str, Any] = {
        "kind": kind,
        "inputs": {"model": "model"},
        "seed": 0,
        "data": [f"file:{folder}/pairs.jsonl"],
        "resources": {"num_ranks": 1, "threads": int(os.environ["OMP_NUM_THREADS"]), "device": "cpu"},
        "precision": precision,
        "sequence_length": length,
        # As many tokens a step as TRL's pairs have here; for curves one step is one pass over all pairs.
        "batch_tokens": 0,
        "micro_batch_tokens": 0,
        "validation_tokens": 0,
        "compile": False,
        "activation_checkpointing": False,
        "log_every": 1,
        "checkpoint_every": 10_000,
        "schedule": {"warmup_fraction": 0.0, "decay_fraction": 0.0},
        "optimizer": {"name": "adamw", "learning_rate": RATE, "matrix_lr": RATE, "betas": [0.9, 0.999]},
        **({"loss": {"name": "dpo", "options": {"beta": BETA}}} if kind == "preference" else {}),
        "horizon_tokens": 0,
        "max_steps": CURVE_STEPS if curves else 0,
        "num_epochs": CURVE_STEPS if curves else 1,
    }
    rows = CURVE_PAIRS if curves else 5
    settings["batch_tokens"] = settings["micro_batch_tokens"] = rows * length
    job = Job(
        name="dpo", run="b", config=read_stage(settings), inputs={"model": folder / "model"}, workspace=folder / "w"
    )
    job.workspace.mkdir()
    began, wall = time.process_time(), time.perf_counter()
    stage = PreparedStage(job)
    loop, lines = Loop(stage), list[dict[str, Any]]()
    loop.write = lambda step, **values: lines.append({"step": step, **values})
    loop.run()
    spent = {"cpu": time.process_time() - began, "wall": time.perf_counter() - wall}
    losses = [line["loss"] for line in lines if "loss" in line]
    return {**spent, "losses": losses, "steps": stage.num_steps, "pairs": loop.progress.labels}


def trl(folder: Path, precision: str, curves: bool, padding_free: bool) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    dtype = torch.float32 if curves or precision == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    size = CURVE_PAIRS if curves else PAIRS_A_STEP
    further = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": size, "padding_free": padding_free}
    config = DPOConfig(**arguments(folder, curves), beta=BETA, **further)
    return trained(DPOTrainer, model, tokenizer, config, folder)


def trl_reward_model(folder: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "model", dtype=torch.float32, num_labels=1, trust_remote_code=False
    )
    torch.nn.init.zeros_(model.score.weight)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = next(t for t in (tokenizer.unk_token, tokenizer.convert_ids_to_tokens(0)) if t)
    config = RewardConfig(**arguments(folder, curves=True), disable_dropout=True)
    return trained(RewardTrainer, model, tokenizer, config, folder)


def arguments(folder: Path, curves: bool) -> dict[str, Any]:
    """Of either trainer's config."""
    return {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": CURVE_PAIRS if curves else PAIRS_A_STEP,
        "num_train_epochs": CURVE_STEPS if curves else 1,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.999,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "fp16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "max_length": None,
        "disable_tqdm": True,
    }


def trained(trainer_class: Any, model: Any, tokenizer: Any, config: Any, folder: Path) -> dict[str, Any]:
    """What training took, from the trainer's making on, and the loss of each step."""
    import torch
    from datasets import load_dataset

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    pairs = load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train", cache_dir=str(folder / "c"))
    began, wall = time.process_time(), time.perf_counter()
    trainer = trainer_class(model=model, args=config, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    spent = {"cpu": time.process_time() - began, "wall": time.perf_counter() - wall}
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    steps = trainer.state.global_step
    return {**spent, "losses": losses, "steps": steps, "pairs": steps * config.per_device_train_batch_size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/preference_vs_trl"))
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--kind", choices=("preference", "reward_model"), default="preference")
    parser.add_argument("--side", choices=("ours", "trl", "trl-padding-free"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        if options.side == "ours":
            found = ours(options.folder, options.precision, options.curves, options.kind)
        elif options.kind == "reward_model":
            found = trl_reward_model(options.folder)
        else:
            found = trl(options.folder, options.precision, options.curves, options.side != "trl")
        print(json.dumps(found), flush=True)
        os._exit(0)
    if options.kind == "reward_model" and not options.curves:
        parser.error("--kind reward_model is compared with --curves alone")
    results: dict[str, list[dict[str, Any]]] = {}
    sides = ("ours", "trl") if options.curves else ("ours", "trl", "trl-padding-free")
    for _ in range(1 if options.curves else options.rounds):
        for side in sides:
            prepare(options.folder, options.model, curves=options.curves)
            python = sys.executable if side == "ours" else options.trl_python
            command = [python, __file__, *sys.argv[1:], "--side", side]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
            environment |= {"OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
            run = subprocess.run(command, env=environment, capture_output=True, text=True)
            if run.returncode:
                print(f"{side} failed: {run.stderr[-1500:]}")
                continue
            results.setdefault(side, []).append(json.loads(run.stdout.splitlines()[-1]))
    for side, runs in results.items():
        cpu = statistics.median(run["cpu"] for run in runs)
        print(f"{side:17} {cpu:8.1f} CPU-s, {runs[0]['steps']} steps, {runs[0]['pairs']:.0f} pairs", end="")
        print(f", {1000 * cpu / runs[0]['pairs']:.0f} ms a pair; first loss {runs[0]['losses'][0]:.6f}")
    if options.curves:
        one, other = (results[side][0]["losses"] for side in ("ours", "trl"))
        apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
        print(f"{len(one)} steps: last losses {one[-1]:.5f} and {other[-1]:.5f}, at most {apart:.2e} apart")
    else:
        best = min(
            statistics.median(r["cpu"] / r["pairs"] for r in results[side]) for side in results if side != "ours"
        )
        own = statistics.median(run["cpu"] / run["pairs"] for run in results["ours"])
        print(f"{best / own:.2f} times TRL's pairs a CPU-second")


if __name__ == "__main__":
    main()
