"""From prompts to requests, and from what the samplers answer to rollouts. No torch here.

With `partial_rollout_tokens` responses are written in segments of at most that many tokens. When a step has enough
groups, the unfinished ones become partial rollouts: they resume in the next step with that step's weights, so that
long responses do not hold up all others (Kimi k1.5, arXiv:2501.12599, section 2.6.2; slime's --partial-rollout). The
length of a segment depends on counts, never on time. Each token keeps the version that sampled it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat

from nanodag.errors import SamplerError
from nanodag.inference import protocol
from nanodag.inference.protocol import Completion, Request, SamplingParams
from nanodag.inference.seeds import derived_seed
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import FinishReason, Rollout, Span, prompt_span


def group_seed(seed: int, step: int, group_id: str) -> int:
    """What the samples of a group are drawn with."""
    return derived_seed(seed, step, group_id)


def is_unfinished(rollout: Rollout) -> bool:
    """Whether a rollout goes on in another step."""
    return rollout.finish_reason == "abort"


def requests_for(prompt: Prompt, params: SamplingParams, rid: str, *, segment: int) -> list[Request]:
    """One request for all samples of a new prompt; one for each unfinished sample of a prompt that was begun.

    params: of whole responses. segment: most tokens that a response gets now, 0 for all.
    """
    longest = params.max_new_tokens
    assert longest is not None
    if not prompt.begun:
        params = params.model_copy(update={"max_new_tokens": min(segment or longest, longest)})
        return [Request(input_ids=list(prompt.token_ids), params=params, rid=rid)]
    requests = []
    for rollout in filter(is_unfinished, prompt.begun):
        changes = {
            "n": 1,
            "max_new_tokens": min(segment, longest - rollout.num_sampled),
            "sampling_seed": group_seed(params.sampling_seed or 0, rollout.sample_index, str(rollout.num_sampled)),
        }
        requests.append(
            Request(
                input_ids=[*prompt.token_ids, *rollout.sampled_token_ids],
                params=params.model_copy(update=changes),
                rid=f"{rid}-{rollout.sample_index}",
            )
        )
    return requests


def rollouts_from(prompt: Prompt, answers: Sequence[Sequence[Completion]], *, longest: int) -> list[Rollout]:
    """The group as it is after `answers` to its `requests_for`. longest: tokens of a whole response.

    Raises SamplerError for a completion that the sampler gave up.
    """
    if not prompt.begun:
        (completions,) = answers
        begun = [_nothing_yet(prompt, index) for index in range(len(completions))]
        return [_extended(rollout, completion, longest) for rollout, completion in zip(begun, completions, strict=True)]
    following = iter(answers)
    return [
        _extended(rollout, next(following)[0], longest) if is_unfinished(rollout) else rollout
        for rollout in prompt.begun
    ]


def _nothing_yet(prompt: Prompt, index: int) -> Rollout:
    return Rollout(
        group_id=prompt.group_id,
        prompt_id=prompt.prompt_id,
        sample_index=index,
        spans=(prompt_span(prompt.token_ids), Span(kind="sampled", token_ids=())),
        finish_reason="abort",
    )


def _extended(rollout: Rollout, completion: Completion, longest: int) -> Rollout:
    """The rollout with a completion's tokens added to its sampled span."""
    prompt, before = rollout.spans
    added = span_of(completion)
    sampled = added
    if before.token_ids:
        sampled = Span(
            kind="sampled",
            token_ids=before.token_ids + added.token_ids,
            mask=before.mask + added.mask,
            logprobs=before.logprobs + added.logprobs,
            versions=before.versions + added.versions,
        )
    reason = finish_reason_of(completion)
    if reason == "length" and len(sampled.token_ids) < longest:
        reason = "abort"
    return Rollout(
        group_id=rollout.group_id,
        prompt_id=rollout.prompt_id,
        sample_index=rollout.sample_index,
        spans=(prompt, sampled),
        finish_reason=reason,
    )


def continued(request: Request, index: int, completion: Completion) -> Request:
    """What is asked for the rest of a completion that was ended early, the index-th of a request."""
    params, begun = request.params, len(completion.output_ids)
    assert params.max_new_tokens is not None
    changes = {
        "n": 1,
        "max_new_tokens": params.max_new_tokens - begun,
        "sampling_seed": group_seed(params.sampling_seed or 0, index, str(begun)),
    }
    return replace(
        request,
        input_ids=[*request.input_ids, *completion.output_ids],
        params=params.model_copy(update=changes),
        rid=f"{request.rid}-{index}-{begun}",
    )


def joined(begun: Completion, rest: Completion) -> Completion:
    """A completion and its continuation, as one."""
    before = len(begun.output_ids)
    later = [replace(span, start=span.start + before, end=span.end + before) for span in rest.weight_versions]
    return replace(
        rest,
        rid=begun.rid,
        output_ids=begun.output_ids + rest.output_ids,
        logprobs=begun.logprobs + rest.logprobs,
        weight_versions=begun.weight_versions + later,
        num_prompt_tokens=begun.num_prompt_tokens,
    )


def was_ended(completion: Completion) -> bool:
    """Whether the sampler was told to end it."""
    return completion.finish_reason is not None and completion.finish_reason.type == "abort"


def as_it_ended(request: Request, completion: Completion) -> Completion:
    """A completion with the reason of its own for which it ended, where it was told to end at that very token: SGLang
    looks no further then."""
    ids, params = completion.output_ids, request.params
    if not was_ended(completion):
        return completion
    if ids and ids[-1] in params.stop_token_ids:
        return replace(completion, finish_reason=protocol.FinishReason(type="stop", matched=ids[-1]))
    if len(ids) == params.max_new_tokens:
        return replace(completion, finish_reason=protocol.FinishReason(type="length"))
    return completion


def span_of(completion: Completion) -> Span:
    """What the sampler answered, as a span of tokens that are trained."""
    ids, logprobs = tuple(completion.output_ids), tuple(completion.logprobs)
    if logprobs and max(logprobs) > 0.0:  # rounding may leave 1e-7
        logprobs = tuple(min(value, 0.0) for value in logprobs)
    return Span(
        kind="sampled",
        token_ids=ids,
        mask=(1,) * len(ids),
        logprobs=logprobs,
        versions=tuple(
            chain.from_iterable(repeat(int(v.version), v.end - v.start) for v in completion.weight_versions)
        ),
    )


def finish_reason_of(completion: Completion) -> FinishReason:
    """`stop`, `text` or `length`. Raises SamplerError for a completion that the sampler gave up."""
    reason = completion.finish_reason
    if reason is None or reason.type == "abort":
        raise SamplerError(f"The sampler ended request {completion.rid}: {reason.message if reason else 'no reason'}.")
    return "text" if isinstance(reason.matched, str) else reason.type
