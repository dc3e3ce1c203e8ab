"""Retrieval of a needle before and after a model is declared for four times its positions.

    python -m benchmarks.needle --seeds 1 2 3

A text: pairs of a capital letter and a digit, hidden among dots; then all letters four times, in other orders, each
followed by its digit. A model learns to answer on texts of 128 tokens, one token a character. Measured: the share of
right digits where a letter comes the second time, on 200 unseen texts of 128 and of 512 tokens. The model is asked as
it is, and extended to 512 positions by each way, before a stage on texts of 512 tokens and after it. Chance is a tenth.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from nanodag.config.pipeline import read_stage
from nanodag.host.processor import usable_cores
from nanodag.model.extension import extended
from nanodag.model.folder import load
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.encoding import Encoding
from nanodag.worker.job import Job, write_job
from nanodag.worker.launch import worker_environment

SHORT, LONG, PAIRS, TIMES = 128, 512, 6, 4
SHAPE = {"depth": 2, "width": 64, "num_heads": 4, "num_kv_heads": 4, "head_width": 16, "mlp_width": 192}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of the short stage")
    parser.add_argument("--more", type=int, default=1_000_000, help="of the stage that extends")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/nanodag-needle"), help="what is done there is kept")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer({bytes([value]): value for value in range(256)}, options.folder / "tokenizer")
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in options.seeds:
        base = _train(options, "short", SHORT, options.tokens, seed, {**SHAPE, "max_positions": SHORT})
        found.setdefault("as it is", []).append(_scores(base))
        for by in ("yarn", "ntk"):
            changed = extended(base, options.folder / f"{by}-{seed}", positions=LONG, by=by)
            found.setdefault(f"{by}, before", []).append(_scores(changed))
            shape = {"extend_to": LONG, "extend_by": by}
            found.setdefault(f"{by}, after", []).append(
                _scores(_train(options, by, LONG, options.more, seed, shape, base))
            )
    print(f"| model | {SHORT} tokens | {LONG} tokens | by seed, {LONG} tokens |\n|---|---|---|---|")
    for name, scores in found.items():
        short, long = (statistics.mean(score[n] for score in scores) for n in (0, 1))
        print(f"| {name} | {short:.1%} | {long:.1%} | {', '.join(f'{score[1]:.1%}' for score in scores)} |")


def _text(draw: random.Random, length: int) -> str:
    """One text of length - 1 characters; the document's first token is the tokenizer's."""
    letters = draw.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", PAIRS)
    digits = {letter: draw.choice("0123456789") for letter in letters}
    room = length - 1 - 2 * PAIRS * (1 + TIMES)
    hay = ["."] * room
    places = sorted(draw.sample(range(room + 1), PAIRS), reverse=True)
    for letter, place in zip(letters, places, strict=True):
        hay[place:place] = [letter, digits[letter]]
    asked = [letter for _ in range(TIMES) for letter in draw.sample(letters, PAIRS)]
    return "".join(hay) + "".join(letter + digits[letter] for letter in asked)


def _train(
    options: argparse.Namespace, name: str, length: int, tokens: int, seed: int, shape: dict[str, Any], base: Any = None
) -> Path:
    """Run a pretrain stage in a folder of its own, unless it was; returns its model."""
    folder = options.folder / f"{name}-{length}-{tokens}-{seed}"
    if not (folder / "result.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        draw, rows = random.Random(f"{name} {seed}"), folder / "texts.jsonl"
        with rows.open("w") as stream:
            stream.writelines(json.dumps({"text": _text(draw, length)}) + "\n" for _ in range(tokens // length + 1))
        threads = usable_cores()
        stage = {
            "kind": "pretrain", "seed": seed, "data": [{"url": f"file:{rows}"}], "shape": shape,
            "inputs": {"tokenizer": "tokenizer"} if base is None else {"model": "short"},
            "resources": {"num_ranks": 1, "threads": threads, "device": "cpu"}, "precision": "fp32", "compile": False,
            "sequence_length": length, "batch_tokens": 2048, "micro_batch_tokens": 2048, "horizon_tokens": tokens,
            "optimizer": {"name": "muon", "learning_rate": 0.01, "matrix_lr": 0.02 if base is None else 0.005},
            "validation_tokens": 0, "checkpoint_every": 10_000,
        }  # fmt: skip
        inputs = {"tokenizer": options.folder / "tokenizer"} if base is None else {"model": base}
        job = Job(name=name, run="needle", config=read_stage(stage), inputs=inputs, workspace=folder)
        command = [sys.executable, "-W", "ignore", "-m", "nanodag.train", str(write_job(job))]
        with (folder / "worker.log").open("ab") as out:
            subprocess.run(command, env=worker_environment(threads), stdout=out, stderr=out, check=True)
    return folder / "output"


def _scores(folder: Path) -> tuple[float, float]:
    """The share of right digits on short and on long texts."""
    model, encoding = load(folder), Encoding(folder)
    return tuple(_score(model, encoding, length) for length in (SHORT, LONG))  # type: ignore[return-value]


def _score(model: Any, encoding: Encoding, length: int) -> float:
    draw, right = random.Random(f"unseen {length}"), []
    for _ in range(25):
        ids = torch.tensor([[encoding.bos_id, *encoding.encode(_text(draw, length))] for _ in range(8)])
        assert ids.shape[1] == length
        for row in ids[:, None]:
            with torch.no_grad():
                logits = model(row, torch.arange(length)[None], torch.zeros_like(row), want="logits")[0]
            asked = range(
                length - 2 * PAIRS * TIMES, length - 2 * PAIRS * (TIMES - 1), 2
            )  # by which nothing near was told
            right += [int(logits[place].argmax()) == int(row[0, place + 1]) for place in asked]
    return statistics.mean(right)


if __name__ == "__main__":
    main()
