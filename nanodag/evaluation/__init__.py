"""Scores of a checkpoint, through lm-eval: `python -m nanodag.evaluation job.json`.

Writes into output/ (the same bytes for the same job):

    results.json                 {"benchmarks": {name: {"metric", "value", "stderr", "low", "high", "num_items",
                                  "num_samples", "too_long", "unparsed", "truncated", ...}},
                                  "samples": [{"prompt", "completion"}]}
    samples/<benchmark>.jsonl    one item a line: id, scores by metric, prompt, output or logprobs, target; `samples`
                                 of several answers; `weight` where items do not count alike; what is counted by
                                 itself. What nanodag.evaluation.paired compares.

Without torch and lm-eval, for RL and others too (an import contract says so):

benchmark            items as chat messages, scores of the answers to them
forms                which YAML form a config names, and what stands in it
items                a benchmark's items out of our sources
generated_answer     a written answer: its text, how it ended, its thinking
benchmark_functions  how forms score an answer
samples              avg@n, pass@k, maj@n
results              records, scores, counts
intervals            mean, standard error, 95 % interval
paired               two checkpoints on the same items

With them:

harness              one lm-eval run a benchmark
continuation         items made out of held-out text
evaluated_model      the model as lm-eval sees it
writing              texts by embedded samplers
core                 CORE as a benchmark: one number over 22 tasks
ngrams               what a base model must beat
"""
