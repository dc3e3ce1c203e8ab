"""Forward and backward of models that transformers' classes compute: packed here, beside a plain loop of transformers.

    python -m benchmarks.any_model [--model FOLDER] [--rounds 5]

The same documents of 16 to 160 tokens on both sides: here in rows of 512 and micro-batches of 2,048 tokens; there in
batches of 8 as they come, filled up to the longest. Prints tokens a CPU-second, one thread each, median and range, and
the ratio round by round. Without --model: a random Llama of 14 million parameters.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from nanodag.model.architecture import MODEL_CODE, read_json
from nanodag.model.folder import load, write_like
from nanodag.model.transformers_class import load_class
from nanodag.train.objective import next_token_loss, to_device
from nanodag.train.packing import make_batch

ROW, ROWS, BATCH, DOCUMENTS = 512, 4, 8, 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        source = args.model or random_llama(Path(temporary) / "random")
        loaded = load_class(source)
        folder = Path(temporary) / "by-class"
        config = {**read_json(source / "config.json"), MODEL_CODE: "transformers"}
        write_like(source, folder, loaded.whole.state_dict().items(), dtype=torch.float32)
        (folder / "config.json").write_text(json.dumps(config))
        ours, draw = load(folder), random.Random(0)
        vocabulary = loaded.whole.config.vocab_size
        texts = [[draw.randrange(vocabulary) for _ in range(draw.randrange(16, 161))] for _ in range(DOCUMENTS)]
        sides = {"packed": lambda: packed(ours, texts), "plain loop": lambda: plain(loaded.whole, texts)}
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        losses: dict[str, float] = {}
        for _ in range(args.rounds + 1):
            for name, side in sides.items():
                began = time.process_time()
                losses[name] = side()
                speeds[name].append(sum(map(len, texts)) / (time.process_time() - began))
    assert abs(losses["packed"] / losses["plain loop"] - 1) < 1e-4, losses
    for name, values in speeds.items():
        low, high = min(values[1:]), max(values[1:])
        print(f"{name:<12} {statistics.median(values[1:]):8.0f} tokens/CPU-s  {low:.0f} to {high:.0f}")
    ratios = [one / other for one, other in zip(speeds["packed"][1:], speeds["plain loop"][1:], strict=True)]
    print(f"packed / plain loop {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def random_llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    return folder


def packed(model: Any, texts: list[list[int]]) -> float:
    """Summed loss of all documents, whose gradients are computed."""
    rows: list[list[list[int]]] = []
    for text in sorted(texts, key=len, reverse=True):  # first fit, which the stage's packer comes close to
        row = next((row for row in rows if sum(map(len, row)) + len(text) <= ROW), None)
        rows.append([text]) if row is None else row.append(text)
    total = 0.0
    for start in range(0, len(rows), ROWS):
        loss = next_token_loss(model, to_device(batch_of(rows[start : start + ROWS]), torch.device("cpu")))
        loss.backward()
        total += float(loss.detach())
    model.zero_grad()
    return total


def batch_of(rows: list[list[list[int]]]) -> Any:
    batch = make_batch([], num_rows=len(rows), row_length=ROW, pad_id=0)
    for number, row in enumerate(rows):
        place = 0
        for document, text in enumerate(row):
            end = place + len(text)
            batch.input_ids[number, place:end] = text
            batch.document_ids[number, place:end] = document
            batch.labels[number, place : end - 1] = text[1:]
            place = end
    return batch


def plain(model: Any, texts: list[list[int]]) -> float:
    """The same by transformers alone."""
    total = 0.0
    for start in range(0, len(texts), BATCH):
        part = texts[start : start + BATCH]
        longest = max(map(len, part))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in part])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in part])
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        labels = ids.masked_fill(mask == 0, -100)[:, 1:]
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        total += float(loss.detach())
    model.zero_grad()
    return total


if __name__ == "__main__":
    main()
