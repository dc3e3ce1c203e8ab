"""From prompts to requests, and from what the samplers answer to rollouts. No torch here.

With `partial_rollout_tokens` responses are written in segments of at most that many tokens. When a step has enough
groups, the unfinished ones become partial rollouts: they resume in the next step with that step's weights, so that
long responses do not hold up all others (Kimi k1.5, arXiv:2501.12599, section 2.6.2; slime's --partial-rollout). The
length of a segment depends on counts, never on time. Each token keeps the version that sampled it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from nanodag.engines.fleet import Fleet
from nanodag.inference.protocol import Completion, Request, SamplingParams
from nanodag.inference.seeds import derived_seed
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import Rollout, Span, finish_reason_of, prompt_span, span_of


def is_unfinished(rollout: Rollout) -> bool:
    """True for a rollout that continues in another step."""
    return rollout.finish_reason == "abort"


def _requests_for(prompt: Prompt, params: SamplingParams, rid: str, *, segment: int) -> list[Request]:
    """One request for all samples of a new prompt; one for each unfinished sample of a prompt that was begun. params:
    of whole responses. segment: most tokens that a response gets now, 0 for all."""
    longest, seed = params.max_new_tokens, params.sampling_seed or 0
    assert longest is not None
    if not prompt.begun:
        params = params.model_copy(update={"max_new_tokens": min(segment or longest, longest)})
        return [Request(input_ids=list(prompt.token_ids), params=params, rid=rid)]
    begun = [(rollout, rollout.sample_index, rollout.num_sampled) for rollout in filter(is_unfinished, prompt.begun)]
    return [
        Request(
            input_ids=[*prompt.token_ids, *rollout.sampled_token_ids],
            params=params.model_copy(
                update={
                    "n": 1,
                    "max_new_tokens": min(segment, longest - size),
                    "sampling_seed": derived_seed(seed, index, str(size)),
                }
            ),
            rid=f"{rid}-{index}",
        )
        for rollout, index, size in begun
    ]


def _extended(rollout: Rollout, completion: Completion, longest: int) -> Rollout:
    (prompt, before), added = rollout.spans, span_of(completion)
    if before.token_ids:
        names = ("token_ids", "mask", "logprobs", "versions")
        added = replace(added, **{name: getattr(before, name) + getattr(added, name) for name in names})
    reason = finish_reason_of(completion)
    if reason == "length" and len(added.token_ids) < longest:
        reason = "abort"
    return replace(rollout, spans=(prompt, added), finish_reason=reason, routed_experts=completion.routed_experts)


@dataclass(slots=True, eq=False)
class GroupRequests:
    """The requests of one prompt. segment: most tokens of a response now, 0 for all, as an evaluation asks. under_way:
    names of requests that were sent and not answered. takes_routes: the experts of each token are asked for."""

    prompt: Prompt
    params: SamplingParams
    rid: str
    sampler: Fleet
    segment: int = 0
    takes_routes: bool = False
    under_way: dict[str, None] = field(default_factory=dict, init=False)

    async def rollouts(self) -> list[Rollout]:
        """The group's rollouts, as far as they are sampled. Raises SamplerError for a completion that the sampler gave
        up."""
        prompt, longest = self.prompt, self.params.max_new_tokens or 0
        requests = _requests_for(prompt, self.params, self.rid, segment=self.segment)
        answers = await self.ask([replace(request, return_routed_experts=self.takes_routes) for request in requests])
        nothing_yet = (prompt_span(prompt.token_ids), Span(kind="sampled", token_ids=()))
        begun = prompt.begun or [prompt.rollout(index, nothing_yet, "abort") for index in range(len(answers[0]))]
        completions = chain.from_iterable(answers)
        return [_extended(one, next(completions), longest) if is_unfinished(one) else one for one in begun]

    async def ask(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """The sampler's answers."""
        rids = [str(request.rid) for request in requests]
        self.under_way.update(dict.fromkeys(rids))
        answers = await self.sampler.generate(requests)
        for rid in rids:
            del self.under_way[rid]
        return answers
