"""The wire protocol between a trainer and a sampler: SGLang's over HTTP, as far as it is used here.

The models accept exactly what the embedded sampler honours; any other field is refused, never ignored. ``Request`` and
``Completion`` are the same for a sampler in this process (``engine.Engine``), the servers of SGLang and vLLM.

Source: sgl-project/sglang 0.5.23, python/sglang/srt/managers/io_struct.py and
python/sglang/srt/sampling/sampling_params.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from nanodag.errors import BadRequest
from nanodag.host.images import words_in
from nanodag.inference.sglang_options import ONLY_FIELDS

PauseMode = Literal["abort", "retract", "in_place"]

GREEDY_BELOW = 1e-6
"""A temperature below this takes the likeliest token, as in SGLang."""
MAX_SAMPLES = 4096
MAX_TOP_LOGPROBS = 100

Top = Sequence[tuple[int, float]]
"""The likeliest tokens of a place with their logprobs, the likeliest first."""


class Wire(BaseModel):
    """A body as it is sent: no unknown fields, no conversions (True is no integer, "1" no number)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _top_k(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 (off) or at least 1")
    return value


def _strings(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list | tuple) and any(item == "" for item in strings):
        raise ValueError("an empty string would stop at once")
    return tuple(strings) if isinstance(strings, list) else strings


class SamplingParams(Wire):
    """Settings with which a prompt is continued. Defaults are SGLang's."""

    max_new_tokens: Annotated[int, Field(ge=0)] | None = 128
    """None: as many as the context has room for. 0: the prompt is scored, and nothing is sampled."""
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    """0 takes the likeliest token and reports its logprob at temperature 1."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, AfterValidator(_top_k)] = -1
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    stop_token_ids: Annotated[
        tuple[int, ...], Field(strict=False), BeforeValidator(lambda v: () if v is None else v)
    ] = ()
    stop: Annotated[tuple[str, ...], BeforeValidator(_strings)] | None = None
    ignore_eos: bool = False
    """True: neither the end-of-sequence token nor stop_token_ids end a sample (SGLang does the same)."""
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, to be continued ``params.n`` times. ``rid`` names it for abort; None lets the sampler choose.

    ``score_prompt``: return the logprobs of the prompt's own tokens, too (SGLang's ``logprob_start_len: 0``).
    ``top_logprobs``: how many of the likeliest tokens are told at each place; with return_logprob alone.
    ``return_routed_experts``: tell the experts of each token. ``lora_path``: name of the adapters over the
    model that answer; empty for none. ``further``: sampling parameters that only SGLang knows.
    """

    input_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    rid: str | None = None
    return_logprob: bool = True
    score_prompt: bool = False
    top_logprobs: int = 0
    return_routed_experts: bool = False
    lora_path: str = ""
    further: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FinishReason:
    """Why a sample ended. ``stop``: ``matched`` is the token id or string; ``length``; ``abort``: ``message``.
    ``status_code`` is set on an abort that the sampler itself is to blame for."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens ``start`` to ``end`` (exclusive) of the output were sampled by these weights."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample of one prompt. A stop token is part of ``output_ids`` and has its logprob.

    ``logprobs``: log_softmax(logits / temperature) of each output token, before top-p and top-k; empty if not asked.
    ``prompt_ids``, ``prompt_logprobs``: of a scored prompt, log_softmax(logits) at temperature 1, as in SGLang, None
    for the first token; empty if not asked. ``top_logprobs``, ``prompt_top_logprobs``: the likeliest tokens at each
    place, of the same distributions; empty if not asked. ``weight_version``: the weights at the end.
    ``finish_reason`` is None for a part of a stream. ``num_told_tokens``: output tokens that are left out, because an
    earlier part of the stream had them. ``routed_experts``: base64 of int32 (T, layers, K), the K experts of each token
    of prompt and output but the last; empty if not asked.
    """

    rid: str
    output_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    weight_version: str
    weight_versions: list[VersionSpan]
    num_prompt_tokens: int
    num_told_tokens: int = 0
    num_cached_tokens: int = 0
    text: str | None = None
    prompt_logprobs: Sequence[float | None] = ()
    prompt_ids: Sequence[int] = ()
    top_logprobs: Sequence[Top] = ()
    prompt_top_logprobs: Sequence[Top | None] = ()
    routed_experts: str = ""


def check_request(request: Request, *, vocab_size: int, context_length: int, takes_images: bool = False) -> None:
    """Raise BadRequest if no sampler of this vocabulary and context can serve the request. takes_images: True where ids
    may spell images. A trainer checks before it sends: an id outside the vocabulary ends a whole SGLang server."""
    ids, params = request.input_ids, request.params
    if not len(ids):
        raise BadRequest("the prompt is empty: give at least one token id")
    lowest, highest = min(ids), max(words_in(ids) if takes_images else ids, default=0)
    if lowest < 0 or highest >= vocab_size:
        raise BadRequest(f"token id {lowest if lowest < 0 else highest} is outside the vocabulary of {vocab_size}")
    num_new = params.max_new_tokens if params.max_new_tokens is not None else 1
    if len(ids) + num_new > context_length:
        raise BadRequest(
            f"a prompt of {len(ids)} tokens and {num_new} new ones do not fit the context of {context_length}: "
            "shorten the prompt, lower max_new_tokens, or start the sampler with a larger context"
        )
    if num_new == 0 and not (request.score_prompt and request.return_logprob):
        raise BadRequest("max_new_tokens 0 leaves nothing to do: set return_logprob and logprob_start_len 0 with it")
    wrong_stops = [token for token in params.stop_token_ids if not 0 <= token < vocab_size]
    if wrong_stops:
        raise BadRequest(f"stop_token_ids {wrong_stops[:5]} are outside the vocabulary of {vocab_size}")


LogprobStart = Literal[-1, 0]
"""Where the logprobs of the prompt begin: nowhere, or at its first token. Other places are not built."""
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class GenerateBody(Wire):
    """POST /generate: one prompt (a list of ids or a string) or several (a list of those)."""

    input_ids: Any = None
    text: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] = SamplingParams()
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: LogprobStart | list[LogprobStart] = -1
    top_logprobs_num: NumTop | list[NumTop] = 0
    return_routed_experts: bool = False
    lora_path: str | None = None
    stream: bool = False
    incremental: bool = False
    """True for a stream whose events tell each token once, and no text. Of the embedded sampler alone."""

    @model_validator(mode="after")
    def _shapes_agree(self) -> "GenerateBody":
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("give either input_ids or text")
        if self.input_ids is not None:
            _check_ids(self.input_ids)
        elif not self.text or (isinstance(self.text, list) and not all(self.text)):
            raise ValueError("text is empty")
        num_prompts = len(self.prompts())
        for name in ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"):
            value = getattr(self, name)
            if isinstance(value, list) and (not self.is_batch or len(value) != num_prompts):
                raise ValueError(f"{name} is a list of {len(value)} for {num_prompts} prompts")
        if self.is_batch and isinstance(self.rid, list) and len(set(self.rid)) < len(self.rid):
            raise ValueError("the same rid is given twice")
        if self.incremental and not self.stream:
            raise ValueError("incremental is for a stream")
        return self

    @property
    def is_batch(self) -> bool:
        return isinstance(self.text, list) or (self.input_ids is not None and isinstance(self.input_ids[0], list))

    def prompts(self) -> list[Any]:
        """Each prompt: a string, or its token ids."""
        prompts = self.input_ids if self.text is None else self.text
        return prompts if isinstance(prompts, list) and self.is_batch else [prompts]

    def of_prompt(self, name: str, index: int) -> Any:
        """The value of ``name`` for prompt ``index``, whether it was given once or for each."""
        value = getattr(self, name)
        if name == "rid" and isinstance(value, str) and self.is_batch:
            return f"{value}_{index}"
        return value[index] if isinstance(value, list) else value

    def request(self, index: int, input_ids: Sequence[int], name: str) -> Request:
        """Request of prompt ``index``, whose tokens these are. name: its rid where none is given."""
        rid = self.of_prompt("rid", index)
        return Request(
            input_ids=input_ids,
            params=self.of_prompt("sampling_params", index),
            rid=rid if rid is not None else name,
            return_logprob=self.of_prompt("return_logprob", index),
            score_prompt=self.of_prompt("logprob_start_len", index) == 0,
            top_logprobs=self.of_prompt("top_logprobs_num", index),
            return_routed_experts=self.return_routed_experts,
            lora_path=self.lora_path or "",
        )


def _check_ids(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise ValueError("input_ids must be a list of token ids, or a list of such lists, and not empty")
    for ids in value if isinstance(value[0], list) else [value]:
        if not isinstance(ids, list) or not ids:
            raise ValueError("input_ids holds an empty prompt, or mixes ids and lists")
        if any(kind is not int for kind in set(map(type, ids))):
            raise ValueError("input_ids holds something that is no integer")


class StartProfileBody(Wire):
    """POST /start_profile: torch's trace goes into this folder."""

    output_dir: Annotated[str, Field(min_length=1, max_length=4096)]


class EmptyBody(Wire):
    """POST /stop_profile and /end_weight_update: no fields."""


class PauseBody(Wire):
    """POST /pause_generation. ``in_place`` keeps what runs, ``retract`` recomputes its cache, ``abort`` ends it."""

    mode: PauseMode = "abort"


class ContinueBody(Wire):
    """POST /continue_generation."""

    torch_empty_cache: bool = True


MemoryTag = Literal["weights", "kv_cache"]
"""What a sampler can give the device's memory back for: its weights, or the cache of keys and values."""


class MemoryBody(Wire):
    """POST /release_memory_occupation and /resume_memory_occupation."""

    tags: Annotated[list[MemoryTag], Field(min_length=1)] = ["weights", "kv_cache"]


class AbortBody(Wire):
    """POST /abort_request."""

    rid: str = ""
    abort_all: bool = False

    @model_validator(mode="after")
    def _names_something(self) -> "AbortBody":
        if not self.rid and not self.abort_all:
            raise ValueError("give a rid, or abort_all")
        return self


Body = TypeVar("Body", bound=Wire)


def json_object(raw: bytes) -> dict[str, Any]:
    """The body of a request as it is sent. Raises BadRequest for one that is no JSON object."""
    try:
        content = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadRequest(f"the body must be a JSON object, not a {type(content).__name__}")
    return content


def parse_body(model: type[Body], content: Any) -> Body:
    """Validate a decoded body. Raises BadRequest with every field that is wrong, and why."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise BadRequest("; ".join(_explain(problem) for problem in error.errors(include_url=False))) from error


def _explain(problem: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(("list[", "Sampling")))
    if problem["type"] == "extra_forbidden":
        if problem["loc"][-1] in ONLY_FIELDS:
            return f"{place}: SGLang knows this field, the embedded sampler does not"
        return f"{place}: there is no such field"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("model_type", "model_attributes_type", "value_error") and not place:
        return message
    return f"{place}: {message} (found {shortened(problem['input'])})"


def shortened(value: Any) -> str:
    """A value as Python writes it, in 80 characters at most."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def completion_to_wire(completion: Completion, *, return_logprob: bool) -> dict[str, Any]:
    """One element of the answer to /generate. The logprobs are [logprob, token id, null] triples."""
    meta: dict[str, Any] = {
        "id": completion.rid,
        "finish_reason": _finish_to_wire(completion),
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": completion.num_told_tokens + len(completion.output_ids),
        "cached_tokens": completion.num_cached_tokens,
        "weight_version": completion.weight_version,
        "weight_versions": [vars(span) for span in completion.weight_versions],
    }
    if completion.num_told_tokens:
        meta["told_tokens"] = completion.num_told_tokens
    if completion.routed_experts:
        meta["routed_experts"] = completion.routed_experts
    if return_logprob:
        pairs = zip(completion.logprobs, completion.output_ids, strict=True)
        scored = zip(completion.prompt_logprobs, completion.prompt_ids, strict=True)
        meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in scored]
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        if completion.top_logprobs:
            meta["output_top_logprobs"] = [_top_to_wire(top) for top in completion.top_logprobs]
        if completion.prompt_top_logprobs:
            meta["input_top_logprobs"] = [_top_to_wire(top) for top in completion.prompt_top_logprobs]
    answer: dict[str, Any] = {"output_ids": completion.output_ids, "meta_info": meta}
    return answer if completion.text is None else {"text": completion.text, **answer}


def _top_to_wire(top: Top | None) -> list[list[Any]] | None:
    return None if top is None else [[logprob, token, None] for token, logprob in top]


def _top_from_wire(top: Sequence[Sequence[Any]] | None) -> Top | None:
    return None if top is None else [(entry[1], entry[0]) for entry in top]


def _finish_to_wire(completion: Completion) -> dict[str, Any] | None:
    reason = completion.finish_reason
    if reason is None:
        return None
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.type == "length":
        return {"type": "length", "length": completion.num_told_tokens + len(completion.output_ids)}
    return {"type": "abort", "message": reason.message, "status_code": reason.status_code, "err_type": None}


def completion_from_wire(answer: Mapping[str, Any]) -> Completion:
    """Read one element of the answer to /generate, of any sampler."""
    meta, output_ids = answer["meta_info"], list(answer["output_ids"])
    version = str(meta["weight_version"])
    finish = meta["finish_reason"]
    details = {name: (finish or {}).get(name) for name in ("matched", "message", "status_code")}
    spans = meta.get("weight_versions")
    if spans is None:
        spans = [{"version": version, "start": 0, "end": len(output_ids)}] if output_ids else []
    return Completion(
        rid=meta["id"],
        output_ids=output_ids,
        logprobs=list(map(itemgetter(0), meta.get("output_token_logprobs") or ())),
        prompt_logprobs=[entry[0] for entry in meta.get("input_token_logprobs") or ()],
        prompt_ids=[entry[1] for entry in meta.get("input_token_logprobs") or ()],
        finish_reason=None if finish is None else FinishReason(type=finish["type"], **details),
        weight_version=version,
        weight_versions=[VersionSpan(version=str(s["version"]), start=s["start"], end=s["end"]) for s in spans],
        num_prompt_tokens=meta.get("prompt_tokens", 0),  # SGLang leaves it out where a request was ended in its queue
        num_told_tokens=meta.get("told_tokens", 0),
        num_cached_tokens=meta.get("cached_tokens") or 0,
        text=answer.get("text"),
        top_logprobs=[_top_from_wire(top) or [] for top in meta.get("output_top_logprobs") or ()],
        prompt_top_logprobs=[_top_from_wire(top) for top in meta.get("input_top_logprobs") or ()],
        routed_experts=meta.get("routed_experts") or "",
    )
