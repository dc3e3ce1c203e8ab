"""One GRPO step here and in TRL: the same model, prompts, samples and rewards; CPU-seconds by PROTOCOL.md.

    python benchmarks/rl_vs_trl.py --trl-python /path/to/an/environment/with/trl/bin/python [--rounds 3] [--threads 1]
        [--model /path/to/a/hugging-face/model] [--prompt-tokens 31]

The model is a Qwen2 of 6.17 million parameters with random weights and a vocabulary of 4,096, or the one that --model
names; a step is 8 prompts of 31 tokens (or --prompt-tokens, for a longer template) x 8 samples x 64 new tokens. The
reward is a hash of the completion, so every group has spread. Ours is the whole stage (`python -m nanodag.rl`:
controller, ZeRO-3 trainer, embedded sampler over HTTP, reward process, weight sync each step); TRL's is GRPOTrainer
with Hugging Face generation. CPU-seconds are of all processes of a side.
"""

import argparse
import hashlib
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
VOCABULARY, WIDTH, INNER, LAYERS, HEADS = 4096, 256, 768, 6, 4
PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 64
WARM_UP, MEASURED = 3, 8
MAX_DRAWS = 100_000
TICK = os.sysconf("SC_CLK_TCK")
COLUMNS = ("generation", "training", "rest", "all", "wall", "cold")  # cold: from start to the end of the first step


def prepare(folder: Path, model: Path | None, prompt_tokens: int) -> None:
    """Write the model with its tokenizer, and prompts of exactly so many tokens."""
    from nanodag.tokenizer.chat import load_renderer

    text = list(pydoc_data.topics.topics.values())
    shutil.rmtree(folder / "model", ignore_errors=True)
    if model is None:
        write_random_model(folder / "model", text)
    else:
        copy_model(model, folder / "model")
    renderer, words, chosen = load_renderer(folder / "model"), " ".join(text).split(), []
    draw = random.Random(0)
    for _ in range(MAX_DRAWS):
        start = draw.randrange(len(words) - 40)
        question = " ".join(words[start : start + draw.randrange(3, 28)])
        if len(renderer.prompt([{"role": "user", "content": question}])) == prompt_tokens:
            chosen.append(question)
        if len(chosen) == 64:
            break
    else:
        empty = len(renderer.prompt([{"role": "user", "content": ""}]))
        raise SystemExit(
            f"{len(chosen)} of 64 prompts came to {prompt_tokens} tokens in {MAX_DRAWS} draws; an empty one has "
            f"{empty} by the model's chat template. Give --prompt-tokens some 20 more than that."
        )
    rows = [{"prompt": question, "answer": "", "prompt_id": str(n)} for n, question in enumerate(chosen)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "hash_reward.py").write_text(
        "import hashlib\n\n\ndef of(prompt, completion):\n"
        "    return hashlib.blake2b(completion.encode(), digest_size=4).digest()[0] / 255\n"
    )


def write_random_model(folder: Path, text: list[str]) -> None:
    """The Qwen2 with random weights, and a tokenizer fitted on the text."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from nanodag.tokenizer.bpe import save_tokenizer, train_bpe

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(train_bpe(iter(text), VOCABULARY), folder)


def copy_model(source: Path, folder: Path) -> None:
    """A Hugging Face model as it is; one without a chat template gets a plain one, which both sides need."""
    folder.mkdir()
    for path in filter(Path.is_file, source.iterdir()):
        shutil.copyfile(path, folder / path.name)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if "chat_template" not in settings and not (folder / "chat_template.jinja").exists():
        plain = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
        (folder / "chat_template.jinja").write_text(plain)


# Ours


def ours(folder: Path, setting: str, threads: int) -> list[dict[str, float]]:
    """CPU-seconds of each measured step of the stage: generation, training, rest, all. setting: fp32, bf16, or
    bf16-training with a sampler in fp32, whose compiled steps are faster than torch's in bf16 for so small a model."""
    from nanodag.config.derive_sampler import derive_sampler
    from nanodag.config.kinds.rl import RLStage
    from nanodag.host.machine import detect
    from nanodag.worker.job import Job, write_job
    from nanodag.worker.launch import worker_environment

    precision = setting.removesuffix("-training")
    sampled = "fp32" if setting == "bf16-training" else precision
    workspace = folder / "workspace"
    shutil.rmtree(workspace, ignore_errors=True)
    workspace.mkdir()
    config = RLStage.of(
        kind="rl",
        data=[f"file:{folder}/prompts.jsonl"],
        seed=0,
        resources={"num_ranks": 1, "threads": threads, "device": "cpu"},
        reward="hash_reward:of",
        sampler={"context": 128, "max_batch": PROMPTS * SAMPLES, "precision": sampled, "deterministic": False},
        prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES,
        max_new_tokens=NEW_TOKENS,
        num_steps=WARM_UP + MEASURED,
        precision=precision,
        micro_batch_tokens=8192,
        activation_checkpointing=False,
        compile=False,
        eval_prompts=0,
        checkpoint_every=1000,
    )
    config = derive_sampler("rl", config, detect(), None, {})
    job = Job(name="rl", run="benchmark", config=config, inputs={"model": folder / "model"}, workspace=workspace)
    environment = worker_environment(threads) | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    with (workspace / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "nanodag.rl", str(write_job(job))],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    marks: list[dict[str, float]] = []
    while process.poll() is None:
        lines = job.metrics_path.read_text().splitlines() if job.metrics_path.exists() else []
        if len(lines) > len(marks):
            marks.append(_cpu_of_group(process.pid) | {"wall": time.monotonic()})
        time.sleep(0.002)
    if process.returncode != 0:
        raise SystemExit((workspace / "worker.log").read_text()[-3000:])
    steps = [json.loads(line) for line in job.metrics_path.read_text().splitlines()]
    out = []
    for index in range(WARM_UP, len(marks)):
        spent = {name: marks[index][name] - marks[index - 1][name] for name in marks[index]}
        out.append(spent | {"tokens": steps[index]["trained_tokens"], "cold": marks[0]["all"]})
    return out


def _cpu_of_group(group: int) -> dict[str, float]:
    """CPU-seconds so far of each kind of process in a group; those that ended are counted by their parent."""
    spent = {"generation": 0.0, "training": 0.0, "rest": 0.0}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[2]) != group:
            continue
        kind = "training" if b"rl.trainer" in command else "generation" if b"nanodag.sampler" in command else "rest"
        spent[kind] += (int(fields[11]) + int(fields[12])) / TICK
    return spent | {"all": sum(spent.values())}


# TRL: this part runs in TRL's own environment, and imports nothing of ours


def trl(folder: Path, setting: str, threads: int) -> list[dict[str, float]]:
    """CPU-seconds of each measured step of GRPOTrainer. setting: fp32, bf16 (autocast) or bf16-weights."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    dtype = torch.bfloat16 if setting == "bf16-weights" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)

    def reward(completions: list[Any], **unused: Any) -> list[float]:
        texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
        return [hashlib.blake2b(text.encode(), digest_size=4).digest()[0] / 255 for text in texts]

    steps: list[dict[str, float]] = []

    class Watch(TrainerCallback):
        began, wall, generation = 0.0, 0.0, 0.0

        def on_step_begin(self, *unused: Any, **also: Any) -> None:
            self.began, self.wall, self.generation = time.process_time(), time.monotonic(), 0.0

        def on_step_end(self, *unused: Any, **also: Any) -> None:
            spent, wall = time.process_time() - self.began, time.monotonic() - self.wall
            training = spent - self.generation
            split = {"generation": self.generation, "training": training, "rest": 0.0, "all": spent, "wall": wall}
            steps.append(split | {"cold": steps[0]["cold"] if steps else time.process_time()})

    watch = Watch()
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        max_steps=WARM_UP + MEASURED,
        learning_rate=1e-6,
        bf16=setting == "bf16",
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        temperature=1.0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[watch],
    )
    generate = trainer._generate_and_score_completions

    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.process_time()
        try:
            return generate(*arguments, **options)
        finally:
            watch.generation += time.process_time() - began

    trainer._generate_and_score_completions = timed
    trainer.train()
    return steps[WARM_UP:]


# Both


def flops(folder: Path, prompt_tokens: int) -> tuple[float, float]:
    """GFLOP of a step's training with each prompt computed once, and of its generation; attention included."""
    config = json.loads((folder / "model" / "config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kept = config["num_attention_heads"], config["num_key_value_heads"]
    inner = heads * (config.get("head_dim") or width // heads)
    layer = 2 * (1 + kept / heads) * width * inner + 3 * width * config["intermediate_size"]
    head = config["vocab_size"] * width
    rows = PROMPTS * (prompt_tokens + SAMPLES * (NEW_TOKENS - 1))
    scored = PROMPTS * SAMPLES * NEW_TOKENS
    own = NEW_TOKENS * (NEW_TOKENS - 1) / 2
    pairs = PROMPTS * (prompt_tokens * (prompt_tokens + 1) / 2 + SAMPLES * (own + (NEW_TOKENS - 1) * prompt_tokens))
    attention = 2 * 2 * inner * pairs * layers
    training = 3 * (2 * (rows * layers * layer + scored * head) + attention)
    generation = 2 * (rows * layers * layer + scored * head) + attention
    return training / 1e9, generation / 1e9


def matmul_peak(precision: str, threads: int) -> float:
    """GFLOP a CPU-second of square matrix products of 1,024."""
    import torch

    from nanodag.model.cpu_linear import times_transposed

    torch.set_num_threads(threads)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    left, right = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    best = 0.0
    for _ in range(5):
        began = time.process_time()
        for _ in range(20):
            times_transposed(left, right)
        best = max(best, 20 * 2 * 1024**3 / (time.process_time() - began) / 1e9)
    return best


def in_child(python: str, side: str, folder: Path, setting: str, threads: int) -> list[dict[str, float]]:
    """Run one side in a process of its own; returns its steps."""
    from nanodag.worker.launch import worker_environment

    environment = worker_environment(threads) | {"PYTHONWARNINGS": "ignore"}
    command = [python, str(Path(__file__).resolve()), "--side", side, "--folder", str(folder)]
    command += ["--setting", setting, "--threads", str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{side} {setting} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def median_of(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", help="a Python that has trl; without it only our side runs")
    parser.add_argument("--model", type=Path, help="a folder with a Hugging Face model, in place of the random one")
    parser.add_argument("--prompt-tokens", type=int, default=31, help="tokens of a prompt with its template")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/nanodag-rl-vs-trl"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=("ours", "trl"))
    parser.add_argument("--setting", default="fp32")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    args = parser.parse_args()
    if args.side:
        side = ours if args.side == "ours" else trl
        print("\n" + json.dumps(side(args.folder, args.setting, args.threads)))
        return
    sys.path.insert(0, str(ROOT))
    args.folder.mkdir(parents=True, exist_ok=True)
    prepare(args.folder, args.model, args.prompt_tokens)
    own = ["bf16-training"] if "bf16" in args.precisions else []
    plans = [("ours", setting) for setting in [*args.precisions, *own]]
    if args.trl_python:
        plans += [("trl", p) for p in args.precisions] + (
            [("trl", "bf16-weights")] if "bf16" in args.precisions else []
        )
    found: dict[tuple[str, str], list[dict[str, float]]] = {plan: [] for plan in plans}
    for number in range(args.rounds):
        for side, setting in plans:
            python = sys.executable if side == "ours" else args.trl_python
            steps = in_child(python, side, args.folder, setting, args.threads)
            found[side, setting].append(median_of(steps))
            print(f"round {number + 1} {side} {setting}: {found[side, setting][-1]}", flush=True)
    report(found, args.folder, args.threads, args.prompt_tokens)


def report(
    found: dict[tuple[str, str], list[dict[str, float]]], folder: Path, threads: int, prompt_tokens: int
) -> None:
    training, generation = flops(folder, prompt_tokens)
    print(
        f"\none step, CPU-seconds of all processes, {threads} threads, median of rounds (each the median of {MEASURED})"
    )
    print(
        "| side | setting | generation | training | rest | step | range | wall | cold start |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    middle = {plan: median_of(rounds) for plan, rounds in found.items()}
    for (side, setting), m in middle.items():
        every = [one["all"] for one in found[side, setting]]
        print(
            f"| {side} | {setting} | {m['generation']:.2f} | {m['training']:.2f} | {m['rest']:.2f} | {m['all']:.2f} | "
            f"{min(every):.2f} to {max(every):.2f} | {m['wall']:.2f} | {m['cold']:.1f} |"
        )
    print(f"\nFLOPs of a step, prompts computed once: training {training:.0f} G, generation {generation:.0f} G")
    for setting in {s for side, s in middle if side == "ours"}:
        peak = matmul_peak(setting.removesuffix("-training"), threads)
        m = middle["ours", setting]
        print(
            f"{setting}: matmul peak {peak:.0f} GFLOP a CPU-second; floor {(training + generation) / peak:.2f} CPU-s; "
            f"ours reaches {training / m['training'] / peak:.0%} of the peak in training, "
            f"{generation / m['generation'] / peak:.0%} in generation"
        )
    theirs = {s: m["all"] for (side, s), m in middle.items() if side == "trl"}
    mine = {s: m["all"] for (side, s), m in middle.items() if side == "ours"}
    for setting in mine.keys() & theirs.keys():
        pairs = [t["all"] / o["all"] for t, o in zip(found["trl", setting], found["ours", setting], strict=True)]
        print(
            f"{setting} against {setting}: {statistics.median(pairs):.2f} times ({min(pairs):.2f} to {max(pairs):.2f})"
        )
    if theirs:
        print(f"best against best: {min(theirs.values()) / min(mine.values()):.2f} times")


if __name__ == "__main__":
    main()
