"""Requests and answers of the wire protocol as vLLM has them. It runs by the Python of vLLM's environment.

Source: vllm 0.32.0, sampling_params.py, outputs.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nanodag.errors import SamplerError
from nanodag.inference import protocol as p

GREEDY_BELOW = 1e-5  # vLLM's own


def sampling_params(request: p.Request, end_ids: Sequence[int], facts: Mapping[str, Any], *, is_stream: bool) -> Any:
    """vLLM's SamplingParams of a request. end_ids: at which the model ends by itself. facts: as the server tells."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked, room = request.params, facts["context_length"] - len(request.input_ids)
    is_greedy = asked.temperature < GREEDY_BELOW
    return SamplingParams(
        **asked.model_dump(include={"top_p", "top_k", "ignore_eos", "skip_special_tokens"}),
        n=1 if is_greedy else asked.n,  # it takes no more, as all are alike
        temperature=0.0 if is_greedy else asked.temperature,
        seed=asked.sampling_seed,
        stop=list(asked.stop or ()),
        stop_token_ids=[] if asked.ignore_eos else [*asked.stop_token_ids, *end_ids],
        max_tokens=max(1, room if asked.max_new_tokens is None else asked.max_new_tokens),
        logprobs=request.top_logprobs if request.return_logprob else None,
        prompt_logprobs=request.top_logprobs if request.return_logprob and request.score_prompt else None,
        include_stop_str_in_output=asked.no_stop_trim,
        detokenize=facts["has_tokenizer"],
        output_kind=RequestOutputKind.CUMULATIVE if is_stream else RequestOutputKind.FINAL_ONLY,
    )


def completion(request: p.Request, output: Any, one: Any, facts: Mapping[str, Any]) -> p.Completion:
    """One sample: a CompletionOutput of vLLM's RequestOutput. facts: as the server tells, with its weight_version."""
    num_new = len(one.token_ids) if request.params.max_new_tokens != 0 else 0
    ids, prompt, most = list(one.token_ids)[:num_new], list(request.input_ids), request.top_logprobs
    spans = [p.VersionSpan(version=s.version, start=s.start, end=s.end) for s in one.weight_versions or () if ids]
    told, scored = list(one.logprobs or ())[:num_new], list(output.prompt_logprobs or ())
    return p.Completion(
        rid=str(request.rid),
        output_ids=ids,
        logprobs=[place[token].logprob for token, place in zip(ids, told, strict=False)],
        finish_reason=_reason(one, num_new),
        weight_version=spans[-1].version if spans else facts["weight_version"],
        weight_versions=spans,
        num_prompt_tokens=len(prompt),
        num_cached_tokens=output.num_cached_tokens or 0,
        text=one.text if facts["has_tokenizer"] else None,
        prompt_ids=prompt if scored else (),
        prompt_logprobs=[of and of[token].logprob for token, of in zip(prompt, scored, strict=False)],
        top_logprobs=[_likeliest(of, most) for of in told] if most else (),
        prompt_top_logprobs=[of and _likeliest(of, most) for of in scored] if most else (),
    )


def _reason(one: Any, num_new: int) -> p.FinishReason | None:
    """vLLM's reason as the protocol has it; it names no token where the model's own end came."""
    if one.finish_reason is None:
        return None
    if one.finish_reason == "abort":
        return p.FinishReason(type="abort", message="aborted")
    if one.finish_reason not in ("stop", "length"):
        raise SamplerError(f"vLLM failed at a request: {one.finish_reason}")
    if one.finish_reason == "length" or not num_new:
        return p.FinishReason(type="length")
    return p.FinishReason(type="stop", matched=one.token_ids[-1] if one.stop_reason is None else one.stop_reason)


def _likeliest(place: Mapping[int, Any], most: int) -> p.Top:
    return [(token, found.logprob) for token, found in sorted(place.items(), key=lambda item: item[1].rank)[:most]]
