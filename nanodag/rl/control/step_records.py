"""Records of a stage: metrics, ledger, rollouts. Each is there once, however often the stage was killed."""

import json
import logging
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any

from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_sections import HELD_OUT
from nanodag.evaluation.intervals import score_of
from nanodag.evaluation.results import BenchmarkResult
from nanodag.host.images import IMAGES, digests_in, keep_beside
from nanodag.rl.rollouts.batch import RolloutBatch
from nanodag.rl.rollouts.metrics import Timed, chrome_trace, rollout_metrics
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.readable_rollout import text_of_turns
from nanodag.rl.rollouts.rollout import Rollout, groups_of, main_sequences, write_rollouts
from nanodag.store.atomic import write_json
from nanodag.worker.job import Job, MetricsLog, step_lines

log = logging.getLogger(__name__)

NONE: Mapping[str, Container[int]] = {}
PARTIAL = ".partial"


class Records:
    """resume_step: what was noted after this step, by a process that was killed, is removed; -1 removes everything.
    evaluated: steps whose evaluation the checkpoint has, by benchmark, HELD_OUT for the held-out prompts; it does not
    wait for that of its own step."""

    def __init__(self, job: Job, *, resume_step: int, evaluated: Mapping[str, Container[int]] = NONE) -> None:
        self._config: RLStage = job.config
        self._folder, self._benchmarks = job.records / "rollouts", job.records / "benchmarks"
        self._images = job.records / IMAGES
        for folder in (self._folder, self._benchmarks):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                is_half = path.name.startswith(".")  # a process was killed while it wrote it
                if is_half or int(path.name.split(".")[0].rpartition("-")[2]) > resume_step:
                    path.unlink()
        self._weights, self._profile = job.records / "weights", job.records / "profile"
        for path in self._weights.glob("step-*"):
            if path.suffix == PARTIAL or int(path.name.rpartition("-")[2]) > resume_step:
                shutil.rmtree(path)
        self._metrics = MetricsLog(  # without the evaluations that are to be repeated
            job,
            resume_step=resume_step,
            is_kept=lambda line: (
                line["event"] != "eval" or line["step"] in evaluated.get(line.get("benchmark", HELD_OUT), ())
            ),
        )
        self._write: Callable[..., None] = partial(self._metrics.write, total=self._config.num_steps)
        self._timeline = step_lines(job.records / "timeline.jsonl", resume_step=resume_step)
        self._ledger = step_lines(job.records / "ledger.jsonl", resume_step=resume_step)

    def rollouts(self, step: int, batch: RolloutBatch) -> str:
        """Write the rollouts of a step; returns the file of those that are trained."""
        path = self._folder / f"step-{step:08d}.jsonl"
        self._save(path, batch.trained)
        self._save(path.with_suffix(".dropped.jsonl"), batch.untrained)
        _write_answers(path.with_suffix(".answers.jsonl"), batch.prompts)
        return str(path)

    def _save(self, path: Path, rollouts: Sequence[Rollout]) -> None:
        for prompt in {rollout.prompt_token_ids for rollout in rollouts}:
            keep_beside(self._images, prompt)
        write_rollouts(path, rollouts)

    def responses(self, step: int, rollouts: Sequence[Rollout], decode: Callable[[Sequence[int]], str]) -> None:
        """A line of metrics with the text of some of a step's responses, and of all their branches."""
        groups = [[list(s) for _, s in groupby(g, attrgetter("sample_index"))] for g in groups_of(rollouts).values()]
        in_turn = [sample for place in zip_longest(*groups) for sample in place if sample is not None]
        rows = [
            {
                "prompt": decode(rollout.prompt_token_ids),
                "response": text_of_turns(rollout, decode),
                "reward": rollout.reward,
                "finish_reason": rollout.finish_reason,
                "prompt_id": rollout.prompt_id,
                "turns": sum(span.kind == "sampled" for span in rollout.spans),
                "branch": rollout.branch,
                "role": rollout.role,
                "images": [digest for _, _, digest in digests_in(rollout.prompt_token_ids)],
            }
            for sample in in_turn[: self._config.log_responses]
            for rollout in sample
        ]
        if rows:
            self._write(step, event="sample", responses=rows)

    @contextmanager
    def weights(self, step: int) -> Iterator[Path]:
        """A folder to write the weights of a step into. It is there under its name only when it is whole."""
        folder = self._weights / f"step-{step:08d}"
        partial = folder.with_suffix(PARTIAL)
        self._weights.mkdir(exist_ok=True)
        yield partial
        partial.rename(folder)

    def step(self, step: int, seconds: Mapping[str, float], values: Mapping[str, Any]) -> None:
        """One line of metrics. seconds: by part, since the line before; `step` is the wall time, and what ran beside
        something else is counted in full. values: `seconds_generate` among them, of the rollouts, whenever that was."""
        self._write(step, **{f"seconds_{name}": value for name, value in seconds.items()} | dict(values))
        names = ("reward", "pass_rate", "response_tokens", "entropy")
        shown = {name: round(values[name], 4) for name in names if name in values}
        log.info("step %d of %d: %s, %.2f s", step, self._config.num_steps, shown, seconds["step"])

    def profile(self, step: int) -> Path:
        """The folder of a step's traces."""
        folder = self._profile / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def timeline(self, step: int, spans: Sequence[Timed]) -> None:
        """Spans that ended since the step before: a line of timeline.jsonl; of a profiled step also a Chrome trace."""
        if step in self._config.profile_steps:
            write_json(self.profile(step) / "timeline.json", chrome_trace(spans))
        self._timeline.write(json.dumps({"step": step, "spans": spans}) + "\n")

    def evaluation(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        seconds: float,
        prompts: Sequence[Prompt] = (),
        *,
        too_long: int = 0,
    ) -> float | None:
        """Rollouts and metrics of answers to the held-out prompts; returns their mean reward. too_long: prompts that
        were not asked, as they leave an answer no room."""
        metrics = rollout_metrics(rollouts)
        names = ("reward", "pass_rate", "truncated_share", "response_tokens", "reward_failed", "generate_failed")
        several = [name for name in metrics if name.startswith(("pass_at_", "metric_")) and name != "pass_at_n"]
        values = {f"eval_{name}": metrics[name] for name in (*names, *several) if name in metrics}
        values |= interval_of(rollouts)
        path = self._folder / f"eval-{step:08d}.jsonl"
        self._save(path, rollouts)
        _write_answers(path.with_suffix(".answers.jsonl"), prompts)
        self._write(
            step,
            event="eval",
            prompts=len({rollout.group_id for rollout in rollouts}),
            eval_too_long=too_long,
            seconds_evaluate=seconds,
            **values,
        )
        log.info("step %d: held out: %s", step, {name: round(value, 4) for name, value in values.items()})
        return values.get("eval_reward")

    def benchmark(self, step: int, result: BenchmarkResult, seconds: float) -> float:
        """Records of a benchmark's items, as an eval stage writes them, and a line of metrics; returns its score."""
        name, score = result.config.name, result.scores[result.metric]
        result.write_records(self._benchmarks / f"step-{step:08d}.{name}.jsonl")
        self._write(
            step,
            event="eval",
            benchmark=name,
            metric=result.metric,
            seconds_evaluate=seconds,
            higher_is_better=result.higher_is_better,
            low=score.low,
            high=score.high,
            **{f"benchmark_{name}": score.value, f"benchmark_{name}_stderr": score.stderr, **result.counts},
        )
        log.info("step %d: %s", step, result)
        return score.value

    def ledger(self, step: int, batch: RolloutBatch) -> None:
        """Note what became of the prompts that a step used up."""
        outcomes = [(prompt, "trained", "") for prompt, _ in batch.kept]
        outcomes += [(drop.prompt, "dropped", drop.reason) for drop in batch.dropped]
        outcomes += [(prompt, "dropped", reason) for prompt, reason in batch.passed_over]
        for prompt, outcome, reason in outcomes:
            line = {"step": step, "epoch": prompt.epoch, "prompt_id": prompt.prompt_id}
            self._ledger.write(json.dumps({**line, "outcome": outcome, "reason": reason}) + "\n")

    def close(self) -> None:
        self._metrics.close()
        self._ledger.close()
        self._timeline.close()


def interval_of(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Interval of the mean reward, 95 %, over prompts: answers to one are alike. Empty for less than two prompts."""
    groups = groups_of(main_sequences(rollouts)).values()
    rewards = [[rollout.reward for rollout in group if rollout.reward is not None] for group in groups]
    means = [sum(group) / len(group) for group in rewards if group]
    if len(means) < 2:
        return {}
    score = score_of(means)
    return {"low": score.low, "high": score.high}


def _write_answers(path: Path, prompts: Sequence[Prompt]) -> None:
    """Messages and right answers, for those who read the rollouts: no rollout holds its own."""
    lines = [
        {"prompt_id": p.prompt_id, "answer": p.record.get("answer", ""), "messages": p.record.get("messages", [])}
        for p in prompts
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
