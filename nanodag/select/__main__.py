"""`python -m nanodag.select job.json`: rollouts as an RL stage samples them; the best, or pairs, as rows.jsonl."""

from dataclasses import replace
from functools import partial
from typing import Any

from nanodag.config.kinds.rl import SelectStage
from nanodag.errors import StageFailed
from nanodag.rl.__main__ import main
from nanodag.rl.rollouts.export import export_chats, export_pairs
from nanodag.rl.rollouts.rollout_files import Shelf
from nanodag.worker.job import ROWS, Job, load_job


def leave_best(stage: SelectStage, job: Job) -> dict[str, Any]:
    """Write the best answers, or pairs of them, into the output; returns their metrics. Raises StageFailed where there
    is none."""
    shelf = Shelf(run=job.run, stage=job.name, records=job.records, metrics=job.metrics_path, model=job.inputs["model"])
    job.output.mkdir(parents=True, exist_ok=True)
    rows, lowest = job.output / ROWS, stage.lowest_reward
    if stage.pairs == "none":
        chosen = export_chats(shelf, rows, best=stage.best, lowest=lowest)
    else:
        chosen = export_pairs(shelf, rows, lowest=lowest, takes_all=stage.pairs == "all")
    if not chosen.rows:
        why = ", ".join(f"{count} {reason}" for reason, count in chosen.left_out.items())
        raise StageFailed(
            f"No answer was good enough ({why}). Lower lowest_reward, now {stage.lowest_reward:g}, sample more often "
            "(rollout.samples_per_prompt), or ask easier prompts."
        )
    left_out = {f"left_out_{reason.replace(' ', '_')}": count for reason, count in chosen.left_out.items()}
    return {"conversations": chosen.rows, **left_out}


if __name__ == "__main__":
    job = load_job()
    main(replace(job, config=job.config.as_rl()), partial(leave_best, job.config))
