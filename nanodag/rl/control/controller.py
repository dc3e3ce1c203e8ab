"""The RL stage: `python -m nanodag.rl job.json`. It owns the clock, the prompts, the rollouts and the ledger. No torch.

A step:

    generate   groups for the next prompts, rewards computed beside it, groups chosen in prompt order or as they
               arrive
    train      the trainer's ranks read the rollouts from a file and update the weights
    sync       they write the weights to memory, the samplers take them
    note       metrics, ledger; now and then evaluation and a checkpoint

nanodag.rl.control.schedule says what of this runs beside what; with `max_staleness: 0` a step trains what its own
weights sampled. A checkpoint is one commit of what the trainer and the controller know: weights and optimizer of every
rank, position in the prompts, rollouts that wait to be trained, counts. With the embedded sampler in deterministic mode
a stage that was killed at any instant and started again ends on the same bytes as one that was not. Not covered:
samplers on other machines.
"""

import asyncio
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_sections import HELD_OUT
from nanodag.data.mixture import Mixture
from nanodag.errors import ConfigError, CorruptArtifact, NanodagError, StageFailed
from nanodag.host.garbage import collect_rarely
from nanodag.rewards import sandbox
from nanodag.rl.control.benchmarks import PolicyBenchmarks
from nanodag.rl.control.best_weights import BestWeights
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.control.pool import pool_of
from nanodag.rl.control.schedule import Position, Schedule, StopRequested
from nanodag.rl.control.services import Services
from nanodag.rl.control.step_records import Records
from nanodag.rl.rollouts.batch import RolloutBatch, read_batch, write_batch
from nanodag.rl.rollouts.learning import learning_of
from nanodag.rl.rollouts.metrics import Sums, critic_metrics, drop_counts, rollout_metrics, speeds, trainer_metrics
from nanodag.rl.rollouts.prompts import Prompt, PromptCursor, first_prompts
from nanodag.rl.rollouts.staleness import staleness_metrics, without_older, without_stale
from nanodag.rl.rollouts.stopwatch import Stopwatch
from nanodag.rl.rollouts.turns.runner import Turns
from nanodag.store.atomic import write_json
from nanodag.store.checkpoints import Checkpoints
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.encoding import Encoding
from nanodag.worker.job import Job, finish, leave_stopped, leave_when_stopped, load_job, stop_can_wait, stop_requested

log = logging.getLogger(__name__)

EMPTY_STEPS_IN_A_ROW = 10
# Mean size of old minus sampler logprob, in nats a token, above which the sampler does not have the weights it says. In
# that of stale rollouts is also what the policy learned since, so only what no step can do is refused.
LARGEST_MISMATCH = {"fp32": 0.01, "bf16": 0.3}
LARGEST_STALE_MISMATCH = 2.0

T = TypeVar("T")


class Controller:
    """One RL stage. services: started, ended by who made them. It does the work that its schedule asks for."""

    def __init__(self, job: Job, services: Services, runner: asyncio.Runner) -> None:
        self._job = job
        self._config: RLStage = job.config
        self._services = services
        self._runner = runner
        self._renderer = load_renderer(job.inputs["model"])
        longest = services.context - self._config.rollout.max_new_tokens
        mixture = Mixture(self._config.data, kind="prompt", seed=int(self._config.seed), repeat=True, mirror=job.mirror)
        self._cursor = PromptCursor(
            mixture,
            self._renderer,
            longest=longest,
            skip_share=self._config.rollout.curriculum_skip,
            seed=int(self._config.seed),
        )
        self._used_up = self._cursor.state_dict()  # by finished rollout batches, not by one under way
        self._held_out, self._num_too_long = self._held_out_prompts(longest)
        encoding = Encoding(job.inputs["model"])
        turns = None
        generate = self._config.rollout.generate
        if generate.traits is not None and generate.traits.needs_sandbox:
            sandbox.walls()  # MissingTool now, not an error in each sample
        if not generate.is_one_turn:
            vocabulary = services.model.vocab_size
            turns = Turns(self._config, encoding, self._renderer, context=services.context, vocabulary=vocabulary)
        self._generator = RolloutGenerator(
            self._config, services.samplers, services.pool, encoding, self._renderer.stop_ids, turns
        )
        self._pool = pool_of(self._config, self._generator, self._cursor, is_stopping=stop_requested)
        self._benchmarks = PolicyBenchmarks(
            self._config, services.samplers, encoding, self._renderer, context=services.context, mirror=job.mirror
        )
        self._best = self._best_weights()
        self._checkpoints = Checkpoints(job.checkpoints, keep=self._config.keep_checkpoints)
        totals = {"sampled": 0, "prompt": 0, "computed": 0, "scored": 0, "empty_steps": 0}
        self._state: dict[str, Any] = {"version": 0, "versions": [0], "totals": totals, "evals": {}}
        self._published: dict[int, tuple[int, Path]] = {}  # policy -> version and folder of its weights
        self._stopwatch = Stopwatch()
        self._values: dict[str, float] = {}

    def run(self) -> None:
        """Run the stage from where it is, and leave its product. Raises what went wrong; when a stop is asked
        for, leaves a checkpoint and ends the process."""
        position = self._resume()
        stop_can_wait()  # a step may be under way from here on
        self._records = Records(
            self._job, resume_step=-1 if position is None else position.step, evaluated=self._state["evals"]
        )
        if self._config.rollout.max_staleness and self._config.algorithm.correction.name == "none":
            log.warning("max_staleness is above 0 and correction none: rollouts are trained as if they were on policy.")
        schedule = Schedule(
            self,
            num_steps=self._config.num_steps,
            # a token of a partial rollout is a step older than what is generated beside it
            lag=self._config.rollout.max_staleness - (self._config.rollout.partial_rollouts == "correct"),
            is_exact=bool(self._config.sampler.deterministic),
            position=position or Position(),
            timed=self._stopwatch.timed,
            keeps_trainer=self._services.sync.keeps_trainer,
            loads_in_flight=self._config.weights.sync_mode != "finish",
        )
        try:
            self._runner.run(schedule.run())
        except StopRequested:
            self._leave(schedule.position)
        self._finish()

    def check(self) -> None:
        """Raise StageFailed when a child has ended."""
        self._services.children.check()

    def is_stop_requested(self) -> bool:
        """True once a stop signal came."""
        return stop_requested()

    # The samplers' side

    async def load(self, policy: int) -> None:
        """Give the samplers the weights of a policy. Raises SamplerError when they do not have them then."""
        version, folder = self._published[policy]
        with self._stopwatch.timed("sync"):
            async with self._services.samplers.paused():
                await self._services.sync.load(folder, version)
        if self._pool is not None:
            self._pool.policy = policy
        for older in [number for number in self._published if number < policy]:
            shutil.rmtree(self._published.pop(older)[1], ignore_errors=True)  # not every sync leaves a folder

    async def generate(self, step: int) -> RolloutBatch:
        """What a step will train on."""
        with self._stopwatch.timed("generate"):
            if self._pool is not None:
                return await self._pool.take(step)
            batch = await _unless_stopped(self._generator.step(self._cursor, step))
        self._used_up = self._cursor.state_dict()
        return batch

    def is_evaluation_due(self, policy: int) -> bool:
        """Whether the weights of a policy are to be evaluated and have not been."""
        return bool(self._due(policy))

    async def evaluate(self, policy: int) -> None:
        """Answer the held-out prompts and the benchmarks whose time it is, one after the other."""
        for name in self._due(policy):
            value = await (self._answer_held_out(policy) if name == HELD_OUT else self._answer_benchmark(name, policy))
            self._state["evals"].setdefault(name, {})[str(policy)] = value
            if self._best is not None and name == self._config.best_metric:
                self._best.prune(self._scores(name))

    def _scores(self, name: str) -> dict[int, float | None]:
        """Scores by step, of the held-out prompts or a benchmark."""
        return {int(step): value for step, value in self._state["evals"].get(name, {}).items()}

    def _due(self, policy: int) -> list[str]:
        """What a policy is to be evaluated on and has not been: HELD_OUT, names of benchmarks."""
        config, done = self._config, self._state["evals"]
        names = [*[HELD_OUT] * bool(self._held_out), *self._benchmarks.names]
        due = [name for name in names if config.evaluation.is_time(name, policy, num_steps=config.num_steps)]
        return [name for name in due if str(policy) not in done.get(name, {})]

    async def _answer_held_out(self, policy: int) -> float | None:
        began = time.monotonic()
        with self._stopwatch.timed("evaluate"):
            rollouts = await _unless_stopped(self._generator.answers(self._held_out))
        seconds = time.monotonic() - began
        return self._records.evaluation(policy, rollouts, seconds, self._held_out, too_long=self._num_too_long)

    async def _answer_benchmark(self, name: str, policy: int) -> float:
        began = time.monotonic()
        with self._stopwatch.timed("evaluate"):
            result = await _unless_stopped(self._benchmarks.result(name))
        return self._records.benchmark(policy, result, time.monotonic() - began)

    # The trainer's side

    async def train(self, step: int, batch: RolloutBatch) -> None:
        """One step: counts, ledger and rollouts included."""
        batch = without_stale(batch, self._state["versions"], largest=self._config.rollout.max_staleness)
        if self._config.rollout.partial_rollout_tokens and self._config.rollout.partial_rollouts == "mask":
            batch = without_older(batch)
        reasons = [drop.reason for drop in batch.dropped] + [reason for _, reason in batch.passed_over]
        values = rollout_metrics(batch.all_rollouts) | drop_counts(reasons)
        values |= staleness_metrics(batch.trained, self._state["versions"])
        path = self._records.rollouts(step, batch)
        if batch.kept:
            with self._stopwatch.timed("train"):
                values |= await self._update(step, path)
            self._check_mismatch(values["mismatch_absolute"], is_stale=values["staleness_largest"] > 0)
        if (every := self._config.keep_weights_every) and step % every == 0:
            with self._stopwatch.timed("checkpoint"), self._records.weights(step) as folder:
                await self._services.link.exchange("export", folder=str(folder))
        self._count(batch, values)
        self._records.ledger(step, batch)
        sampled = sum(rollout.num_sampled for rollout in batch.all_rollouts)
        values |= {"sampled_tokens": sampled, "seconds_generate": batch.seconds, "partial_groups": batch.num_partial}
        values |= batch.pool
        self._values = values | {"version": self._state["version"]}

    def note(self, step: int) -> None:
        """Write the metrics of a step."""
        seconds, spans = self._stopwatch.taken()
        model = self._services.model
        body, head = model.num_matrix_parameters - model.num_head_parameters, model.num_head_parameters
        rates = speeds(self._values, seconds, num_parameters=body, num_head_parameters=head)
        self._records.step(step, seconds, self._values | rates)
        self._records.timeline(step, spans)

    async def publish(self, policy: int) -> None:
        """Have the trainer's weights ready for the samplers."""
        with self._stopwatch.timed("sync"):
            folder = self._services.sync_folder / f"policy-{policy}"
            await self._services.sync.publish(folder, self._state["version"])
            self._published[policy] = (self._state["version"], folder)
            if self._best is not None and self._config.best_metric in self._due(policy):
                await self._export_once(self._best.of(policy))  # it is there where a checkpoint had it

    async def _export_once(self, folder: Path) -> None:
        """Have the trainer's weights as the folder that the stage would end with now."""
        if not folder.is_dir():
            await self._services.link.exchange("export", folder=str(folder))

    async def _update(self, step: int, path: str) -> dict[str, float]:
        replies = await self._services.link.exchange("train", step=step, rollouts=path)
        first, state = replies[0], self._state
        state["version"] += first["num_updates"]
        if first["num_updates"]:
            # one more than may be used, so that what is too old is seen to be
            state["versions"] = [*state["versions"], state["version"]][-self._config.rollout.max_staleness - 2 :]
        values = trainer_metrics([Sums(**reply["sums"]) for reply in replies], num_updates=first["num_passes"])
        if "critic" in first:
            num_updates = first["num_parts"] * self._config.algorithm.critic.epochs
            values |= critic_metrics([Sums(**reply["critic"]) for reply in replies], num_updates=num_updates)
            values["critic_gradient_norm"] = first["critic_gradient_norm"]
        return values | {
            "gradient_norm": first["gradient_norm"],
            "skipped_updates": first["skipped_updates"],
            "learning_rate": first["learning_rate"],
            "computed_tokens": sum(reply["computed_tokens"] for reply in replies),
            "scored_tokens": sum(reply["scored_tokens"] for reply in replies),
            "peak_flops": sum(reply["peak_flops"] for reply in replies),
        }

    def _check_mismatch(self, found: float, *, is_stale: bool) -> None:
        precision = "bf16" if "bf16" in (self._config.optimizer.precision, self._config.sampler.precision) else "fp32"
        limit = LARGEST_STALE_MISMATCH if is_stale else LARGEST_MISMATCH[precision]
        if found > limit:
            raise StageFailed(
                f"The log-probabilities of sampler and trainer differ by {found:.3g} nats a token on average; {limit} "
                f"is the limit for {'stale rollouts' if is_stale else precision}. The sampler does not have the "
                "trainer's weights, or computes something else"
                + (", or learning_rate is far too high." * is_stale or ".")
            )

    def _count(self, batch: RolloutBatch, values: dict[str, float]) -> None:
        """Add up what the stage's cost is made of; end it when nothing is left to learn from."""
        totals = self._state["totals"]
        totals["sampled"] += sum(rollout.num_sampled for rollout in batch.all_rollouts)
        totals["prompt"] += sum(len(prompt.token_ids) for prompt in batch.prompts)
        totals["computed"] += values.get("computed_tokens", 0)
        totals["scored"] += values.get("scored_tokens", 0)
        totals["empty_steps"] = 0 if batch.kept or batch.num_partial else totals["empty_steps"] + 1
        if totals["empty_steps"] >= EMPTY_STEPS_IN_A_ROW:
            reasons = drop_counts([drop.reason for drop in batch.dropped])
            raise StageFailed(
                f"No group passed the filters in {EMPTY_STEPS_IN_A_ROW} steps in a row; the last one: {reasons}. The "
                "prompts are all too hard or all too easy for this model: train it on their format first, or choose "
                "others."
            )

    # Checkpoints and the end

    def is_checkpoint_due(self, step: int) -> bool:
        """Whether to save after a step."""
        return step % self._config.checkpoint_every == 0

    async def save(self, position: Position) -> None:
        """One commit of everything that the rest of the stage depends on, as it is when this is called."""
        weights = {t: self._published[t] for t in range(position.policy, position.step) if t in self._published}
        pool = None if self._pool is None else self._pool.state()
        saved = json.dumps(
            {
                "state": self._state,
                "cursor": self._used_up if pool is None else pool.cursor,
                "pool": {} if pool is None else pool.policies,
                "step": position.step,
                "policy": position.policy,
                "weights": {policy: version for policy, (version, _) in weights.items()},
            }
        )
        with self._stopwatch.timed("checkpoint"):
            began, folder = time.monotonic(), self._checkpoints.begin(position.step)
            if self._best is not None:  # at once: it is what `saved` says only until an evaluation ends
                self._best.save(folder)
            check_ranks(folder, await self._services.link.exchange("save", folder=str(folder)), self._state["version"])
            for number, batch in enumerate(position.waiting, start=position.step + 1):
                write_batch(folder / f"batch-{number}.json", batch)
            if pool is not None:
                write_batch(folder / "pool.json", pool.batch)
            for policy, (_, source) in weights.items():
                await self._services.sync.write(source)
                shutil.copytree(source, folder / f"policy-{policy}")
            write_json(folder / "controller.json", json.loads(saved))
            self._checkpoints.commit(position.step)
        log.info("step %d: checkpoint (%.2f s)", position.step, time.monotonic() - began)

    def _resume(self) -> Position | None:
        """Go back to the newest valid checkpoint; None when there is none."""
        checkpoint = self._checkpoints.newest_valid()
        if checkpoint is None:
            return None
        step, folder = checkpoint
        saved = json.loads((folder / "controller.json").read_text(encoding="utf-8"))
        check_totals(folder, saved["state"]["totals"], self._state["totals"])
        self._state, self._used_up = saved["state"], saved["cursor"]
        self._cursor.load_state_dict(self._used_up)
        if self._best is not None:
            self._best.load(folder)
        for policy, version in saved["weights"].items():
            copy = self._services.sync_folder / f"policy-{policy}"
            shutil.copytree(folder / f"policy-{policy}", copy)
            self._published[int(policy)] = (version, copy)
        replies = self._runner.run(self._services.link.exchange("load", folder=str(folder)))
        check_ranks(folder, replies, self._state["version"])
        waiting = sorted(folder.glob("batch-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
        log.info("going on after step %d; %d rollout batches wait", step, len(waiting))
        position = Position(step, saved["policy"], self._judged_again(step, [read_batch(path) for path in waiting]))
        if self._pool is not None:
            last, kept = step + len(position.waiting), read_batch(folder / "pool.json")
            self._runner.run(self._pool.restore(kept, saved["pool"], step=last, policy=position.policy))
        return position

    def _judged_again(self, step: int, waiting: Sequence[RolloutBatch]) -> tuple[RolloutBatch, ...]:
        """The rollout batches of this step's checkpoint. A reward that failed is no result: it is computed again."""
        judged = self._runner.run(self._generator.judged_again(self._cursor, step, waiting))
        self._used_up = self._cursor.state_dict()
        return judged

    def _leave(self, position: Position) -> None:
        self._runner.run(self.save(position))
        self._records.close()
        self._services.end()
        leave_stopped()

    def _finish(self) -> None:
        self._job.output.parent.mkdir(parents=True, exist_ok=True)
        kept = self._leave_weights()
        self._records.close()
        totals, model = self._state["totals"], self._services.model
        done = {name: by_number(values) for name, values in self._state["evals"].items()}
        evals = done.pop(HELD_OUT, {})
        metrics: dict[str, Any] = {"steps": self._config.num_steps, "version": self._state["version"]}
        metrics |= {"kept_step": kept} if self._best is not None else {}
        metrics |= learning_of([json.loads(line) for line in self._job.metrics_path.read_text("utf-8").splitlines()])
        if evals:
            metrics |= {"eval_reward": evals[max(evals)]} | ({"eval_reward_before": evals[0]} if 0 in evals else {})
        for name, values in done.items():
            metrics[f"benchmark_{name}"] = values[max(values)]
            metrics |= {f"benchmark_{name}_before": values[0]} if 0 in values else {}
        if evals or self._num_too_long:
            metrics["eval_too_long"] = self._num_too_long
        # 2 FLOPs a parameter and token forward, 4 backward; prompts are run once for a group on both sides, and have no
        # logits.
        forward, head = totals["sampled"] + totals["prompt"], model.num_head_parameters
        body = model.num_matrix_parameters - head
        flops = body * (6 * totals["computed"] + 2 * forward) + head * (6 * totals["scored"] + 2 * totals["sampled"])
        finish(
            self._job,
            metrics=metrics,
            cost={
                "tokens": totals["computed"],
                "forward_tokens": forward,
                "sampled_tokens": totals["sampled"],
                "flops": flops,
            },
        )

    def _leave_weights(self) -> int:
        """Write the stage's product; returns the step whose weights it has."""
        if self._best is None:
            self._runner.run(self._services.link.exchange("export", folder=str(self._job.output)))
            return self._config.num_steps
        kept = self._best.leave(self._scores(self._config.best_metric), self._job.output)
        if kept is None:
            raise StageFailed(
                f"keep {self._config.keep}: no evaluation has a score, as all its rewards failed. Mend the reward, or "
                "set keep to last."
            )
        log.info("kept: the weights of step %d, the best by %s", kept, self._config.best_metric)
        return kept

    def _best_weights(self) -> BestWeights | None:
        name = self._config.best_metric
        if not name:
            return None
        if name == HELD_OUT and not self._held_out:
            raise ConfigError(f"keep {self._config.keep}: no held-out prompt fits into sampler.context; raise it.")
        is_highest = name == HELD_OUT or self._benchmarks.higher_is_better(name)
        return BestWeights(self._job.workspace / "best", is_highest=is_highest)

    def _held_out_prompts(self, longest: int) -> tuple[list[Prompt], int]:
        """Those that each evaluation asks, and how many were too long to be asked."""
        config, job = self._config, self._job
        if config.evaluation.eval_prompts == 0:
            return [], 0
        if not config.evaluation.validation and not any(source.held_out for source in config.data):
            log.warning(
                "No evaluation on held-out prompts: there is neither `validation` nor a source with `held_out`."
            )
            return [], 0
        mixture = Mixture(
            config.evaluation.validation or config.data,
            kind="prompt",
            seed=int(config.seed),
            part="all" if config.evaluation.validation else "held_out",
            once=True,
            mirror=job.mirror,
        )
        return first_prompts(mixture, self._renderer, count=config.evaluation.eval_prompts, longest=longest)


def by_number(values: Mapping[str, float | None]) -> dict[int, float]:
    """Values of evaluations by step, those without one left out."""
    return {int(step): value for step, value in values.items() if value is not None}


def check_ranks(folder: Path, replies: Sequence[Mapping[str, Any]], version: int) -> None:
    """Raise StageFailed when a rank of the trainer that saved or loaded a checkpoint made other updates than the
    controller counts."""
    counts = [reply["num_updates"] for reply in replies]
    if set(counts) != {version}:
        raise StageFailed(
            f"Checkpoint {folder}: the trainer's ranks made {counts} updates, the controller counts {version}. Remove "
            "the checkpoint to begin again from the one before."
        )


async def _unless_stopped(work: Awaitable[T]) -> T:
    """What it finds. Raises Stopped when a stop was asked for meanwhile: the signal may have ended what computes
    rewards."""
    try:
        result = await work
    except StageFailed:
        if not stop_requested():
            raise
        raise StopRequested from None
    if stop_requested():
        raise StopRequested
    return result


def main() -> None:
    """Run the job named on the command line."""
    job = load_job()
    collect_rarely()
    services = Services(job)
    leave_when_stopped(services.abandon)
    try:
        with services, asyncio.Runner() as runner:
            try:
                Controller(job, services, runner).run()
            except NanodagError as error:
                raise services.children.cause_of(error) from error
            finally:
                runner.run(services.samplers.disconnect())
    except NanodagError as error:
        log.error("%s: %s", type(error).__name__, error)
        sys.stderr.flush()
        os._exit(services.children.exit_code)


def check_totals(folder: Path, saved: Collection[str], known: Collection[str]) -> None:
    """Raise CorruptArtifact for a checkpoint whose totals are not those that this version counts."""
    if set(saved) != set(known):
        raise CorruptArtifact(
            f"Checkpoint {folder} was saved by another version of nanodag: it counts {', '.join(saved)}, and this one "
            f"{', '.join(known)}. Remove it to begin the stage again."
        )
