"""Bodies of requests, as OpenAI has them, with vLLM's and SGLang's further sampling fields.

A field that is unknown is refused by its name: passed over, it would change the answer without a word. Those that no
answer depends on are passed over, and so is every field that is null or has its neutral value.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from nanodag.api.refusals import Refused
from nanodag.host.beside import table_beside
from nanodag.inference.protocol import json_object, shortened

_FIELDS = table_beside(__file__, "request_fields.yaml")
HARMLESS, NEUTRAL = frozenset[str](_FIELDS["harmless"]), _FIELDS["neutral"]
SGLANG_SAMPLING: Mapping[str, tuple[Any, str]] = _FIELDS["sglang_sampling"]

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_TOP_LOGPROBS = 20
MAX_ITEMS = 10_000  # of a list in a body, such as its messages
MAX_PROMPTS = 1024
MAX_MESSAGES = 10_000
MAX_TOOLS = 128
MAX_SWITCHES = 64

Text = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=2**31)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
Part = Annotated[int, Field(ge=1)]


class RequestBody(BaseModel):
    """No conversions: "1" is no number. What is left over of a request is in `further`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    @property
    def further(self) -> dict[str, Any]:
        return self.model_extra or {}


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class SamplingBody(RequestBody):
    """Fields of both endpoints. stop: strings that end an answer and are not part of it."""

    model: str = ""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    ignore_eos: bool = False
    logit_bias: dict[str, Bias] = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionBody(SamplingBody):
    """POST /v1/completions. prompt: a text, token ids, or a list of either. logprobs: how many of the likeliest tokens
    are told at each place."""

    prompt: Any = None
    max_tokens: Annotated[int, Field(ge=0)] = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Literal[1] = 1
    add_special_tokens: bool = True

    def prompts(self, *, longest: int) -> list[str] | list[list[int]]:
        """One or several, all of one form. Raises Refused for anything else, and for more than `longest` ids."""
        prompts = self.prompt
        if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and type(prompts[0]) is int):
            prompts = [prompts]
        if not isinstance(prompts, list) or not prompts:
            raise Refused("prompt must be a text, a list of token ids, or a list of either", param="prompt")
        if len(prompts) > MAX_PROMPTS:
            raise Refused(f"{len(prompts)} prompts at once; at most {MAX_PROMPTS}", param="prompt")
        if all(isinstance(prompt, str) for prompt in prompts):
            return prompts
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, list) and len(prompt) > longest:  # before each of its ids is looked at
                raise Refused(
                    f"This model's maximum context length is {longest} tokens. However, prompt {number} has "
                    f"{len(prompt)}. Please reduce it.",
                    param="prompt",
                    code="context_length_exceeded",
                )
            if not isinstance(prompt, list) or not prompt or any(type(token) is not int for token in prompt):
                raise Refused(f"prompt {number} is neither a text nor a list of token ids", param="prompt")
        return prompts


class Function(RequestBody):
    """A tool's name and what it takes, as a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)


class Tool(RequestBody):
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(RequestBody):
    name: str


class CalledFunction(NamedFunction):
    """arguments: JSON."""

    arguments: str = "{}"


class EarlierCall(RequestBody):
    """A call that an earlier answer made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(RequestBody):
    """One message. What OpenAI's own answers have beside these fields (refusal, annotations) is passed over."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] = ""
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_call_id: str = ""


class NamedTool(RequestBody):
    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchema(RequestBody):
    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool = False


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions. chat_template_kwargs: switches of the model's chat template; reasoning_effort is one
    of them. continue_final_message: the answer continues the last message, an assistant's, as in vLLM."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Part | None = None
    max_completion_tokens: Part | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat(type="text")
    chat_template_kwargs: Annotated[dict[str, bool | int | float | str], Field(max_length=MAX_SWITCHES)] = Field(
        default_factory=dict
    )
    reasoning_effort: Annotated[str, Field(max_length=32)] = ""
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None


class TokenizeBody(ChatBody):
    """POST /tokenize: a text, or the conversation that an answer would continue."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    model: str = ""
    tokens: Annotated[list[TokenId], FailFast()]


Parsed = TypeVar("Parsed", bound=RequestBody)


def parse_body(model: type[Parsed], raw: bytes) -> Parsed:
    """The checked body of a request. Raises Refused with the first field that is wrong, and why."""
    content = json_object(raw)
    free = "prompt" if issubclass(model, CompletionBody) else "tokens" if model is DetokenizeBody else ""
    _check_lists(content, free=free)
    try:
        body = model.model_validate(_without_nulls(content))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        # Names of classes and types tell which form of a union was tried.
        parts = [str(part) for part in problem["loc"] if not str(part).endswith(("]", "Tool")) and part not in _FORMS]
        place = ".".join(parts)[:200]
        found = shortened(problem["input"])
        raise Refused(f"{place or 'the body'}: {problem['msg']} (found {found})", param=place or None) from error
    for name, value in body.further.items():
        if name not in HARMLESS and name not in SGLANG_SAMPLING and NEUTRAL.get(name) != value:
            raise Refused(f"there is no field {name[:80]!r} here: leave it out", param=name[:80])
    return body


def _check_lists(content: dict[str, Any], *, free: str) -> None:
    """Refuse long lists and objects before their items are looked at: each wrong one would be an error of its own, kept
    and counted. free: a field of ids that the model's context or the body's bytes bound, and of which one error is
    told."""
    messages = content.get("messages")
    parts = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    for name, value in [pair for part in (content, *parts[:MAX_ITEMS]) for pair in part.items()]:
        if isinstance(value, list | dict) and name != free and len(value) > MAX_ITEMS:
            raise Refused(f"{name[:80]} has {len(value)} items; at most {MAX_ITEMS}", param=name[:80])


def _without_nulls(content: dict[str, Any]) -> Any:
    """null stands for a field that is not there, at the top and in messages, as clients send it."""

    def kept(part: Any) -> Any:
        return {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else part

    messages = content.get("messages")
    return kept(content | {"messages": list(map(kept, messages))} if isinstance(messages, list) else content)


_FORMS = ("constrained-str", "str", "dict", "list")
