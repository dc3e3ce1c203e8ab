"""Item by item, this project's evaluation and lm-eval's own HFLM: ten benchmarks, one model.

    python benchmarks/agreement.py MODEL_FOLDER --mirror MIRROR [--items 100] [--only gsm8k]

Both get the same items. Ours asks with our forms, our scoring and our sampler; theirs with lm-eval's own task files,
where they are there, its HFLM and Hugging Face's `generate`. Compared is the prediction: the likeliest choice, by sum
and by length, or the written text. An item that differs is printed with both, and how near the two best choices were.
The process fails when fewer than 99.5 % of all predictions are equal. A written answer whose prompt is too long is left
out and counted: ours is not asked, lm-eval cuts the prompt.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanodag.config.kinds.evaluation import BenchmarkConfig, EvalStage
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.harness import run_benchmark

ENOUGH = 0.995
NEW_TOKENS = 32
ONE_EMBEDDED = {"engine": "embedded", "replicas": 1, "max_batch": 64, "cache_bytes": 2 << 30}
# benchmark -> source, our form, lm-eval's
CASES = {
    "arc_easy": ("hub:allenai/ai2_arc/ARC-Easy:validation", "arc_easy", "lm_eval:arc/arc_easy.yaml"),
    "arc_challenge": (
        "hub:allenai/ai2_arc/ARC-Challenge:validation",
        "arc_challenge",
        "lm_eval:arc/arc_challenge.yaml",
    ),
    "piqa": ("hub:baber/piqa/default:validation", "piqa", "lm_eval:piqa/piqa.yaml"),
    "winogrande": ("hub:allenai/winogrande/winogrande_xl:validation", "winogrande", "lm_eval:winogrande/default.yaml"),
    "mmlu": ("hub:cais/mmlu/all:test", "mmlu", "mmlu"),
    "openbookqa": ("hub:allenai/openbookqa/main:validation", None, "lm_eval:openbookqa/openbookqa.yaml"),
    "commonsense_qa": ("hub:tau/commonsense_qa:validation", None, "lm_eval:commonsense_qa/default.yaml"),
    "sciq": ("hub:allenai/sciq:validation", None, "lm_eval:sciq/sciq.yaml"),
    "gsm8k": ("hub:openai/gsm8k/main:test", "gsm8k", "gsm8k"),
    "humaneval": ("hub:openai/openai_humaneval/openai_humaneval:test", "humaneval", "humaneval"),
    "math500": ("hub:HuggingFaceH4/MATH-500:test", "math500", "math500"),
    "ifeval": ("hub:google/IFEval:train", "ifeval", "ifeval"),
}


class Theirs(HFLM):
    """lm-eval's model class, with what the harness sets on a model."""

    is_chat = False
    under_way: Any = None

    def __init__(self, *, new_tokens: int, **more: Any) -> None:
        self._new_tokens = new_tokens
        super().__init__(**more)

    @property
    def max_gen_toks(self) -> int:
        return self._new_tokens

    def switch_template(self, switches: Any) -> None:
        """No chat here."""


def predictions(model: Any, name: str, form: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """By item, what the model answers: a text, or the number of the likeliest choice by sum and by length."""
    config = BenchmarkConfig(name=name, form=form, source=CASES[name][0], limit=args.items)
    result = run_benchmark(model, config, chat=False, seed=0, mirror=str(args.mirror), folder=folder)
    found = {}
    for record in result.records:
        if "logprobs" in record:
            scores = record["logprobs"]
            lengths = [len(choice.strip()) for choice in record["choices"]]
            by_length = [score / length for score, length in zip(scores, lengths, strict=True)]
            cut = " (its context was cut)" if record.get("too_long") else ""
            found[record["id"]] = (scores.index(max(scores)), by_length.index(max(by_length)), scores, cut)
        else:
            found[record["id"]] = () if record.get("too_long") else (record["output"],)
    return found


def compare(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[int, int]:
    """How many predictions are equal, of how many; prints those that are not."""
    assert ours.keys() == theirs.keys()
    asked = {item: answer for item, answer in ours.items() if answer}
    if len(asked) < len(ours):
        print(f"  {name}: {len(ours) - len(asked)} prompts are too long")
    num_equal = 0
    for item, own in asked.items():
        other = theirs[item]
        is_equal = own[:2] == other[:2]
        num_equal += is_equal
        if not is_equal and len(own) > 1:
            best = sorted(own[2], reverse=True)
            apart = f"the two best are {best[0] - best[1]:.4f} nats apart"
            print(f"  {name} {item}: {own[:2]} and {other[:2]}; {apart}{own[3]}")
        elif not is_equal:
            print(f"  {name} {item}: {own[0]!r} and {other[0]!r}")
    return num_equal, len(asked)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--mirror", type=Path, required=True)
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    asked = {"precision": "fp32", "device": "cpu", "threads": 1, "micro_batch_tokens": 1024, "sampler": ONE_EMBEDDED}
    stage = EvalStage.of(kind="eval", benchmarks=[{"name": name} for name in CASES], max_new_tokens=NEW_TOKENS, **asked)
    ours = EvaluatedModel(args.model, stage)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # Ours ends a text where the next document starts, too; `generate` would write that document as well.
    model.generation_config.eos_token_id = sorted({tokenizer.eos_token_id, tokenizer.bos_token_id} - {None})
    theirs = Theirs(pretrained=model, tokenizer=tokenizer, batch_size=16, new_tokens=NEW_TOKENS)
    equal = total = 0
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as other:
        for name in args.only or CASES:
            _, form, their_form = CASES[name]
            began = time.process_time()
            found = predictions(ours, name, form or their_form, args, Path(own))
            between = time.process_time()
            num_equal, num_items = compare(name, found, predictions(theirs, name, their_form, args, Path(other)))
            seconds = f"{between - began:.1f} and {time.process_time() - between:.1f} CPU-s"
            print(f"{name}: {num_equal} of {num_items} predictions equal; {seconds}", flush=True)
            equal, total = equal + num_equal, total + num_items
    print(f"all: {equal} of {total}, {100 * equal / total:.2f} %")
    return 0 if equal >= ENOUGH * total else 1


if __name__ == "__main__":
    raise SystemExit(main())
