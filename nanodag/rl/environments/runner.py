"""Calls a function that generates, for each sample, and makes rollouts of what it returns. No torch here.

Calls of our entries share an event loop, in a thread beside the controller's; a user's own function runs in forks of a
process of its own (own_function.py). Either may take `timeout_s` between two answers of the sampler; then it is ended,
and its sample fails with the reason. One whose process somebody killed is called again: from the same seeds comes the
same.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from nanodag.api.tool_format import knows_calls
from nanodag.children.forks import EpisodeFailed, EpisodeLost
from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_parts import MAX_CALLS
from nanodag.data.records import refuse_images
from nanodag.errors import BadRequest, ConfigError, MissingTool, SamplerError
from nanodag.host.threads import LoopThread, MadeOnce, all_of
from nanodag.inference.protocol import Completion, Request, SamplingParams
from nanodag.inference.seeds import derived_seed
from nanodag.rewards.reward import Reward
from nanodag.rewards.text_rewards import REPORTED
from nanodag.rl.environments.own_function import ForkedFunction, samples_in
from nanodag.rl.environments.sample import Sample, TurnSampler
from nanodag.rl.environments.tools import TOOLS
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import ANSWER, FAILED, LAST_WORDS, Rollout, finish_reason_of, prompt_span
from nanodag.tokenizer.chat import ChatRenderer
from nanodag.tokenizer.encoding import Encoding

LONGEST_REASON = 1000  # letters
POLL_S = 0.2
MAX_PLAYS = 4  # of a sample whose process somebody else kills again and again

Ask = Callable[[Sequence[Request]], Awaitable[list[list[Completion]]]]


class Turns:
    """The function that a config names. context: of the sampler. vocabulary: of the model. Raises ConfigError for a
    function that cannot be imported, takes other options or cannot work with this chat format."""

    def __init__(
        self, config: RLStage, encoding: Encoding, renderer: ChatRenderer, *, context: int, vocabulary: int
    ) -> None:
        self._config = config.rollout.generate
        self._longest, self._has_process_reward = config.rollout.max_new_tokens, config.has_process_reward
        self._function = self._config.load()
        if self._config.traits is None:
            self._function = ForkedFunction(self._config.name, self._config.options, encoding.folder)
        if self._config.name in TOOLS and not knows_calls(renderer):
            raise ConfigError(
                f"generate {self._config.name} lets the model call a tool, and this model's chat template knows no "
                "tools, or writes calls in a form that nanodag cannot read. Name a function of your own that knows it, "
                "as package.module:function."
            )
        self._switches = config.rollout.template_options
        self._encoding, self._renderer = encoding, renderer
        self._context, self._vocabulary = context, vocabulary
        self._places = asyncio.Semaphore(min(MAX_CALLS, 2 * int(config.sampler.max_batch)))

    async def group(self, prompt: Prompt, params: SamplingParams, ask: Ask, rid: str) -> list[Rollout]:
        """The rollouts that `params.n` calls gave, in their order; for a call that failed one without a response, whose
        metadata say why. Raises SamplerError when the sampler is to blame."""
        refuse_images(prompt.record["messages"])
        single, seed = params.model_copy(update={"n": 1}), params.sampling_seed
        if seed is None:  # greedy: a function may still draw numbers of its own
            seed = derived_seed("greedy", prompt.group_id)
        given = Sample(
            record=prompt.record,
            spans=(prompt_span(prompt.token_ids),),
            seed=seed,
            max_sampled=self._longest,
            max_tokens=self._context,
        )
        samples = [replace(given, seed=derived_seed(seed, "sample", number)) for number in range(params.n)]
        calls = [self._call(sample, single, ask, f"{rid}-{number}") for number, sample in enumerate(samples)]
        outcomes = [outcome for answered in await all_of(calls) for outcome in answered]
        return [rollout for number, outcome in enumerate(outcomes) for rollout in _rollouts(prompt, number, outcome)]

    async def _call(self, sample: Sample, params: SamplingParams, ask: Ask, rid: str) -> Sequence[Sample | Exception]:
        """The samples of one call, or why there are none."""
        async with self._places:
            line = _Line(ask, rid)
            try:
                for attempt in range(MAX_PLAYS - 1):
                    with suppress(EpisodeLost):
                        return await self._played(sample, params, line, attempt)
                return await self._played(sample, params, line, MAX_PLAYS - 1)
            except (ConfigError, MissingTool):
                raise  # it is no failure of this sample
            except Exception as error:
                if line.broken is not None:
                    raise line.broken from error
                return [error]

    async def _played(self, sample: Sample, params: SamplingParams, line: "_Line", attempt: int) -> list[Sample]:
        """The samples of one attempt. Raises what it raised; TimeoutError when it hangs."""
        sampler = TurnSampler(
            line.ask,
            params=params,
            encoding=self._encoding,
            renderer=self._renderer,
            switches=self._switches,
            held=line.held,
            attempt=attempt,
        )
        play = asyncio.ensure_future(turns_loop().do(self._function(sampler, sample)))
        try:
            while not (await asyncio.wait({play}, timeout=POLL_S))[0]:
                if line.idle_s > self._config.timeout_s:
                    raise TimeoutError(f"it took longer than {self._config.timeout_s:g} s without asking the sampler")
            return self._checked(play.result(), sample)
        finally:
            play.cancel()

    def _checked(self, returned: Any, given: Sample) -> list[Sample]:
        """Samples that can be trained, of what a function returned. given: what it got. Raises ValueError for what
        cannot."""
        samples = samples_in(returned)
        for sample in samples:
            if sample.spans[:1] != given.spans and not sample.role:
                raise ValueError("a sample must begin with the prompt's own span, unless it says its role")
            self._check(sample)
            for branch in sample.branches:
                self._check(branch)
                if self._has_process_reward:
                    raise ValueError(
                        "a process reward scores the steps of one sequence; return a sample without branches"
                    )
                if branch.branches:
                    raise ValueError("a branch has branches; hang all of them on the sample")
            if not any(sequence.is_trained for sequence in (sample, *sample.branches)):
                raise ValueError("no role of a sample is trained")
        return list(samples)

    def _check(self, sample: Sample) -> None:
        """Raises ValueError for a sequence that cannot be trained."""
        ids = sample.token_ids
        kinds = [span.kind for span in sample.spans]
        if kinds[:1] != ["prompt"] or "prompt" in kinds[1:]:
            raise ValueError(f"a sample must begin with a prompt, and with one alone; its spans are {kinds}")
        if not sample.num_sampled or sample.finish_reason not in ("stop", "text", "length"):
            raise ValueError("a sample was returned that no turn added to")
        if any(span.kind == "sampled" and len(span.logprobs) != len(span.token_ids) for span in sample.spans):
            raise ValueError("a sampled span has no log-probabilities")
        if len(ids) > self._context or sample.num_sampled > self._longest:
            raise ValueError(
                f"a sample has {len(ids)} tokens, {sample.num_sampled} of them sampled, where {self._context} and "
                f"{self._longest} are the limits"
            )
        if not all(0 <= token < self._vocabulary for token in ids):
            raise ValueError(f"a sample holds the token id {max(ids)}; the vocabulary has {self._vocabulary}")
        if not sample.is_trained and not sample.role:
            raise ValueError("a sample that is not trained must say its role")
        if not isinstance(sample.role, str):
            raise ValueError(f"role is {sample.role!r:.80}, no text")
        values = [ids, dict(sample.metadata), sample.answer, sample.reward, dict(sample.components)]
        json.dumps(values, allow_nan=False)
        if sample.reward is not None:
            Reward(float(sample.reward), {name: float(value) for name, value in sample.components.items()})


def _why(error: Exception) -> dict[str, str]:
    """Metadata that say why a sample failed."""
    reason = str(error) if isinstance(error, EpisodeFailed) else f"{type(error).__name__}: {error}"
    texts, half = {FAILED: reason, LAST_WORDS: str(getattr(error, "last_words", ""))}, LONGEST_REASON // 2
    return {  # begin and end of a long text: there stands what came last
        name: text if len(text) <= LONGEST_REASON else f"{text[:half]} … {text[-half:]}"
        for name, text in texts.items()
        if text
    }


class _Line:
    """Connection of a call to the sampler, in the controller's event loop. broken: the sampler's own failure."""

    def __init__(self, ask: Ask, rid: str) -> None:
        self._ask, self._rid = ask, rid
        self._loop = asyncio.get_running_loop()
        self._num_asked, self._num_waiting, self._num_held = 0, 0, 0
        self._last = time.monotonic()
        self.broken: SamplerError | None = None

    @property
    def idle_s(self) -> float:
        """Seconds since the sampler was last busy with this call."""
        return 0.0 if self._num_waiting or self._num_held else time.monotonic() - self._last

    @contextmanager
    def held(self) -> Iterator[None]:
        """Time in here is not idle. For one thread at a time."""
        self._num_held += 1
        try:
            yield
        finally:
            self._num_held -= 1
            self._last = time.monotonic()

    async def ask(self, request: Request) -> Completion:
        """The answer, from the event loop of any thread."""
        answer = self._answer(request)
        try:
            scheduled = asyncio.run_coroutine_threadsafe(answer, self._loop)
        except RuntimeError:  # the loop has ended, and this call was given up
            answer.close()
            raise
        return await asyncio.wrap_future(scheduled)

    async def _answer(self, request: Request) -> Completion:
        self._num_asked += 1
        self._num_waiting += 1
        try:
            ((completion,),) = await self._ask([replace(request, rid=f"{self._rid}-{self._num_asked}")])
            finish_reason_of(completion)  # raises where the sampler gave it up
            return completion
        except BadRequest:
            raise
        except SamplerError as error:
            self.broken = self.broken or error
            raise
        finally:
            self._num_waiting -= 1
            self._last = time.monotonic()


@MadeOnce
def turns_loop() -> LoopThread:
    """The event loop of all calls of our entries, and of the API that agents ask."""
    return LoopThread("turns")


def _rollouts(prompt: Prompt, index: int, outcome: Sample | Exception) -> list[Rollout]:
    """The sequences of a sample, the main one and its branches; of one that failed a rollout without a response."""
    if isinstance(outcome, Sample):
        return [_rollout(prompt, index, branch, sample) for branch, sample in enumerate((outcome, *outcome.branches))]
    return [prompt.rollout(index, (prompt_span(prompt.token_ids),), "error", metadata=_why(outcome))]


def _rollout(prompt: Prompt, index: int, branch: int, sample: Sample) -> Rollout:
    assert sample.finish_reason is not None
    metadata, spans = dict(sample.metadata), sample.spans
    if sample.answer is not None:
        metadata[ANSWER] = sample.answer
    if sample.reward is not None:
        metadata[REPORTED] = {"value": sample.reward, "components": dict(sample.components)}
    if not sample.is_trained:
        spans = tuple(replace(span, mask=(0,) * len(span.mask)) for span in spans)
    return prompt.rollout(index, spans, sample.finish_reason, metadata=metadata, branch=branch, role=sample.role)
