"""The RL stage: `python -m nanodag.rl job.json`. It owns the clock, the prompts, the rollouts and the ledger. No torch.

A step, with everything on policy:

    generate   groups for the next prompts, rewards computed beside it, groups chosen in prompt order
    train      the trainer's ranks read the rollouts from a file and update the weights
    sync       they write the weights to memory, the samplers take them
    note       metrics, ledger; now and then evaluation and a checkpoint

A checkpoint is one commit of what the trainer and the controller know: weights and optimizer of every rank, position in
the prompts, counts. With the embedded sampler in deterministic mode a stage that was killed at any instant and started
again ends on the same bytes as one that was not. Not covered: staleness above 0, samplers on other machines, partial
rollouts.
"""

import asyncio
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from nanodag.config.schema import RLStage
from nanodag.data.mixture import Mixture
from nanodag.errors import NanodagError, SamplerError, StageFailed
from nanodag.rl.generation import Generator, Harvest
from nanodag.rl.metrics import Sums, drop_counts, rollout_metrics, trainer_metrics
from nanodag.rl.prompts import Prompt, PromptCursor, first_prompts
from nanodag.rl.records import Records
from nanodag.rl.services import Services
from nanodag.store.checkpoints import Checkpoints
from nanodag.store.files import write_json
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.encoding import Encoding
from nanodag.worker import Job, finish, leave_stopped, load_job, stop_requested

log = logging.getLogger(__name__)

POLL_S = 0.2
EMPTY_STEPS_IN_A_ROW = 10
# Mean size of old minus sampler logprob, in nats a token, above which the sampler does not have the trainer's weights.
LARGEST_MISMATCH = {"fp32": 0.01, "bf16": 0.3}
T = TypeVar("T")


class Stopped(Exception):
    """A stop was asked for while the next step was being generated."""


class Controller:
    """One RL stage. services: started, ended by who made them."""

    def __init__(self, job: Job, services: Services, runner: asyncio.Runner) -> None:
        self._job = job
        self._config: RLStage = job.config
        self._services = services
        self._runner = runner
        self._renderer = load_renderer(job.inputs["model"])
        longest = services.context - self._config.max_new_tokens
        mixture = Mixture(self._config.data, kind="prompt", seed=int(self._config.seed), repeat=True, mirror=job.mirror)
        self._cursor = PromptCursor(mixture, self._renderer, longest=longest)
        self._held_out = self._held_out_prompts(longest)
        self._generator = Generator(
            self._config,
            services.samplers,
            services.pool,
            Encoding(job.inputs["model"]),
            self._renderer.stop_ids,
        )
        self._checkpoints = Checkpoints(job.checkpoints, keep=self._config.keep_checkpoints)
        totals = {"sampled": 0, "prompt": 0, "computed": 0, "empty_steps": 0}
        self._state: dict[str, Any] = {"step": 0, "version": 0, "totals": totals, "evals": {}}
        self._seconds: dict[str, float] = {}

    def run(self) -> None:
        """Carry out the stage from where it is, and leave its product. Raises what went wrong; when a stop is asked
        for, leaves a checkpoint and ends the process."""
        is_resumed = self._resume()
        self._records = Records(self._job, resume_step=self._step if is_resumed else -1)
        try:
            self._work()
        except Stopped:
            self._leave()
        self._finish()

    def _work(self) -> None:
        """Steps, evaluations and checkpoints to the end. Wherever it raises Stopped, a checkpoint can be written."""
        saved = self._step
        self._sync()
        while True:
            if self._is_evaluation_due():
                self._evaluate()
            if self._step == self._config.num_steps:
                return
            if self._step % self._config.checkpoint_every == 0 and self._step != saved:
                self._save()
                saved = self._step
            if stop_requested():
                raise Stopped
            self._one_step()

    @property
    def _step(self) -> int:
        """Steps done."""
        return self._state["step"]

    # One step

    def _one_step(self) -> None:
        self._seconds = {}
        step, version = self._step + 1, self._state["version"]
        with self._timed("generate"):
            harvest = self._generate(step)
        values = rollout_metrics(harvest.all_rollouts) | drop_counts([drop.reason for drop in harvest.dropped])
        with self._timed("train"):
            path = self._records.rollouts(step, harvest)
            if harvest.kept:
                values |= self._train(step, path)
        self._count(harvest, values)
        self._state["step"] = step
        self._records.ledger(step, harvest, self._cursor.dropped_overlong())
        if harvest.kept:
            with suppress(Stopped):  # the step is done; a restart gives the samplers its weights
                self._sync()
        behind = [version - found for rollout in harvest.trained for found in rollout.versions]
        values |= {"version": self._state["version"], "staleness": max(behind, default=0)}
        self._records.step(step, harvest, self._seconds, values)

    def _generate(self, step: int) -> Harvest:
        before = self._cursor.state_dict()
        try:
            return self._await(self._generator.step(self._cursor, step))
        except Stopped:
            self._cursor.load_state_dict(before)  # nothing of this step was used up
            raise

    def _train(self, step: int, path: str) -> dict[str, float]:
        replies = self._services.link.ask("train", step=step, rollouts=path)
        first = replies[0]
        values = trainer_metrics([Sums(**reply["sums"]) for reply in replies], num_updates=first["num_updates"])
        self._state["version"] += first["num_updates"]
        self._check_mismatch(values["mismatch_absolute"])
        return values | {
            "gradient_norm": first["gradient_norm"],
            "learning_rate": first["learning_rate"],
            "computed_tokens": sum(reply["computed_tokens"] for reply in replies),
        }

    def _check_mismatch(self, found: float) -> None:
        precision = "bf16" if "bf16" in (self._config.precision, self._config.sampler.precision) else "fp32"
        limit = LARGEST_MISMATCH[precision]
        if found > limit:
            raise StageFailed(
                f"The log-probabilities of sampler and trainer differ by {found:.3g} nats a token on average; {limit} "
                f"is the limit for {precision}. The sampler does not have the trainer's weights, or computes something "
                "else."
            )

    def _count(self, harvest: Harvest, values: dict[str, float]) -> None:
        """Add up what the stage's cost is made of; end it when nothing is left to learn from."""
        totals = self._state["totals"]
        totals["sampled"] += sum(rollout.num_sampled for rollout in harvest.all_rollouts)
        totals["prompt"] += sum(len(prompt.token_ids) for prompt in harvest.prompts)
        totals["computed"] += values.get("computed_tokens", 0)
        totals["empty_steps"] = 0 if harvest.kept else totals["empty_steps"] + 1
        if totals["empty_steps"] >= EMPTY_STEPS_IN_A_ROW:
            reasons = drop_counts([drop.reason for drop in harvest.dropped])
            raise StageFailed(
                f"No group passed the filters in {EMPTY_STEPS_IN_A_ROW} steps in a row; the last one: {reasons}. The "
                "prompts are all too hard or all too easy for this model: train it on their format first, or choose "
                "others."
            )

    def _sync(self) -> None:
        """Give the samplers the trainer's weights."""
        with self._timed("sync"):
            version, sync = self._state["version"], self._services.sync
            folder = self._services.sync_folder / f"version-{version}"
            self._await(sync.publish(folder, version, self._ask))
            self._await(sync.load(folder, version))
            for older in self._services.sync_folder.iterdir():
                if older != folder:
                    shutil.rmtree(older)

    async def _ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        return self._services.link.ask(do, **arguments)

    # Evaluation

    def _held_out_prompts(self, longest: int) -> list[Prompt]:
        config, job = self._config, self._job
        if config.eval_prompts == 0:
            return []
        if not config.validation and not any(source.held_out for source in config.data):
            log.warning("No evaluation: there is neither `validation` nor a source with `held_out`.")
            return []
        mixture = Mixture(
            config.validation or config.data,
            kind="prompt",
            seed=int(config.seed),
            part="all" if config.validation else "held_out",
            once=True,
            mirror=job.mirror,
        )
        return first_prompts(mixture, self._renderer, count=config.eval_prompts, longest=longest)

    def _is_evaluation_due(self) -> bool:
        is_time = self._step % self._config.eval_every == 0 or self._step == self._config.num_steps
        return bool(self._held_out) and is_time and str(self._step) not in self._state["evals"]

    def _evaluate(self) -> None:
        began = time.monotonic()
        rollouts = self._await(self._generator.greedy(self._held_out))
        reward = self._records.evaluation(self._step, rollouts, time.monotonic() - began)
        self._state["evals"][str(self._step)] = reward

    # Checkpoints and the end

    def _save(self) -> None:
        """One commit of everything that the rest of the stage depends on."""
        with self._timed("checkpoint"):
            folder = self._checkpoints.begin(self._step)
            replies = self._services.link.ask("save", folder=str(folder))
            assert all(reply["num_updates"] == self._state["version"] for reply in replies)
            write_json(folder / "controller.json", {"state": self._state, "cursor": self._cursor.state_dict()})
            self._checkpoints.commit(self._step)
        log.info("step %d: checkpoint (%.2f s)", self._step, self._seconds["checkpoint"])

    def _resume(self) -> bool:
        """Go back to the newest valid checkpoint; False when there is none."""
        found = self._checkpoints.newest_valid()
        if found is not None:
            step, folder = found
            saved = json.loads((folder / "controller.json").read_text(encoding="utf-8"))
            self._state = saved["state"]
            self._cursor.load_state_dict(saved["cursor"])
            self._services.link.ask("load", folder=str(folder), num_updates=self._state["version"])
            log.info("going on after step %d", step)
        return found is not None

    def _leave(self) -> None:
        self._save()
        self._records.close()
        self._services.end()
        leave_stopped()

    def _finish(self) -> None:
        self._job.output.parent.mkdir(parents=True, exist_ok=True)
        self._services.link.ask("export", folder=str(self._job.output))
        self._records.close()
        totals, parameters = self._state["totals"], self._services.model.num_parameters
        evals = {int(step): value for step, value in self._state["evals"].items() if value is not None}
        metrics: dict[str, Any] = {"steps": self._step, "version": self._state["version"]}
        if evals:
            metrics |= {"eval_reward_before": evals.get(0), "eval_reward": evals[max(evals)]}
        # 2 FLOPs a parameter and token forward, 4 backward; prompts are run once for a group on both sides.
        flops = 6 * parameters * totals["computed"] + 2 * parameters * (totals["sampled"] + totals["prompt"])
        finish(
            self._job,
            metrics=metrics,
            cost={"tokens": totals["computed"], "sampled_tokens": totals["sampled"], "flops": flops},
        )

    # Waiting

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine; given up when a stop is asked for (Stopped) or a child has ended (StageFailed)."""
        return self._runner.run(self._watched(work))

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_S)
                if task.done():
                    break
                self._services.children.check()
                if stop_requested():
                    raise Stopped
            return task.result()
        except SamplerError:
            if stop_requested():  # the signal reached the sampler too
                raise Stopped from None
            raise
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def main() -> None:
    """Carry out the job named on the command line."""
    job = load_job()
    services = Services(job)
    try:
        with services, asyncio.Runner() as runner:
            try:
                Controller(job, services, runner).run()
            except NanodagError as error:
                raise services.children.cause_of(error) from error
    except NanodagError as error:
        log.error("%s: %s", type(error).__name__, error)
        sys.stderr.flush()
        os._exit(services.children.exit_code)
