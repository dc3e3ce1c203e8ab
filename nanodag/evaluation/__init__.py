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
benchmark_functions  how forms put an item and score an answer
results              written answers, records, scores, counts; avg@n, pass@k, maj@n
intervals            mean, standard error, 95 % interval
paired               two checkpoints on the same items

With them:

harness              one lm-eval run a benchmark
evaluated_model      the model as lm-eval sees it
writing              texts by embedded samplers
core                 CORE and ChatCORE: one number over 22 tasks, over six in chats
"""
