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
a stage that was killed at any instant and started again ends on the same bytes as one that was not.
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from nanodag.config.kinds.rl import RLStage
from nanodag.data.mixture import Mixture
from nanodag.engines.fleet import Fleet
from nanodag.engines.replica import Replica
from nanodag.errors import NanodagError, StageFailed
from nanodag.inference.client import SamplerClient
from nanodag.rewards import sandbox
from nanodag.rl.control import checks
from nanodag.rl.control.evaluations import Evaluations
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.control.memory_turns import held_memory
from nanodag.rl.control.pool import RolloutPool
from nanodag.rl.control.saved_rollouts import SavedRollouts
from nanodag.rl.control.schedule import Position, Schedule, StopRequested
from nanodag.rl.control.services import Services
from nanodag.rl.control.step_records import Records, interval_of
from nanodag.rl.environments.runner import Turns
from nanodag.rl.environments.tools import declared_tools
from nanodag.rl.rollouts import batch as batches
from nanodag.rl.rollouts import metrics
from nanodag.rl.rollouts.prompts import PolicyFormat, PromptCursor
from nanodag.rl.rollouts.rollout import Rollout, read_lines
from nanodag.store.atomic import write_json
from nanodag.store.checkpoints import Checkpoints
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.encoding import Encoding
from nanodag.worker.job import Job, finish, leave_stopped, stop_can_wait, stop_requested

log = logging.getLogger(__name__)


class Controller:
    """One RL stage. services: started, ended by who made them. It does the work that its schedule asks for."""

    def __init__(self, job: Job, services: Services, runner: asyncio.Runner) -> None:
        self._job, self._services, self._runner = job, services, runner
        self._config: RLStage = job.config
        self.check, self.is_stop_requested = services.children.check, stop_requested  # of the schedule's work
        rollout, generate = self._config.rollout, self._config.rollout.generate
        renderer, encoding = load_renderer(job.inputs["model"]), Encoding(job.inputs["model"])
        self._encoding = encoding
        policy_format = PolicyFormat(renderer, rollout.template_options, declared_tools(generate))
        mixture = Mixture(self._config.data, kind="prompt", seed=int(self._config.seed), repeat=True, mirror=job.mirror)
        self._cursor = PromptCursor(
            mixture,
            policy_format,
            longest=services.context - rollout.max_new_tokens,
            skip_share=rollout.curriculum_skip,
            seed=int(self._config.seed),
        )
        self._used_up = self._cursor.state_dict()  # by finished rollout batches, not by one under way
        if self._config.has_samplers and generate.traits is not None and generate.traits.needs_sandbox:
            sandbox.walls()  # MissingTool now, not an error in each sample
        turns = None
        if not generate.is_one_turn:
            vocabulary = services.model.vocab_size
            turns = Turns(self._config, encoding, renderer, context=services.context, vocabulary=vocabulary)
        stop_ids = (*renderer.stop_ids, *rollout.stop_token_ids)
        generator = RolloutGenerator(self._config, services.samplers, services.pool, encoding, stop_ids, turns)
        self._generator: RolloutGenerator | SavedRollouts = generator
        self._pool: RolloutPool | None = None
        if not rollout.is_sampled:
            self._generator = SavedRollouts(self._config, services.model)
        elif rollout.order == "arrival":
            self._pool = RolloutPool(generator, self._cursor, is_stopping=stop_requested)
        self._stopwatch = metrics.Stopwatch()
        self._evaluations = Evaluations(job, generator, policy_format, self._stopwatch, context=services.context)
        self._checkpoints = Checkpoints(job.checkpoints, keep=self._config.keep_checkpoints)
        totals = {"sampled": 0, "prompt": 0, "computed": 0, "scored": 0, "empty_steps": 0}
        self._state: dict[str, Any] = {"version": 0, "versions": [0], "totals": totals}
        self._published: dict[int, tuple[int, Path]] = {}  # policy -> version and folder of its weights
        self._given: int | None = None  # the version that the samplers have of this process
        self._values: dict[str, float] = {}
        self._first: Mapping[str, float] = {}  # the interval of step 1's mean reward, of this process
        self._rollouts: list[Rollout] = []  # of the step, where some are shown

    def run(self, leave: Callable[[Job], dict[str, Any]] | None = None) -> None:
        """Run the stage from where it is, and leave its product. Raises what went wrong; when a stop is asked
        for, leaves a checkpoint and ends the process."""
        position = self._resume()
        stop_can_wait()  # a step may be under way from here on
        self._records = Records(
            self._job, resume_step=-1 if position is None else position.step, evaluated=self._evaluations.scores
        )
        rollout = self._config.rollout
        is_stale = bool(rollout.max_staleness) or not rollout.is_sampled
        if is_stale and self._config.algorithm.correction.name == "none" and not rollout.clone.best:
            log.warning("Rollouts of other weights and correction none: they are trained as if they were on policy.")
        schedule = Schedule(
            self,
            num_steps=self._config.num_steps,
            # a token of a partial rollout is a step older than what is generated beside it
            lag=rollout.max_staleness - (rollout.partial_rollouts == "correct") if rollout.is_sampled else 0,
            is_exact=bool(self._config.sampler.deterministic),
            begins=position or Position(),
            timed=self._stopwatch.timed,
            keeps_trainer=self._services.sync.keeps_trainer and self._config.has_trainer,
            loads_in_flight=self._config.weights.sync_mode != "finish",
            is_over=self._evaluations.is_over if self._config.evaluation.patience else None,
            takes_turns=self._config.placement == "shared",
        )
        try:
            self._runner.run(schedule.run())
        except StopRequested:
            self._runner.run(self.save(schedule.position))
            self._records.close()
            self._services.end()
            leave_stopped()
        self._finish(schedule.position.step, leave)

    async def load(self, policy: int) -> None:
        """Give the samplers the weights of a policy, unless they have them: a step may have changed nothing. Raises
        SamplerError when they do not have them then."""
        if self._is_given(policy):
            version, folder = self._published[policy]
            if version != self._given or self._config.placement == "shared":  # which takes the weights at each turn
                with self._stopwatch.timed("sync"):
                    async with self._services.lending.for_sync():
                        await self._services.sync.load(folder, version)
                self._given = version
        elif not self._config.has_trainer:  # those of the stage began with them, servers of others did not
            async with self._services.samplers.paused():
                await self._services.samplers.update_weights_from_disk(str(self._job.inputs["model"]), 0)
        if self._pool is not None:
            self._pool.samplers_have(policy)
        for older in [number for number in self._published if number < policy and self._is_given(policy)]:
            _, folder = self._published.pop(older)
            if folder not in [kept for _, kept in self._published.values()]:
                shutil.rmtree(folder, ignore_errors=True)  # not every sync leaves a folder

    async def generate(self, step: int) -> batches.RolloutBatch:
        """Generate what a step will train on."""
        is_traced = step in self._config.profile_steps and self._config.rollout.is_sampled and self._pool is None
        async with _traced(self._services.samplers, self._records.profile(step)) if is_traced else nullcontext():
            with self._stopwatch.timed("generate"):
                if self._pool is not None:
                    return await self._pool.take(step)
                batch = await checks.unless_stopped(self._generator.step(self._cursor, step))
        self._used_up = self._cursor.state_dict()
        return batch

    def is_evaluation_due(self, policy: int) -> bool:
        """True where the weights of a policy are to be evaluated and have not been."""
        return bool(self._evaluations.due(policy))

    async def evaluate(self, policy: int) -> None:
        """Answer the held-out prompts and the benchmarks whose time it is, one after the other."""
        await self._evaluations.evaluate(policy, self._records)

    async def train(self, step: int, batch: batches.RolloutBatch) -> None:
        """One step: counts, ledger and rollouts included."""
        rollout, versions = self._config.rollout, self._state["versions"]
        if rollout.is_sampled:
            batch = batches.without_stale(batch, versions, largest=rollout.max_staleness)
        if rollout.is_sampled and rollout.partial_rollout_tokens and rollout.partial_rollouts == "mask":
            batch = batches.without_older(batch)
        reasons = [drop.reason for drop in batch.dropped] + [reason for _, reason in batch.passed_over]
        values = metrics.rollout_metrics(batch.all_rollouts) | metrics.drop_counts(reasons)
        if step <= checks.FIRST_STEPS and rollout.is_sampled and self._config.has_trainer:
            if step == 1:
                checks.warn_of_first_step(values, batch, max_new_tokens=rollout.max_new_tokens)
            if rollout.order == "prompt" and not rollout.partial_rollout_tokens:  # else short ones end first
                self._first = checks.warn_of_fall(step, self._first, interval_of(batch.all_rollouts))
        if rollout.is_sampled:
            values |= batches.staleness_metrics(batch.trained, versions)
        if self._config.has_samplers:
            held = await held_memory(self._services.samplers)
            peaks = [each["peak_bytes"] for each in held if "peak_bytes" in each]  # not every engine says it
            values |= {"sampler_peak_bytes": max(peaks)} if peaks else {}
        await self._services.lending.to_trainer()
        path = self._records.rollouts(step, batch)
        if batch.kept and self._config.has_trainer:
            with self._stopwatch.timed("train"):
                values |= await self._update(step, path)
        if "mismatch_absolute" in values and rollout.is_sampled:
            is_stale = values["staleness_largest"] > 0
            checks.check_mismatch(values["mismatch_absolute"], self._config.weights, is_stale=is_stale)
        if (every := self._config.keep_weights_every) and step % every == 0:
            with self._stopwatch.timed("checkpoint"), self._records.weights(step) as folder:
                await self._export(folder)
        sampled = sum(sequence.num_sampled for sequence in batch.all_rollouts) if rollout.is_sampled else 0
        self._count(batch, values, sampled)
        self._records.ledger(step, batch)
        values |= {"sampled_tokens": sampled, "seconds_generate": batch.seconds, "partial_groups": batch.num_partial}
        values |= batch.pool
        self._rollouts = batch.all_rollouts if self._config.log_responses else []
        self._values = values | {"version": self._state["version"]}

    def note(self, step: int) -> None:
        """Write the metrics of a step."""
        seconds, spans = self._stopwatch.taken()
        rates = metrics.speeds(self._values, seconds, **self._services.model.sizes)
        taken = self._services.lending.taken() | self._services.sync.taken()
        self._records.step(step, seconds, self._values | rates | taken)
        self._records.responses(step, self._rollouts, self._encoding.decode)
        self._records.timeline(step, spans)

    async def publish(self, policy: int) -> None:
        """Have the trainer's weights ready for the samplers."""
        if not self._is_given(policy):
            return
        await self._services.lending.to_trainer()
        version, folder = self._state["version"], self._services.sync_folder / f"policy-{policy}"
        with self._stopwatch.timed("sync"):
            same = None if self._config.placement == "shared" else dict(self._published.values()).get(version)
            if same is None:
                await self._services.sync.publish(folder, version)
            self._published[policy] = (version, same or folder)
            if (kept := self._evaluations.weights_to_keep(policy)) is not None:
                await self._export(kept)

    def _is_given(self, policy: int) -> bool:
        """True where samplers get the weights of a policy: where a trainer changes them, to sample or be evaluated."""
        return self._config.has_trainer and (self._config.rollout.is_sampled or self.is_evaluation_due(policy))

    async def _export(self, folder: Path) -> None:
        """Write the weights as a model's folder: those of the stage's model where nothing is trained."""
        if self._config.has_trainer:
            is_alone, bases = self._config.optimizer.lora_save == "adapter", self._job.context.get("bases", {})
            how = {"adapter_of": bases.get("model", {})} if is_alone else {}
            await self._services.link.exchange("export", folder=str(folder), **how)
        else:
            shutil.copytree(self._job.inputs["model"], folder, dirs_exist_ok=True)

    async def _update(self, step: int, path: str) -> dict[str, float]:
        replies = await self._services.link.exchange(
            "train",
            step=step,
            rollouts=path,
            num_steps=self._config.num_steps,
            profile=str(self._records.profile(step)) if step in self._config.profile_steps else "",
        )
        first, state = replies[0], self._state
        state["version"] += first["num_updates"]
        if first["num_updates"]:
            # one more than may be used, so that what is too old is seen to be
            state["versions"] = [*state["versions"], state["version"]][-self._config.rollout.max_staleness - 2 :]
        return metrics.update_metrics(replies, critic_epochs=self._config.algorithm.critic.epochs)

    def _count(self, batch: batches.RolloutBatch, values: dict[str, float], sampled: int) -> None:
        """Add up what the stage's cost is made of; end it when nothing is left to learn from. sampled: tokens."""
        totals = self._state["totals"]
        totals["sampled"] += sampled
        totals["prompt"] += sum(len(prompt.token_ids) for prompt in batch.prompts) if sampled else 0
        totals["computed"] += values.get("computed_tokens", 0)
        totals["scored"] += values.get("scored_tokens", 0)
        is_empty = self._config.has_trainer and not batch.kept and not batch.num_partial
        totals["empty_steps"] = totals["empty_steps"] + 1 if is_empty else 0
        if totals["empty_steps"] >= checks.EMPTY_STEPS_IN_A_ROW:
            reasons = metrics.drop_counts([drop.reason for drop in batch.dropped])
            raise StageFailed(
                f"No group passed the filters in {totals['empty_steps']} steps in a row; the last one: {reasons}. The "
                "prompts are all too hard or all too easy for this model: train it on their format first, or choose "
                "others."
            )

    def is_checkpoint_due(self, step: int) -> bool:
        """True where a checkpoint is saved after a step."""
        return step % self._config.checkpoint_every == 0

    async def save(self, position: Position) -> None:
        """One commit of everything that the rest of the stage depends on, as it is when this is called."""
        weights = {t: self._published[t] for t in range(position.policy, position.step) if t in self._published}
        cursor, pooled, policies = (self._used_up, None, {}) if self._pool is None else self._pool.state()
        saved = json.dumps(
            {
                "state": self._state,
                "evals": self._evaluations.scores,
                "cursor": cursor,
                "pool": policies,
                "step": position.step,
                "policy": position.policy,
                "weights": {policy: version for policy, (version, _) in weights.items()},
                "source": self._generator.identity,
            }
        )
        with self._stopwatch.timed("checkpoint"):
            began, folder = time.monotonic(), self._checkpoints.begin(position.step)
            self._evaluations.save(folder)  # at once: it is what `saved` says only until an evaluation ends
            replies = await self._services.link.exchange("save", folder=str(folder))
            checks.check_ranks(folder, replies, self._state["version"])
            for number, batch in enumerate(position.waiting, start=position.step + 1):
                batches.write_batch(folder / f"batch-{number}.json", batch)
            if pooled is not None:
                batches.write_batch(folder / "pool.json", pooled)
            for policy, (_, source) in weights.items():
                await self._services.sync.write(source)
                shutil.copytree(source, folder / f"policy-{policy}")
            write_json(folder / "controller.json", json.loads(saved))
            await asyncio.to_thread(self._checkpoints.commit, position.step)
        log.info("step %d: checkpoint (%.2f s)", position.step, time.monotonic() - began)

    def _resume(self) -> Position | None:
        """Go back to the newest valid checkpoint; None when there is none."""
        checkpoint = self._checkpoints.newest_valid()
        if checkpoint is None:
            return None
        step, folder = checkpoint
        saved = json.loads((folder / "controller.json").read_text(encoding="utf-8"))
        checks.check_totals(folder, saved["state"]["totals"], self._state["totals"])
        checks.check_source(folder, saved["source"], self._generator.identity)
        self._state, self._used_up = saved["state"], saved["cursor"]
        self._cursor.load_state_dict(self._used_up)
        self._evaluations.load(folder, saved["evals"])
        for policy, version in saved["weights"].items():
            copy = self._services.sync_folder / f"policy-{policy}"
            shutil.copytree(folder / f"policy-{policy}", copy)
            self._published[int(policy)] = (version, copy)
        self._runner.run(self._services.lending.to_trainer())
        replies = self._runner.run(self._services.link.exchange("load", folder=str(folder)))
        checks.check_ranks(folder, replies, self._state["version"])
        waiting = sorted(folder.glob("batch-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
        log.info("going on after step %d; %d rollout batches wait", step, len(waiting))
        # A reward that failed is no result: it is computed again.
        judging = self._generator.judged_again(self._cursor, step, [batches.read_batch(path) for path in waiting])
        position = Position(step, saved["policy"], self._runner.run(judging))
        self._used_up = self._cursor.state_dict()
        if self._pool is not None:
            last, kept = step + len(position.waiting), batches.read_batch(folder / "pool.json")
            self._runner.run(self._pool.restore(kept, saved["pool"], step=last, policy=position.policy))
        return position

    def _finish(self, steps: int, leave: Callable[[Job], dict[str, Any]] | None) -> None:
        self._job.output.parent.mkdir(parents=True, exist_ok=True)
        kept = self._evaluations.leave_best(self._job.output) if leave is None else None
        if leave is None and kept is None:
            self._runner.run(self._services.lending.to_trainer())
            self._runner.run(self._export(self._job.output))
        self._records.close()
        summary: dict[str, Any] = {"steps": steps}
        if self._config.has_trainer:  # else there is nothing that could be said to have been learned
            summary["version"] = self._state["version"]
        if self._config.has_trainer and self._config.rollout.is_sampled:  # rewards of files say nothing of this policy
            summary |= metrics.learning_of(list(read_lines(self._job.metrics_path)))
        if self._config.evaluation.patience:
            summary["stopped_early"] = steps < self._config.num_steps
        summary |= {"kept_step": kept} if kept is not None else {}
        summary |= leave(self._job) if leave is not None else {}
        summary |= self._evaluations.metrics()
        finish(self._job, metrics=summary, cost=metrics.cost_of(self._state["totals"], **self._services.model.sizes))


@asynccontextmanager
async def _traced(samplers: Fleet, folder: Path) -> AsyncIterator[None]:
    """Each sampler traces what it does inside, into a folder of its own below this one. A trace that fails, also
    because its sampler was lost, costs a warning."""

    async def start(replica: Replica, client: SamplerClient) -> None:
        own = folder / f"sampler-{replica.number}"
        own.mkdir(parents=True, exist_ok=True)
        await client.start_profile(own)

    try:
        await samplers.each(start, are_up=True)
    except NanodagError as error:
        log.warning("samplers are not traced for %s: %s", folder.name, error)
    yield
    try:
        await samplers.each(lambda replica, client: client.stop_profile(), are_up=True)
    except NanodagError as error:
        log.warning("no trace of a sampler for %s: %s", folder.name, error)
