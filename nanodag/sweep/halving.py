"""Early end of a sweep's hopeless points: asynchronous successive halving, by Optuna's pruner.

A point is judged where it has come 1/N² and 1/N of its way, at the first validation there: it goes on while it is among
the best 1/N of the points that came so far, or the best where they are fewer than N. Source: ASHA, arXiv:1810.05934.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock
from typing import Any

from nanodag.config import AnyStage
from nanodag.config.rl_sections import HELD_OUT
from nanodag.errors import ConfigError, MissingTool, StageStopped
from nanodag.rl.rollouts.rollout import read_lines
from nanodag.run.build_stage import key_of
from nanodag.run.record import Run, StageResult
from nanodag.sweep.sweep_page import TELLING
from nanodag.sweep.sweep_run import Sweep

FIRST = 1000  # steps that the pruner counts up to the first look, however many a point has
MOST = 10


def check_halving(sweep: Sweep, keep: int) -> None:
    """Raise MissingTool without Optuna, ConfigError for what cannot be judged. keep: N above."""
    if not 2 <= keep <= MOST:
        raise ConfigError(f"--halving {keep}: of so many points the best one goes on; give 2 to {MOST}.")
    if sweep.predicted is not None:
        raise ConfigError("--halving ends points that a scaling law needs whole: leave out one of it and --predict.")
    try:
        import optuna  # noqa: F401 - it takes a second, and other sweeps do without
    except ImportError as error:
        raise MissingTool("--halving needs Optuna, which is not installed: pip install 'nanodag[sweep]'") from error
    for point in sweep.points:
        stage = sweep.pipeline.stages[point.stages[sweep.stage]]
        if stage.resources.work_pool != "none":
            raise ConfigError(f"--halving: {sweep.stage} runs on a work pool, which tells no metrics: leave it out.")
        if not metrics_of(stage):
            raise ConfigError(f"--halving: {sweep.stage} measures nothing while it trains: give it validation.")


def metrics_of(stage: AnyStage) -> list[str]:
    """Metrics by which a point is judged, the most telling first: of held-out rows, else of the first benchmark."""
    if stage.measures_held_out or HELD_OUT in getattr(stage, "evaluated", ()):
        return [name for name in TELLING if name != "reward"]
    benchmarks = getattr(getattr(stage, "evaluation", stage), "benchmarks", ())
    return [f"benchmark_{benchmark.name}" for benchmark in benchmarks[:1]]


class Halving:
    """Hears what the points of a sweep measure. keep: N above. results: of stages that the store has.

    ended: reasons of those that were ended, by stage; at first by what is known of an earlier try.
    """

    def __init__(self, sweep: Sweep, run: Run, results: Mapping[str, StageResult], *, keep: int) -> None:
        check_halving(sweep, keep)
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=FIRST, reduction_factor=keep)
        study, self._keep, self._lock = optuna.create_study(pruner=pruner), keep, Lock()
        stages = {name: run.pipeline.stages[name] for name in (point.stages[sweep.stage] for point in sweep.points)}
        self._metrics = {name: metrics_of(stage) for name, stage in stages.items()}
        self._trials, self._reached = {name: study.ask() for name in stages}, dict.fromkeys(stages, 0.0)
        self.ended: dict[str, str] = {}
        lines = [line for name, stage in stages.items() for line in _earlier(run, name, stage, results)]
        for _, name, line in sorted(lines, key=lambda line: line[0]):
            with suppress(StageStopped):
                self(name, line)
        for name in results:
            self.ended.pop(name, None)
        for name, reason in self.ended.items():
            run.note(name, state="stopped", reason=reason)

    def __call__(self, stage: str, metrics: Mapping[str, Any]) -> None:
        """Take in a record of a stage's metrics. Raises StageStopped where the stage is hopeless by it."""
        name = next(filter(metrics.__contains__, self._metrics.get(stage, ())), "")
        if not name or metrics.get("event") != "eval" or not metrics.get("total"):
            return
        done, value = metrics["step"] / metrics["total"], metrics[name]
        with self._lock:
            if not self._reached[stage] < done < 1:
                return
            self._reached[stage], trial, whole = done, self._trials[stage], FIRST * self._keep**2
            self.ended.pop(stage, None)  # in an earlier try it went on
            is_better_up = metrics.get("higher_is_better", TELLING.get(name))
            trial.report(-value if is_better_up else value, min(whole - 1, math.ceil(whole * done)))
            if trial.should_prune():
                self.ended[stage] = reason = (
                    f"ended early, {done:.0%} of its way: its {name.replace('_', ' ')} of {value:.4g} was not among "
                    f"the best 1/{self._keep} of the points that came so far; a sweep without --halving goes on with it"
                )
                raise StageStopped(reason)  # as the record has it, so that the page stays the same on a resume

    def left(self, run: Run) -> list[str]:
        """Stages to do of a run that are not ended, and need none that is."""
        out = set(self.ended)
        out.update(stage for stage in run.order if not out.isdisjoint(run.pipeline.stages[stage].inputs.values()))
        return [stage for stage in run.to_do if stage not in out]


def _earlier(
    run: Run, name: str, stage: AnyStage, results: Mapping[str, StageResult]
) -> list[tuple[float, str, dict[str, Any]]]:
    """Records of an earlier try of the same key: time, stage, metrics."""
    if name in results:
        artifact = run.store.attempt(results[name].key, results[name].attempt)
        folder = run.store.verified(artifact, "records")
    elif set(stage.inputs.values()) <= results.keys():
        key, _ = key_of(run, stage, {label: results[source] for label, source in stage.inputs.items()})
        folder = run.store.workspace(key)
    else:
        return []
    return [(float(line.get("time", 0)), name, line) for line in read_lines(folder / "metrics.jsonl")]
