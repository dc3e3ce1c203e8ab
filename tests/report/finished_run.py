"""A small finished run, written by hand: base, SFT, RL and a control, each with an evaluation."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanodag.report.plots import page_scripts


def finished_run(folder: Path) -> dict[str, Any]:
    """The context of a report job. `sort`: 10 items, right answers base 0, SFT 4, RL 8, control 5."""
    stages: dict[str, Any] = {}

    def add(name, kind, inputs, *, cost=None, config=None, lines=()):
        files, records = folder / name / "files", folder / name / "records"
        files.mkdir(parents=True)
        records.mkdir()
        write_lines(records / "metrics.jsonl", lines)
        stages[name] = {
            "kind": kind,
            "key": f"{len(stages) + 90:040x}",
            "attempt": "0001",
            "digest": f"{len(stages):064x}",
            "metrics": {},
            "cost": cost or {},
            "config": {"kind": kind, **(config or {})},
            "lineage": {
                label: {"stage": source, **{f: stages[source][f] for f in ("kind", "key", "attempt", "digest")}}
                for label, source in inputs.items()
            },
            "environment": {"revision": "abc", "versions": {"torch": "2.13.0"}},
            "created": 1_795_000_000.0,
            "files": str(files),
            "records": str(records),
        }
        return files

    def add_eval(name, model, right, bits, *, form="problems_chat"):
        config = {"benchmarks": [{"name": "sort"}, {"name": "bits_per_byte"}]}
        files = add(name, "eval", {"model": model}, cost={"seconds": 5.0, "cpu_seconds": 6.0}, config=config)
        write_results(files, right=right, bits=bits, form=form, said=f"{model} says <b>")

    steps = [{"event": "step", "step": n, "total": 3, "time": 0.0, "loss": 3.0 - n, "reward": n / 3} for n in (1, 2, 3)]
    add("tokenizer", "tokenizer", {}, cost={"seconds": 60.0})
    cost = {"seconds": 3600.0, "cpu_seconds": 7000.0, "tokens": 1_500_000, "flops": 2e12, "mfu": 0.31}
    data = [{"url": "file:train.jsonl"}]
    config = {"shape": {"depth": 2}, "resources": {"num_ranks": 2}}
    add("pretrain", "pretrain", {"tokenizer": "tokenizer"}, cost=cost, lines=steps, config=config)
    add_eval("eval_base", "pretrain", 0, 1.5, form="problems")
    add("sft", "sft", {"model": "pretrain"}, config={"data": data, "num_epochs": 3.0})
    add_eval("eval_sft", "sft", 4, 1.6)
    add("control", "sft", {"model": "sft"}, config={"data": data})
    add_eval("eval_control", "control", 5, 1.6)
    add("rl", "rl", {"model": "sft"}, lines=steps, config={"data": data})
    add_eval("eval_rl", "rl", 8, 1.7)
    return {
        "preset": "pocket",
        "description": "By hand.",
        "mirror": "none",
        "origins": {"sft.num_epochs": "override", "pretrain.shape.depth": "preset pocket", "sft.num_epochs!": "said 1"},
        "stages": stages,
    }


def markup_of(page: str) -> str:
    """A page without its own scripts."""
    for text, _ in page_scripts():
        page = page.replace(f"<script>{text}</script>", "")
    return page


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_results(files: Path, *, right: int, bits: float, form: str, said: str) -> None:
    (files / "samples").mkdir()
    sort = [
        {"id": f"s{n}", "scores": {"exact_match": float(n < right)}}
        | {"prompt": f"Sort {n} | x", "target": "1", "output": f"o{n}"}
        for n in range(10)
    ]
    texts = [{"id": f"t{n}", "scores": {"bits_per_byte": bits + n / 10}, "weight": 100} for n in range(12)]
    for name, records in (("sort", sort), ("bits_per_byte", texts)):
        write_lines(files / "samples" / f"{name}.jsonl", records)
    common = {"chat": False, "num_fewshot": 0}
    results = {
        "sort": common
        | {"metric": "exact_match", "form": form, "higher_is_better": True, "num_items": 10}
        | {"value": right / 10, "stderr": 0.1, "low": max(0.0, right / 10 - 0.2), "high": right / 10 + 0.2},
        "bits_per_byte": common
        | {"metric": "bits_per_byte", "form": "bits_per_byte", "higher_is_better": False, "num_items": 12}
        | {"value": bits + 0.1, "stderr": 0.05, "low": bits, "high": bits + 0.2},
    }
    samples = [{"prompt": "Sort: 3 1 2", "completion": said}]
    (files / "results.json").write_text(json.dumps({"benchmarks": results, "samples": samples}))
