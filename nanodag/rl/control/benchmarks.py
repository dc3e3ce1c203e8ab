"""The policy's answers to benchmarks while it trains, and their scores. No torch here.

A benchmark is an entry as eval stages have it. Items, order, seeds of samples and scoring are those of an eval stage;
the answers come from the stage's own samplers, and the longest prompt and answer are bounded by their context.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_sections import RolloutSection
from nanodag.errors import SamplerError
from nanodag.errors.words import counted
from nanodag.evaluation.benchmark import AskedItem, Benchmark, open_benchmark
from nanodag.evaluation.results import Answer, BenchmarkResult, Ending
from nanodag.inference.protocol import Completion, Request
from nanodag.rl.control.generation import Sampler
from nanodag.tokenizer.chat import ChatRenderer
from nanodag.tokenizer.encoding import Encoding

log = logging.getLogger(__name__)


class PolicyBenchmarks:
    """The benchmarks of a stage, opened. context: tokens of a sampler's slot. mirror: a folder, None for the hub."""

    def __init__(
        self,
        config: RLStage,
        sampler: Sampler,
        encoding: Encoding,
        renderer: ChatRenderer,
        *,
        context: int,
        mirror: Path | None,
    ) -> None:
        opened = [
            open_benchmark(one, seed=int(config.seed), mirror=str(mirror or "")) for one in config.evaluation.benchmarks
        ]
        self._asked = {
            one.config.name: _Asked(one, encoding, renderer, config.rollout, context=context) for one in opened
        }
        self._sampler = sampler

    @property
    def names(self) -> list[str]:
        """In the order of the config."""
        return list(self._asked)

    def higher_is_better(self, name: str) -> bool:
        """Whether more is better by the main metric of a benchmark."""
        return self._asked[name].benchmark.higher_is_better

    async def result(self, name: str) -> BenchmarkResult:
        """Ask every item, and score the answers. Raises SamplerError for an answer that a sampler gave up."""
        asked = self._asked[name]
        answers = await asyncio.gather(*(asked.answers(item, self._sampler) for item in asked.benchmark.items))
        by_id = {item.id: given for item, given in zip(asked.benchmark.items, answers, strict=True)}
        # in a thread: a program of a code benchmark may run for seconds, while rollouts must go on
        return await asyncio.to_thread(asked.benchmark.result, by_id)


class _Asked:
    """A benchmark and the prompts of its items. rollout: how the policy is asked, where the benchmark does not say."""

    def __init__(
        self,
        benchmark: Benchmark,
        encoding: Encoding,
        renderer: ChatRenderer,
        rollout: RolloutSection,
        *,
        context: int,
    ) -> None:
        self.benchmark = benchmark
        self._config = benchmark.config
        self._encoding = encoding
        self._stop_ids = (*renderer.stop_ids, *rollout.stop_token_ids)
        own = self._config.max_new_tokens
        self._longest = rollout.max_new_tokens if own == "auto" else own
        self._room = context - self._longest
        source = self._config.source
        switches = {**rollout.template_options, **(source.template_options if source is not None else {})}
        self._prompts = {item.id: renderer.prompt(item.messages, switches) for item in benchmark.items}
        self._kept_ids = self._ids_of_tags()
        if num_over := sum(len(prompt) > self._room for prompt in self._prompts.values()):
            log.warning(
                "Benchmark %s: %d of %s are longer than %d tokens, what sampler.context leaves beside max_new_tokens; "
                "they are not asked, and count as wrong and as too_long.",
                self._config.name, num_over, counted(len(self._prompts), "prompt"), self._room,
            )  # fmt: skip

    async def answers(self, item: AskedItem, sampler: Sampler) -> list[Answer]:
        """The answers of one item, in the order of the samples."""
        prompt = self._prompts[item.id]
        if len(prompt) > self._room:
            return [Answer(ending="too_long")] * self._config.num_samples
        params = [
            self.benchmark.params(item, number, max_new_tokens=self._longest, stop_token_ids=self._stop_ids)
            for number in range(self._config.num_samples)
        ]
        requests = [
            Request(input_ids=prompt, params=one, rid=f"eval-{self._config.name}-{item.id}-{n}", return_logprob=False)
            for n, one in enumerate(params)
        ]
        completions = [completion for (completion,) in await sampler.generate(requests)]
        is_open = self._config.thinking is not None and self._encoding.decode(prompt).rstrip().endswith(
            self._config.thinking.begin
        )
        return [
            self._answer(completion, stops=one.stop or (), is_open=is_open)
            for completion, one in zip(completions, params, strict=True)
        ]

    def _answer(self, completion: Completion, *, stops: Sequence[str], is_open: bool) -> Answer:
        reason = completion.finish_reason
        if reason is None or reason.type == "abort":
            message = "" if reason is None else f": {reason.message}"
            raise SamplerError(f"Benchmark {self._config.name}: a sampler gave up an answer{message}")
        ids, hidden = completion.output_ids, self._encoding.special_ids - self._kept_ids
        ids = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
        text = self._encoding.decode([token for token in ids if token not in hidden])
        end = min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))
        ending: Ending = "length" if reason.type == "length" else "stop"
        return self.benchmark.answer(text[:end], ending=ending, is_open=is_open)

    def _ids_of_tags(self) -> frozenset[int]:
        """Special tokens that are thinking tags: the answer is found by them."""
        if self._config.thinking is None:
            return frozenset()
        known = self._encoding.token_ids()
        tags = (self._config.thinking.begin, self._config.thinking.end)
        return frozenset(known[tag] for tag in tags if tag in known)
