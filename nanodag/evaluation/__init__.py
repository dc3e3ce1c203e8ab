"""Scores of a checkpoint, through lm-eval: `python -m nanodag.evaluation job.json`.

Writes into output/ (the same bytes for the same job):

    results.json                 {"benchmarks": {name: {"metric", "value", "stderr", "low", "high", "num_items",
                                  "num_samples", "too_long", "unparsed", "truncated", ...}},
                                  "samples": [{"prompt", "completion"}]}
    samples/<benchmark>.jsonl    one item a line: id, scores by metric, prompt, output or logprobs, target; `samples`
                                 of several answers; `weight` where items do not count alike; what is counted by
                                 itself. What nanodag.evaluation.paired compares.

What is asked, and how answers are scored, needs no torch and no lm-eval: an import contract says which modules.
"""
