"""Early end of a sweep's hopeless points: asynchronous successive halving, by Optuna's pruner.

A point is judged where it has come 1/N² and 1/N of its way, at the first validation there: it goes on while it is among
the best 1/N of the points that came so far, or the best where they are fewer than N. Source: ASHA, arXiv:1810.05934.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock
from typing import Any

from nanodag.errors import ConfigError, MissingTool, StageStopped
from nanodag.run.record import Run, StageResult
from nanodag.sweep.sweep_page import TELLING
from nanodag.sweep.sweep_run import Sweep

WAY = 10_000  # steps that the pruner counts in a point's way, however many it has


def check_halving(sweep: Sweep, keep: int) -> None:
    """Raise MissingTool without Optuna, ConfigError for stages whose metrics are not heard here. keep: N above."""
    if keep < 2:
        raise ConfigError(f"--halving {keep}: of that many points the best one goes on; give 2 or more.")
    try:
        import optuna  # noqa: F401 - it takes a second, and other sweeps do without
    except ImportError as error:
        raise MissingTool("--halving needs Optuna, which is not installed: pip install 'nanodag[sweep]'") from error
    pools = {sweep.pipeline.stages[point.stages[sweep.stage]].resources.work_pool for point in sweep.points}
    if pools != {"none"}:
        raise ConfigError(f"--halving: {sweep.stage} runs on a work pool, from where no metrics come: leave it out.")


class Halving:
    """Hears what the points of a sweep measure. keep: N above. results: of stages that the store has.

    ended: reasons of those that were ended, by stage; at first by what is known of an earlier try.
    """

    def __init__(self, sweep: Sweep, run: Run, results: Mapping[str, StageResult], *, keep: int) -> None:
        check_halving(sweep, keep)
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=WAY // keep**2, reduction_factor=keep)
        study = optuna.create_study(pruner=pruner)
        stages = list(dict.fromkeys(point.stages[sweep.stage] for point in sweep.points))
        self._keep, self._lock, self._metric = keep, Lock(), ""
        self._trials = {stage: (study.ask(), [0.0]) for stage in stages}
        self.ended: dict[str, str] = {}
        for stage in sorted(stages, key=lambda stage: stage not in results):
            folder = run.store.workspace(key) if (key := run.entry(stage).key) else None
            if stage in results:
                artifact = run.store.attempt(results[stage].key, results[stage].attempt)
                folder = run.store.verified(artifact, "records")
            with suppress(FileNotFoundError, StageStopped):
                for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if folder else ():
                    with suppress(ValueError):  # of a process that was killed
                        self(stage, json.loads(line))
            if stage in results:
                self.ended.pop(stage, None)
            elif stage in self.ended:
                run.note(stage, state="stopped", reason=self.ended[stage])

    def __call__(self, stage: str, metrics: Mapping[str, Any]) -> None:
        """Take in a record of a stage's metrics. Raises StageStopped where the stage is hopeless by it."""
        if stage not in self._trials or metrics.get("event") != "eval":
            return
        with self._lock:
            names = (*TELLING, f"benchmark_{metrics.get('benchmark')}")
            self._metric = self._metric or next(filter(metrics.__contains__, names), "")
            (trial, reached), value = self._trials[stage], metrics.get(self._metric)
            done = metrics["step"] / metrics["total"]
            if value is None or not reached[-1] < done < 1:
                return
            reached.append(done)
            is_better_up = metrics.get("higher_is_better", TELLING.get(self._metric))
            trial.report(-value if is_better_up else value, math.ceil(WAY * done))
            if trial.should_prune():
                name = self._metric.replace("_", " ")
                self.ended[stage] = reason = (
                    f"ended early, {done:.0%} of its way: its {name} of {value:.4g} was not among the best "
                    f"1/{self._keep} of the points that came so far"
                )
                raise StageStopped(f"Stage {stage} {reason}. nanodag sweep without --halving goes on with it.")

    def left(self, run: Run) -> list[str]:
        """Stages to do of a run that are not ended, and need none that is."""
        out = set(self.ended)
        out.update(stage for stage in run.order if not out.isdisjoint(run.pipeline.stages[stage].inputs.values()))
        return [stage for stage in run.to_do if stage not in out]
