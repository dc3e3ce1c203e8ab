"""One sample's session: the API behind one key, whose calls become the sequences of it that are trained.

The client's sampling parameters would make other tokens likelier than the trainer thinks they are. So `temperature`,
`top_p`, `top_k` and `seed` are the stage's, whatever a call says; what would change the distribution in another way is
refused. A call's length, its stop strings and its stop tokens are the client's.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from nanodag.api.bodies import ChatBody, SamplingBody
from nanodag.api.choice import ParsedAnswer, SampledChoice
from nanodag.api.endpoints import Endpoints
from nanodag.api.metrics import Metrics
from nanodag.api.prompt_rendering import ChatPrompt, chat_prompt, is_forced
from nanodag.api.refusals import Refused
from nanodag.api.replies import ChatReply
from nanodag.api.served_model import Limits, ServedModel, TokenText
from nanodag.api.tool_format import Reader
from nanodag.errors import BadRequest, SamplerError
from nanodag.inference.protocol import Completion, FinishReason, Request
from nanodag.inference.seeds import derived_seed
from nanodag.rl.environments.environment import number
from nanodag.rl.environments.sample import Sample, TurnSampler
from nanodag.rl.environments.transcript import Asked, Message, Transcript

MODEL = "policy"  # the name by which an agent asks for the model
ROLE = "agent"  # of its sequences, which begin with prompts of the agent's own
# Those of a sample are its own; a request may wait as long as the sampler does.
LIMITS = Limits(max_waiting=1 << 20, request_timeout_s=86400.0)
MAX_COMPONENTS = 64


class Session:
    """One sample as its agent sees it. It belongs to the event loop of turns.

    max_calls: requests for answers. max_tokens: sampled in all its sequences, looked at before each call; 0 for no
    bound beside max_calls and the stage's `max_new_tokens`, which holds for each sequence.

    agent: the task that is ended once nothing that it does counts any more, because the sampler failed. broken: that
    failure. answer, reward, components, metadata, is_cut: what the agent says. cut: the limit of ours that cut it off,
    empty for none. A refusal for want of room is forgotten when a later call is answered: the agent has gone on with
    less context.
    """

    agent: asyncio.Future[None]

    def __init__(self, sampler: TurnSampler, sample: Sample, *, max_calls: int, max_tokens: int) -> None:
        self._sampler, self._given = sampler, sample
        self._max_calls, self._max_tokens = max_calls, max_tokens
        self.chats, self.texts = (
            Transcript(sampler.renderer, sampler.encoding, sampler.switches_of(sample)) for _ in range(2)
        )
        self.lock = asyncio.Lock()  # of the transcripts: chats are asked in a thread
        self._asking: set[asyncio.Future[Completion]] = set()
        self._num_calls = self._num_sampled = 0
        self._last_said = ""
        self._is_ended = False
        self.broken: SamplerError | None = None
        self._is_spent = False  # of the limits of the whole sample
        self.cut = ""
        self.answer: str | None = None
        self.reward: float | None = None
        self.components: Mapping[str, float] = {}
        self.metadata: Mapping[str, Any] = {}
        self.is_cut = False

    def endpoints(self) -> Endpoints:
        """The API's endpoints for one request of this sample."""
        return _Endpoints(self)

    def report(self, reward: Any, components: Any = None) -> None:
        """Keep what the agent says its reward is; the last word counts. Raises ValueError for what is no number."""
        parts = {} if components is None else components
        if not isinstance(parts, Mapping) or len(parts) > MAX_COMPONENTS:
            raise ValueError(f"components must be an object of at most {MAX_COMPONENTS} numbers; found {parts!r:.100}")
        self.reward = number(reward, "the reward")
        self.components = {str(name)[:80]: number(value, f"component {name!r:.80}") for name, value in parts.items()}

    def end(self) -> None:
        """From now on nothing is answered and nothing is kept; calls under way are ended."""
        self._is_ended = True
        for asking in self._asking:
            asking.cancel()

    def result(self) -> Sample:
        """The sample. What counts as its last call is the end of the conversation of most calls, then of most sampled
        tokens: so the order in which parallel calls came changes nothing, but for the answer where the agent says none:
        that of the call which was answered last. Raises SamplerError where the sampler failed, ValueError where nothing
        was asked."""
        if self.broken is not None:
            raise self.broken
        chats, texts = self._sequences(self.chats), self._sequences(self.texts)
        sequences = chats + sorted((text for text in texts if text.num_sampled), key=lambda one: one.token_ids)
        if not sequences:
            raise ValueError("the agent asked for no answer, so there is nothing to train")
        main, *others = sequences
        return replace(
            main,
            branches=tuple(replace(branch, role=ROLE, branches=(), answer=None) for branch in others),
            role=ROLE,
            answer=self._last_said if self.answer is None else self.answer,
            reward=self.reward,
            components=self.components,
            metadata={"calls": self._num_calls, **({"limit": self.cut} if self.cut else {}), **self.metadata},
            finish_reason="length" if self.cut or self.is_cut else main.finish_reason,
        )

    def _sequences(self, transcript: Transcript) -> list[Sample]:
        if (last := transcript.longest()) is None:
            return []
        main = transcript.sample(self._given, last=last)
        return [main, *main.branches]

    # What one call needs of its sample

    def served(self, backend: "_Endpoints") -> ServedModel:
        """The policy, as a model of the API."""
        tokens = _token_text(self._sampler.encoding.folder)
        return ServedModel(
            name=MODEL,
            tokens=tokens,
            renderer=self._sampler.renderer,
            backend=backend,
            context_length=self._given.max_tokens,
            vocab_size=tokens.encoding.size,
            created=0,
        )

    def begin_call(self) -> None:
        """Count a call. Raises Refused for one above a limit."""
        if self._num_calls >= self._max_calls:
            self._is_spent = True
            self.refuse(f"max_calls {self._max_calls}", "this sample has made all the calls that it may")
        if 0 < self._max_tokens <= self._num_sampled:
            self._is_spent = True
            self.refuse(f"max_tokens {self._max_tokens}", "this sample has sampled all the tokens that it may")
        self._num_calls += 1

    def refuse(self, limit: str, why: str) -> None:
        """Note that a limit was met, and raise Refused."""
        self.cut = self.cut or limit
        raise Refused(f"{why} ({limit}): end here", status=403, kind="limit_error", code="limit_reached")

    async def answered(self, asked: Asked, completion: Completion, message: Mapping[str, Any]) -> None:
        """Keep what was sampled for a conversation or a text."""
        async with self.lock:
            (self.chats if asked.meanings else self.texts).answered(asked, completion, message)
        self._last_said = message["content"] or ""

    def _room(self, num_sampled: int, num_tokens: int) -> int:
        """Tokens that may be sampled behind a sequence. Raises Refused where there are none."""
        sample = self._given
        room = min(sample.max_sampled - num_sampled, sample.max_tokens - num_tokens)
        if room < 1:
            limit = f"max_new_tokens {sample.max_sampled}, context {sample.max_tokens}"
            self.refuse(limit, "this conversation has no room for another answer")
        return room

    async def sampled(self, asked: Asked, *, max_tokens: int, stop_token_ids: Sequence[int], of: int) -> Completion:
        """The sampler's answer. of: the client's seed, which tells apart calls that ask the same."""
        transcript, own = self.chats if asked.meanings else self.texts, self._given.seed
        most = min(max_tokens, self._room(transcript.num_sampled(asked), len(asked.ids)))
        if asked.meanings:
            seed = asked.seed(derived_seed(own, of))
        else:
            seed = derived_seed(own, "text", of, asked.repeat, *asked.ids)
        if self._is_ended:  # while its conversation was rendered
            raise gone()
        asking = asyncio.ensure_future(
            self._sampler.answer(asked.ids, seed=seed, max_tokens=most, stop_token_ids=stop_token_ids)
        )
        self._asking.add(asking)
        try:
            completion = await asking
        except BadRequest:
            raise
        except SamplerError as error:
            self.broken = self.broken or error
            self.agent.cancel()
            raise
        except asyncio.CancelledError:
            if self._is_ended:
                raise gone() from None
            raise
        finally:
            self._asking.discard(asking)
            asking.cancel()
        self._num_sampled += len(completion.output_ids)
        self.cut = self.cut if self._is_spent else ""
        return completion


class _Endpoints(Endpoints):
    """The API's endpoints for one request of one sample, and the Backend behind them: it asks for this sample's tokens
    and keeps them."""

    is_ready, weight_version, num_restarts = True, "", 0

    def __init__(self, session: Session) -> None:
        self._session, self._served = session, session.served(self)
        super().__init__({MODEL: self._served}, LIMITS, _metrics())
        self._body: SamplingBody | None = None
        self._prompt: ChatPrompt | None = None
        self._asked: list[Asked] = []

    def model_of(self, name: str) -> ServedModel:
        """The policy, whatever the client calls it: programs have names of models written into them."""
        return self._served

    async def chat_prompt(self, model: ServedModel, body: ChatBody) -> ChatPrompt:
        """The prompt as the transcript continues it."""
        if is_forced(body):
            raise Refused("tool_choice may be auto or none here: a forced call is not sampled", param="tool_choice")
        if body.continue_final_message:
            raise Refused("an answer's beginning is sampled here: leave it out", param="continue_final_message")
        if body.chat_template_kwargs:
            raise Refused("the template's switches are the stage's: leave it out", param="chat_template_kwargs")

        def opened(messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
            # One for each choice: it says which of the same calls it is, and so gives each another seed.
            self._asked = [self._session.chats.asked(messages, tools) for _ in range(body.n)]
            return list(self._asked[0].ids)

        async with self._session.lock:
            self._prompt = await asyncio.to_thread(chat_prompt, model, body, opened)  # a long text takes long
        return self._prompt

    def chat_reply(self, model: ServedModel, body: ChatBody) -> ChatReply:
        """The form of the answer, whose calls have the same names each time that a stage is run."""
        asked = derived_seed(self._asked[0].repeat, *self._asked[0].ids)  # in whatever order calls came
        return ChatReply(model, body, lambda choice, number: f"call_{derived_seed(asked, choice, number):024x}")

    def most_new(self, model: ServedModel, ids: Sequence[int], max_tokens: int | None, param: str) -> int:
        """Cut to the room that there is: a program's own limit was not written for this context."""
        try:
            room = super().most_new(model, ids, None, param)
        except Refused as error:
            if error.code == "context_length_exceeded":
                self._session.cut = self._session.cut or f"context {model.context_length}"
            raise
        return room if max_tokens is None else min(room, max_tokens)

    def admit(self, body: SamplingBody, samples: Sequence[SampledChoice]) -> None:
        """Count the call. Raises Refused for what would not be trained as it was sampled, and above a limit."""
        request = samples[0].request
        if request.further or request.score_prompt or request.top_logprobs or request.params.ignore_eos:
            raise Refused(
                "penalties, grammars, scores of prompts, top_logprobs and ignore_eos do not go with training: leave "
                "them out"
            )
        self._body = body
        self._session.begin_call()

    async def answer(self, request: Request, *, stream: bool) -> AsyncGenerator[Completion, None]:
        """See `nanodag.api.served_model.Backend`: all of an answer at once."""
        session, body, params = self._session, self._body, request.params
        assert body is not None and params.max_new_tokens is not None
        most, of, stops = params.max_new_tokens, body.seed or 0, params.stop_token_ids
        reader = Reader() if self._prompt is None else self._prompt.reader()
        one_call = isinstance(body, ChatBody) and not body.parallel_tool_calls
        # As the client reads it: a stop string or a call may end an answer before its last token.
        answer = ParsedAnswer(self._served.tokens, reader, stops=body.stops, one_call=one_call)
        asked = self._asked.pop(0) if self._prompt else session.texts.text_asked(request.input_ids)
        whole = await session.sampled(asked, max_tokens=most, stop_token_ids=stops, of=of)
        answer.take(whole)
        completion = _up_to(whole, answer)
        await session.answered(asked, completion, _message(answer))
        yield completion


def gone() -> Refused:
    """The refusal of a call whose sample has ended."""
    return Refused("the sample of this key has ended: nothing is answered any more", status=410, code="sample_ended")


def _up_to(whole: Completion, answer: ParsedAnswer) -> Completion:
    """The part of a completion that the client has seen, which is trained: others were never in its conversation."""
    size = answer.num_tokens
    if size >= len(whole.output_ids):
        return whole
    versions = [replace(span, end=min(span.end, size)) for span in whole.weight_versions if span.start < size]
    return replace(
        whole,
        output_ids=whole.output_ids[:size],
        logprobs=whole.logprobs[:size],
        weight_versions=versions,
        # No stop token is among them: a stop string ended it, or the end of its one call.
        finish_reason=FinishReason(type="stop", matched=answer.stop_reason or ""),
    )


def _message(answer: ParsedAnswer) -> dict[str, Any]:
    """An answer in OpenAI's form, as the client has it and may send it again."""
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in answer.calls]
    message: dict[str, Any] = {"role": "assistant", "content": answer.new().content}
    return {**message, "tool_calls": calls} if calls else message


_metrics, _token_text = cache(partial(Metrics, {})), cache(TokenText)
