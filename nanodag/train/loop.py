"""The one supervised loop. Pretraining, midtraining and SFT are three configs of it.

It owns accumulation, ranks, schedule, validation, checkpoints and metrics. TokenBatches give the data, a TrainEngine
spreads the weights.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from nanodag.data.core_tasks import core_of
from nanodag.errors import TrainingDiverged
from nanodag.train.checkpoint import Progress, load_checkpoint, save_checkpoint
from nanodag.train.learning_rate import rate_factor
from nanodag.train.objective import means_of
from nanodag.train.packing import Batch
from nanodag.train.setup import PreparedStage
from nanodag.train.validation import ask_benchmarks
from nanodag.worker.job import stop_requested

log = logging.getLogger(__name__)

LOSSES_KEPT = 10
Scores = TypeVar("Scores", bound=Mapping[str, float])


class Stopped(Exception):
    """A stop was asked for; a checkpoint was written."""


class Loop:
    """One stage on this rank, from its checkpoint if any. write: MetricsLog.write on rank 0, nothing elsewhere."""

    def __init__(self, stage: PreparedStage) -> None:
        self.stage, self.config = stage, stage.config
        self.engine, self.source = stage.engine, stage.source
        self.write: Callable[..., None] = lambda *args, **values: None
        self.progress = Progress()
        self.best: list[torch.Tensor] | None = None
        self._saved_step = -1
        self._keeps_best = self.config.patience > 0 and stage.validation is not None
        if stage.checkpoint is not None:  # the same on every rank
            self.progress, self.best = load_checkpoint(stage.checkpoint, self.engine, self.source)
            self._saved_step = self.progress.step
            log.info("Going on from step %d of %d.", self.progress.step, self.stage.num_steps)

    def run(self) -> None:
        """Train to the end; afterwards the engine holds the weights to publish. Raises Stopped, TrainingDiverged."""
        progress = self.progress
        if progress.step == 0 and self._keeps_best:
            self._validate()
        self._evaluate()  # a stop may have come before it was through
        while progress.step < self.stage.num_steps and not progress.stopped_early:
            self._step()
            last = progress.step == self.stage.num_steps
            if self.stage.validation is not None and (last or progress.step % self.config.validation_every == 0):
                self._validate()
                self.stage.show_samples(progress.step, self.write)
            self._evaluate()
            stopping = self.engine.highest(stop_requested()) > 0
            if stopping or (progress.step % self.config.checkpoint_every == 0 and not last):
                self._save()
            if stopping:
                raise Stopped
        if self.best is not None:
            self.engine.restore(self.best)
        self._evaluate(at_end=True)

    def _step(self) -> None:
        began = time.perf_counter()
        progress, engine = self.progress, self.engine
        batches = self.source.take(self.stage.data.micro_batches)
        count, tokens, num_waiting = engine.summed(
            *self.stage.group.counted(
                float(sum(map(self.stage.objective.count, batches))),
                float(sum(batch.num_tokens for batch in batches)),
            ),
            float(self.source.is_waiting),
        )
        if num_waiting == engine.world_size:
            self.source.open(-int(engine.highest(-self.source.next_stretch)))
        own_loss, own_sums = self._accumulate(batches, max(count, 1.0))
        factor = rate_factor(progress.step, self.stage.num_steps, self.config.schedule)
        optimizer = self.config.optimizer
        try:
            norm = engine.step(
                learning_rate=factor * float(optimizer.learning_rate), matrix_lr=factor * float(optimizer.matrix_lr)
            )
        except TrainingDiverged as error:
            raise self._diverged(str(error)) from error
        loss = engine.summed(own_loss)[0] / max(count, 1.0)
        if not math.isfinite(loss):
            raise self._diverged(f"The loss is {loss}.")
        seconds = time.perf_counter() - began
        progress.step += 1
        progress.tokens += tokens
        progress.labels += count
        progress.seconds += seconds
        progress.last_losses = [*progress.last_losses[-LOSSES_KEPT + 1 :], loss]
        if progress.step % self.config.log_every == 0 or progress.step in (1, self.stage.num_steps):
            sums = engine.summed(*own_sums.values()) if own_sums else ()
            means = means_of(dict(zip(own_sums, sums, strict=True)), count)
            self._report(loss=loss, norm=norm, factor=factor, seconds=seconds, tokens=tokens, **means)

    def _accumulate(self, batches: list[Batch], denominator: float) -> tuple[float, dict[str, float]]:
        """Backward over this rank's micro-batches; the sum of their losses, and of what the objective reports."""
        losses = []
        sums: dict[str, list[torch.Tensor]] = {}
        for index, batch in enumerate(batches):
            loss, reported = self.stage.objective.loss(self.engine, batch)
            self.engine.backward(loss / denominator, last=index == len(batches) - 1)
            losses.append(loss.detach())  # read only after the last: reading waits for the device
            for name, value in reported.items():
                sums.setdefault(name, []).append(value)
        total = float(torch.stack(losses).double().sum())
        return total, {name: float(torch.stack(values).double().sum()) for name, values in sums.items()}

    def _validate(self) -> None:
        began = time.perf_counter()
        score = self.stage.score()
        progress = self.progress
        progress.validation_loss, progress.validation_bits_per_byte = score.loss, score.metrics.get("bits_per_byte")
        progress.validation_accuracy = score.metrics.get("accuracy")
        if not math.isfinite(score.loss):
            raise self._diverged(f"The validation loss is {score.loss}.")
        self.write(
            progress.step,
            total=self.stage.num_steps,
            event="eval",
            validation_loss=score.loss,
            **{f"validation_{name}": value for name, value in score.metrics.items()},
            validation_seconds=time.perf_counter() - began,
        )
        words = "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in score.metrics.items())
        log.info("Step %d: validation %.4f%s.", progress.step, score.loss, words)
        if progress.best_loss is None or score.loss < progress.best_loss:
            progress.best_loss, progress.best_bits_per_byte = score.loss, progress.validation_bits_per_byte
            progress.best_accuracy = progress.validation_accuracy
            progress.best_step, progress.evals_since_best = progress.step, 0
            if self._keeps_best:
                self.best = self.engine.snapshot()
            return
        progress.evals_since_best += 1
        if self._keeps_best and progress.evals_since_best >= self.config.patience:
            progress.stopped_early = True
            log.info("No better validation loss since step %d: stopping.", progress.best_step)

    def _evaluate(self, *, at_end: bool = False) -> None:
        """CORE and benchmarks of the weights as they are, at their steps; of the last ones once they are chosen."""
        step, config, progress = self.progress.step, self.config, self.progress
        if not at_end and (not 0 < step < self.stage.num_steps or progress.stopped_early):
            return
        if config.core_every and (at_end or step % config.core_every == 0) and progress.core_step != step:
            self._core()
        if config.benchmarks and (at_end or step % config.benchmarks_every == 0) and progress.benchmarks_step != step:
            scores = self._unless_stopped(ask_benchmarks(self.stage, step, self.write))
            progress.benchmarks, progress.benchmarks_step = scores, step
            log.info("Step %d: %s.", step, ", ".join(f"{name} {score:.4f}" for name, score in scores.items()))

    def _unless_stopped(self, scores: Scores | None) -> Scores:
        """The scores; a checkpoint and Stopped for None, which says that a stop was asked for."""
        if scores is not None:
            return scores
        if self._saved_step != self.progress.step:
            self._save()
        raise Stopped

    def _core(self) -> None:
        began, progress = time.perf_counter(), self.progress
        accuracies = self._unless_stopped(self.stage.score_core(progress.step, self.write))
        progress.core, progress.core_step = core_of(accuracies), progress.step
        self.write(
            progress.step,
            total=self.stage.num_steps,
            event="eval",
            benchmark="core",
            core=progress.core,
            core_seconds=time.perf_counter() - began,
            **{f"core_{label}": accuracy for label, accuracy in accuracies.items()},
        )
        log.info("Step %d: CORE %.4f.", progress.step, progress.core)

    def _save(self) -> None:
        began = time.perf_counter()
        num_steps, checkpoints = self.stage.num_steps, self.stage.checkpoints
        save_checkpoint(checkpoints, self.engine, self.progress, self.source, num_steps=num_steps, best=self.best)
        self._saved_step = self.progress.step
        log.info("Step %d: checkpoint in %.2f s.", self.progress.step, time.perf_counter() - began)

    def _report(
        self, *, loss: float, norm: float, factor: float, seconds: float, tokens: float, **means: float
    ) -> None:
        progress, stage = self.progress, self.stage
        self.write(
            progress.step,
            total=stage.num_steps,
            loss=loss,
            **means,
            gradient_norm=norm,
            learning_rate=factor * float(self.config.optimizer.learning_rate),
            step_ms=1000 * seconds,
            tokens_per_second=tokens / seconds,
            mfu=stage.flops_per_token * tokens / seconds / stage.peak_flops,
            tokens=progress.tokens,
        )
        reached = f"loss {loss:.4f}, gradient norm {norm:.3f}, {tokens / seconds:.0f} tokens/s"
        log.info("Step %d of %d: %s.", progress.step, stage.num_steps, reached)

    def _diverged(self, what: str) -> TrainingDiverged:
        losses = ", ".join(f"{loss:.4f}" for loss in self.progress.last_losses) or "none"
        return TrainingDiverged(
            f"{what} Step {self.progress.step + 1} of {self.stage.num_steps}; last losses: {losses}. Lower the "
            "learning rates or gradient_clipping; a restart goes on from the last checkpoint."
        )
