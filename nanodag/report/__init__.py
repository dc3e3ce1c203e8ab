"""The report of a run: `python -m nanodag.report job.json` writes output/report.md and output/report.html, which needs
nothing beside it.

What the job gives (nanodag.worker.job.Job):
    inputs     input name -> local folder of a stage's files
    context    what the store knows, for every stage that the report's inputs come from, directly or not:

        {
          "preset": "pocket", "description": "...",
          "origins": {"rl.learning_rate": "override", ...},     dotted name -> where the value came from
          "stale": {"rl": "sft was built since"},               stage -> why (nanodag.run.stale_stages)
          "mirror": "none",                                     as in the pipeline, for the contamination count
          "stages": {
            "rl": {
              "kind": "rl", "key": "40 hex digits", "attempt": 1, "digest": "64 hex digits",
              "metrics": {...}, "cost": {...},                  of result.json
              "config": {...},                                  resolved stage config
              "lineage": {"model": {"stage": "sft", "kind": "sft", "key": ..., "attempt": ..., "digest": ...}},
              "environment": {...}, "created": 1764000000.0,    of the manifest; may be left out
              "files": "/abs/folder", "records": "/abs/folder with metrics.jsonl"
            }, ...
          }
        }

`cost` keys that are shown where present: seconds (of all tries), earlier_seconds (of all but the last), num_attempts,
cpu_seconds, tokens (trained), forward_tokens (read only), flops, peak_bytes, device, mfu, tokens_per_second.
panels.yaml lists the metrics that are drawn where metrics.jsonl has them, over `step`. A stage without a digest is not
finished. A run under way also has `progress`, a list of StageProgress (nanodag.run.progress).
Nothing here imports torch.
"""
