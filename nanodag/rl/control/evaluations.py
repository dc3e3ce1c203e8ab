"""Evaluations of a stage's policies: held-out prompts, benchmarks, and which weights are the best. No torch here.

A benchmark is an entry as eval stages have it. Items, order, seeds of samples and scoring are those of an eval stage;
the answers come from the stage's own samplers, and the longest prompt and answer are bounded by their context.

For a stage that leaves its best weights (`keep: best:<metric>`) the trainer writes each set of weights that is to be
evaluated as the folder that the stage would end with. It stays until its score is known, and after that while no later
one is better. A checkpoint has hard links to these folders: they take no room twice, their bytes are verified with it,
and they outlive whatever is removed here. So a stage that was killed resumes with the best weights of its checkpoint.
"""

import asyncio
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_sections import HELD_OUT
from nanodag.data.mixture import Mixture
from nanodag.errors import ConfigError, StageFailed
from nanodag.errors.words import counted
from nanodag.evaluation.benchmark import AskedItem, Benchmark, open_benchmark
from nanodag.evaluation.results import Answer, BenchmarkResult, Ending
from nanodag.inference.protocol import Request
from nanodag.rl.control.checks import unless_stopped
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.control.step_records import Records
from nanodag.rl.rollouts.metrics import Stopwatch
from nanodag.rl.rollouts.prompts import PolicyFormat, Prompt, first_prompts
from nanodag.rl.rollouts.rollout import finish_reason_of
from nanodag.tokenizer.chat import ChatRenderer
from nanodag.worker.job import Job

log = logging.getLogger(__name__)


class PolicyBenchmark:
    """A benchmark of a stage, and the prompts of its items. How the policy is asked the stage says where the benchmark
    does not. generator: of the stage's rollouts, whose samplers are asked. context: tokens of a sampler's slot."""

    def __init__(
        self, benchmark: Benchmark, generator: RolloutGenerator, renderer: ChatRenderer, *, context: int
    ) -> None:
        self.benchmark, self._config, rollout = benchmark, benchmark.config, generator.config.rollout
        self._sampler, self._encoding, self._stop_ids = generator.sampler, generator.encoding, generator.stop_ids
        own = self._config.max_new_tokens
        self._longest = rollout.max_new_tokens if own == "auto" else own
        self._room = context - self._longest
        source = self._config.source
        switches = {**rollout.template_options, **(source.template_options if source is not None else {})}
        self._prompts = {item.id: renderer.prompt(item.messages, switches) for item in benchmark.items}
        # Thinking tags that are special tokens: the answer is found by them.
        thinking, known = self._config.thinking, self._encoding.token_ids()
        tags = () if thinking is None else (thinking.begin, thinking.end)
        self._hidden_ids = self._encoding.special_ids - {known[tag] for tag in tags if tag in known}
        if num_over := sum(len(prompt) > self._room for prompt in self._prompts.values()):
            log.warning(
                "Benchmark %s: %d of %s are longer than %d tokens, what sampler.context leaves beside max_new_tokens; "
                "they are not asked, and count as wrong and as too_long.",
                self._config.name, num_over, counted(len(self._prompts), "prompt"), self._room,
            )  # fmt: skip

    async def result(self) -> BenchmarkResult:
        """Ask every item, and score the answers. Raises SamplerError for an answer that a sampler gave up."""
        answers = await asyncio.gather(*map(self._answers, self.benchmark.items))
        by_id = {item.id: item_answers for item, item_answers in zip(self.benchmark.items, answers, strict=True)}
        # in a thread: a program of a code benchmark may run for seconds, while rollouts must go on
        return await asyncio.to_thread(self.benchmark.result, by_id)

    async def _answers(self, item: AskedItem) -> list[Answer]:
        prompt = self._prompts[item.id]
        if len(prompt) > self._room:
            return [Answer(ending="too_long")] * self._config.num_samples
        requests = []
        for n in range(self._config.num_samples):
            params = self.benchmark.params(item, n, max_new_tokens=self._longest, stop_token_ids=self._stop_ids)
            rid = f"eval-{self._config.name}-{item.id}-{n}"
            requests.append(Request(input_ids=prompt, params=params, rid=rid, return_logprob=False))
        completions = [completion for (completion,) in await self._sampler.generate(requests)]
        thinking, text = self._config.thinking, self._encoding.decode(prompt).rstrip()
        is_open = thinking is not None and text.endswith(thinking.begin)
        answers = []
        for completion, request in zip(completions, requests, strict=True):
            ending: Ending = "length" if finish_reason_of(completion) == "length" else "stop"
            ids, stops = completion.output_ids, request.params.stop or ()
            ids = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
            text = self._encoding.decode([token for token in ids if token not in self._hidden_ids])
            answers.append(self.benchmark.answer(text, ending=ending, is_open=is_open, stops=stops))
        return answers


def best_step(values: Mapping[int, float | None], *, is_highest: bool) -> int | None:
    """The step with the best score, the earliest of equal ones; None where there is no score."""
    known = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
    sign = 1 if is_highest else -1
    return min(known, key=lambda step: (-sign * known[step], step), default=None)


class Evaluations:
    """The held-out prompts and benchmarks of a stage, the scores of its policies so far, and the best weights, in a
    folder on its checkpoints' file system that is emptied. context: as of PolicyBenchmark."""

    def __init__(
        self, job: Job, generator: RolloutGenerator, policy_format: PolicyFormat, stopwatch: Stopwatch, *, context: int
    ) -> None:
        self._config: RLStage = job.config
        self._generator, self._timed = generator, stopwatch.timed
        self._benchmarks: dict[str, PolicyBenchmark] = {}
        for entry in self._config.evaluation.benchmarks:
            opened = open_benchmark(entry, seed=int(self._config.seed), mirror=str(job.mirror or ""))
            self._benchmarks[entry.name] = PolicyBenchmark(opened, generator, policy_format.renderer, context=context)
        longest = context - self._config.rollout.max_new_tokens
        self._held_out, self._num_too_long = _held_out_prompts(job, policy_format, longest)
        self._best, self._is_highest = job.workspace / "best", True
        shutil.rmtree(self._best, ignore_errors=True)
        if name := self._config.best_metric:
            if name == HELD_OUT and not self._held_out:
                raise ConfigError(f"keep {self._config.keep}: no held-out prompt fits into sampler.context; raise it.")
            self._is_highest = name == HELD_OUT or self._benchmarks[name].benchmark.higher_is_better
            self._best.mkdir(parents=True)
        self.scores: dict[str, dict[int, float | None]] = {}  # by HELD_OUT or benchmark, then policy

    def due(self, policy: int) -> list[str]:
        """Evaluations of a policy that are due: HELD_OUT, names of benchmarks. Weights that stay are evaluated once."""
        config = self._config
        if not config.has_samplers or (policy and not config.has_trainer):
            return []
        names = [*[HELD_OUT] * bool(self._held_out), *self._benchmarks]
        due = [name for name in names if config.evaluation.is_time(name, policy, num_steps=config.num_steps)]
        return [name for name in due if policy not in self.scores.get(name, {})]

    async def evaluate(self, policy: int, records: Records) -> None:
        """Answer the held-out prompts and the benchmarks whose time it is, one after the other."""
        for name in self.due(policy):
            began, scores = time.monotonic(), self.scores.setdefault(name, {})
            if name == HELD_OUT:
                with self._timed("evaluate"):
                    answers = await unless_stopped(self._generator.answers(self._held_out))
                seconds, too_long = time.monotonic() - began, self._num_too_long
                scores[policy] = records.evaluation(policy, answers, seconds, self._held_out, too_long=too_long)
            else:
                with self._timed("evaluate"):
                    result = await unless_stopped(self._benchmarks[name].result())
                scores[policy] = records.benchmark(policy, result, time.monotonic() - began)
            if name == self._config.best_metric:
                self._prune()

    def weights_to_keep(self, policy: int) -> Path | None:
        """Folder for the weights of a policy that may turn out to be the best; None for others, and once it exists."""
        folder = self._weights_of(policy)  # it is there where a checkpoint had it
        return folder if self._config.best_metric in self.due(policy) and not folder.is_dir() else None

    def save(self, checkpoint: Path) -> None:
        """Link the weights of the best policy, and of those without a score yet, into a checkpoint."""
        if self._config.best_metric:
            shutil.copytree(self._best, checkpoint / self._best.name, copy_function=os.link)

    def load(self, checkpoint: Path, scores: Mapping[str, Mapping[str, float | None]]) -> None:
        """Go back to what a checkpoint has. scores: policies as JSON has them, as text."""
        self.scores = {name: {int(policy): value for policy, value in of.items()} for name, of in scores.items()}
        if self._config.best_metric:
            shutil.rmtree(self._best)
            shutil.copytree(checkpoint / self._best.name, self._best, copy_function=os.link)

    def is_over(self) -> bool:
        """True once evaluation says to stop early: `patience` evaluations, or more, came after the best one; never
        before there is a score."""
        best, scores = self._best_policy(), self.scores.get(self._config.best_metric, {})
        return best is not None and sum(policy > best for policy in scores) >= self._config.evaluation.patience

    def leave_best(self, output: Path) -> int | None:
        """Make the weights of the best policy the stage's product, and return its number; None where the last ones are
        to be left. Raises StageFailed where no evaluation has a score."""
        if not self._config.best_metric:
            return None
        kept = self._best_policy()
        if kept is None:
            raise StageFailed(
                f"keep {self._config.keep}: no evaluation has a score, as all its rewards failed. Mend the reward, or "
                "set keep to last."
            )
        shutil.rmtree(output, ignore_errors=True)  # of a process that was killed here
        shutil.copytree(self._weights_of(kept), output, copy_function=os.link)
        log.info("kept: the weights of step %d, the best by %s", kept, self._config.best_metric)
        return kept

    def _best_policy(self) -> int | None:
        return best_step(self.scores.get(self._config.best_metric, {}), is_highest=self._is_highest)

    def _weights_of(self, policy: int) -> Path:
        """Folder of weights, which may still have to be written."""
        return self._best / f"policy-{policy}"

    def _prune(self) -> None:
        """Remove weights whose score is known and is not the best."""
        for policy in self.scores[self._config.best_metric].keys() - {self._best_policy()}:
            shutil.rmtree(self._weights_of(policy), ignore_errors=True)

    def metrics(self) -> dict[str, Any]:
        """First and last scores, as the stage's metrics have them."""
        metrics: dict[str, Any] = {}
        for name, scores in self.scores.items():
            key = name if name == HELD_OUT else f"benchmark_{name}"
            if known := {policy: value for policy, value in scores.items() if value is not None}:
                metrics |= {key: known[max(known)]} | ({f"{key}_before": known[0]} if 0 in known else {})
        if HELD_OUT in metrics or self._num_too_long:
            metrics["eval_too_long"] = self._num_too_long
        return metrics


def _held_out_prompts(job: Job, policy_format: PolicyFormat, longest: int) -> tuple[list[Prompt], int]:
    """The prompts that each evaluation asks, and how many were too long to be asked."""
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
    return first_prompts(mixture, policy_format, count=config.evaluation.eval_prompts, longest=longest)
