"""Scores of a checkpoint, through lm-eval: `python -m nanodag.evaluation job.json`.

Writes into output/ (the same bytes for the same job):

    results.json                 {"benchmarks": {name: {"metric", "value", "stderr", "low", "high", "num_items",
                                  "too_long", ...}},
                                  "samples": [{"prompt", "completion"}]}
    samples/<benchmark>.jsonl    one item a line: id, scores by metric, prompt, output or logprobs, target; `weight`
                                 where items do not count alike, `too_long` where the prompt had no room. What
                                 nanodag.evaluation.paired compares.

harness              one lm-eval run a benchmark, its records
forms                which YAML form a config names
items                a benchmark's items out of our sources
continuation         the same made out of held-out text
evaluated_model      the model as lm-eval sees it
writing              texts by embedded samplers
answers              how answers are scored
core                 CORE as a benchmark: one number over 22 tasks
intervals            mean, standard error, 95 % interval
paired               two checkpoints on the same items
ngrams               what a base model must beat
"""
