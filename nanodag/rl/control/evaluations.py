"""Evaluations of a stage's policies: held-out prompts, benchmarks, and which weights are the best. No torch here."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_sections import HELD_OUT
from nanodag.data.mixture import Mixture
from nanodag.errors import ConfigError, StageFailed
from nanodag.rl.control.benchmarks import PolicyBenchmarks
from nanodag.rl.control.best_weights import BestWeights, is_patience_over
from nanodag.rl.control.checks import unless_stopped
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.control.step_records import Records
from nanodag.rl.rollouts.prompts import PolicyFormat, Prompt, first_prompts
from nanodag.worker.job import Job

log = logging.getLogger(__name__)


class Evaluations:
    """What each policy is evaluated on, and the scores so far. longest: tokens of a held-out prompt. timed: counts the
    time that something takes."""

    def __init__(
        self,
        job: Job,
        generator: RolloutGenerator,
        benchmarks: PolicyBenchmarks,
        renderer: PolicyFormat,
        *,
        longest: int,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._config: RLStage = job.config
        self._generator, self._benchmarks, self._timed = generator, benchmarks, timed
        self._held_out, self._num_too_long = _held_out_prompts(job, renderer, longest)
        self._best = self._best_weights(job.workspace / "best")
        self.scores: dict[str, dict[str, float | None]] = {}  # by HELD_OUT or benchmark, then policy, as JSON has it

    def due(self, policy: int) -> list[str]:
        """What a policy is to be evaluated on and has not been: HELD_OUT, names of benchmarks. Weights that stay are
        evaluated once."""
        config = self._config
        if not config.has_samplers or (policy and not config.has_trainer):
            return []
        names = [*[HELD_OUT] * bool(self._held_out), *self._benchmarks.names]
        due = [name for name in names if config.evaluation.is_time(name, policy, num_steps=config.num_steps)]
        return [name for name in due if str(policy) not in self.scores.get(name, {})]

    async def evaluate(self, policy: int, records: Records) -> None:
        """Answer the held-out prompts and the benchmarks whose time it is, one after the other."""
        for name in self.due(policy):
            answer = self._answer_held_out if name == HELD_OUT else self._answer_benchmark
            self.scores.setdefault(name, {})[str(policy)] = await answer(name, policy, records)
            if self._best is not None and name == self._config.best_metric:
                self._best.prune(self._scores(name))

    def weights_to_keep(self, policy: int) -> Path | None:
        """Where the weights of a policy are to be written that may turn out to be the best; None for others, and where
        they are there already."""
        if self._best is None or self._config.best_metric not in self.due(policy):
            return None
        folder = self._best.of(policy)
        return None if folder.is_dir() else folder  # it is there where a checkpoint had it

    def save(self, checkpoint: Path) -> None:
        """Link the weights of the best policy, and of those without a score yet, into a checkpoint."""
        if self._best is not None:
            self._best.save(checkpoint)

    def load(self, checkpoint: Path, scores: dict[str, dict[str, float | None]]) -> None:
        """Go back to what a checkpoint has."""
        self.scores = scores
        if self._best is not None:
            self._best.load(checkpoint)

    def is_over(self) -> bool:
        """Whether `patience` evaluations have brought nothing better."""
        assert self._best is not None, "the config asks for the best weights where it has patience"
        scores, patience = self._scores(self._config.best_metric), self._config.evaluation.patience
        return is_patience_over(scores, patience=patience, is_highest=self._best.is_highest)

    def leave_best(self, output: Path) -> int | None:
        """Make the weights of the best policy the stage's product, and return its number; None where the last ones are
        to be left. Raises StageFailed where no evaluation has a score."""
        if self._best is None:
            return None
        kept = self._best.leave(self._scores(self._config.best_metric), output)
        if kept is None:
            raise StageFailed(
                f"keep {self._config.keep}: no evaluation has a score, as all its rewards failed. Mend the reward, or "
                "set keep to last."
            )
        log.info("kept: the weights of step %d, the best by %s", kept, self._config.best_metric)
        return kept

    def metrics(self) -> dict[str, Any]:
        """First and last scores, as the stage's metrics have them."""
        known = {
            name: {step: value for step, value in self._scores(name).items() if value is not None}
            for name in self.scores
        }
        metrics: dict[str, Any] = {}
        for name, values in known.items():
            key = name if name == HELD_OUT else f"benchmark_{name}"
            if values:
                metrics |= {key: values[max(values)]} | ({f"{key}_before": values[0]} if 0 in values else {})
        if known.get(HELD_OUT) or self._num_too_long:
            metrics["eval_too_long"] = self._num_too_long
        return metrics

    def _scores(self, name: str) -> dict[int, float | None]:
        return {int(step): value for step, value in self.scores.get(name, {}).items()}

    async def _answer_held_out(self, name: str, policy: int, records: Records) -> float | None:
        began = time.monotonic()
        with self._timed("evaluate"):
            rollouts = await unless_stopped(self._generator.answers(self._held_out))
        seconds = time.monotonic() - began
        return records.evaluation(policy, rollouts, seconds, self._held_out, too_long=self._num_too_long)

    async def _answer_benchmark(self, name: str, policy: int, records: Records) -> float:
        began = time.monotonic()
        with self._timed("evaluate"):
            result = await unless_stopped(self._benchmarks.result(name))
        return records.benchmark(policy, result, time.monotonic() - began)

    def _best_weights(self, folder: Path) -> BestWeights | None:
        name = self._config.best_metric
        if not name:
            return None
        if name == HELD_OUT and not self._held_out:
            raise ConfigError(f"keep {self._config.keep}: no held-out prompt fits into sampler.context; raise it.")
        return BestWeights(folder, is_highest=name == HELD_OUT or self._benchmarks.higher_is_better(name))


def _held_out_prompts(job: Job, renderer: PolicyFormat, longest: int) -> tuple[list[Prompt], int]:
    """Those that each evaluation asks, and how many were too long to be asked."""
    config: RLStage = job.config
    if config.evaluation.eval_prompts == 0:
        return [], 0
    if not config.evaluation.validation and not any(source.held_out for source in config.data):
        log.warning("No evaluation on held-out prompts: there is neither `validation` nor a source with `held_out`.")
        return [], 0
    mixture = Mixture(
        config.evaluation.validation or config.data,
        kind="prompt",
        seed=int(config.seed),
        part="all" if config.evaluation.validation else "held_out",
        once=True,
        mirror=job.mirror,
    )
    return first_prompts(mixture, renderer, count=config.evaluation.eval_prompts, longest=longest)
