"""Rollouts: what the sampler made of one prompt, kept as token ids from beginning to end.

A rollout is an ordered list of spans. Text is never tokenised again: the trainer gets the sampled ids themselves,
with the log-probability and the policy version of each sampled token. Rollouts are kept as JSON lines, one object a
line. Each object has its `format`, so a file stays readable when this module has changed.

One line, spelled out (format 1):

    {"format": 1, "group_id": "3:17", "prompt_id": "17", "sample_index": 0,
     "spans": [{"kind": "prompt", "token_ids": [5, 9]},
               {"kind": "sampled", "token_ids": [7, 2], "logprobs": [-0.5, -0.1],
                "mask": [[1, 2]], "versions": [[3, 2]]},
               {"kind": "tool", "token_ids": [8]}],
     "reward": 1.0, "reward_components": {"exact": 1.0}, "finish_reason": "stop", "metadata": {}, "media": []}

`mask` and `versions` are runs `[value, count]`: nearly always one run. With a process reward there is `"steps": [[1,
0.5]]` too: the place of a token after the prompt, counted from 0, and the score of the step that it ends. A further
sequence of a sample has `"branch": 1`, one of a role `"role": "judge"`. With router replay there is `"routed_experts"`.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import orjson

from nanodag.errors import SamplerError, SourceError
from nanodag.inference.protocol import Completion
from nanodag.store.atomic import write_bytes

FORMAT_VERSION = 1

# Keys of a rollout's metadata
REASON = "reward_error"  # why there is no reward
FAILED = "generate_error"  # why there is no response
LAST_WORDS = "last_words"  # the last lines that what failed has written, where there are any
ANSWER = "answer"  # the text that the reward sees, where a function that generates says it
METRICS, TURNS = "metrics", "turns"  # numbers that an environment says by name, and its turns
GREEDY = "greedy"  # its tokens were not drawn, so their log-probabilities are not of how they came about
REWARD_FAILED, GENERATE_FAILED = "reward_failed", "generate_failed"  # what became of a rollout

SpanKind = Literal["prompt", "sampled", "tool"]
FinishReason = Literal["stop", "text", "length", "abort", "error"]
SPAN_KINDS, FINISH_REASONS = get_args(SpanKind), get_args(FinishReason)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens of one origin. Only `sampled` spans carry mask, logprobs and versions, one entry a token.

    mask: 1 = trained, 0 = not. logprobs: the sampler's, natural log, at the sampling temperature, before top-p and
    top-k; empty where nobody knows them, as of answers from elsewhere. versions: the optimizer steps behind the
    weights that sampled the token.
    """

    kind: SpanKind
    token_ids: tuple[int, ...]
    mask: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in SPAN_KINDS:
            raise ValueError(f"span kind {self.kind!r} is none of {', '.join(SPAN_KINDS)}")
        # C loops: a controller makes hundreds of spans of a thousand tokens a second
        if self.token_ids and min(self.token_ids) < 0:
            raise ValueError(f"{self.kind} span holds the negative token id {min(self.token_ids)}")
        expected = len(self.token_ids) if self.kind == "sampled" else 0
        for name in ("mask", "logprobs", "versions"):
            length = len(getattr(self, name))
            if length != expected and (length or name != "logprobs"):
                raise ValueError(
                    f"{self.kind} span of {len(self.token_ids)} tokens has {length} {name}, not {expected}"
                )
        if not set(self.mask) <= {0, 1}:
            raise ValueError(f"mask holds {sorted(set(self.mask))}, not 0 and 1 only")
        if self.logprobs and not (max(self.logprobs) <= 0.0 and sum(self.logprobs) > -math.inf):  # a NaN's sum is NaN
            worst = next(value for value in self.logprobs if not -math.inf < value <= 0.0)
            raise ValueError(f"logprobs hold {worst}, which is no log-probability (it must be finite and <= 0)")


def prompt_span(token_ids: Sequence[int]) -> Span:
    return Span(kind="prompt", token_ids=tuple(token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sequence of tokens of one sample of one prompt: the whole sample, nearly always.

    group_id: rollouts that are compared with one another; groups may differ in size. branch: of a sample's sequences,
    which share group_id and sample_index; 0 is the main one, whose reward is the sample's, and each has a prompt of its
    own. role: who speaks, where a sample has several; a role is compared with itself. reward: None until it is known,
    or where computing it failed (`metadata["reward_error"]` then says why). finish_reason: `stop` (a stop token, which
    is the last sampled id), `text` (a stop string, which the last sampled id completed), `length` (cut off), `abort`,
    `error`. media: room for images and the like, as JSON objects.
    steps: of a process reward, else None: for each step the place in response_token_ids of the token that ends it, and
    its score. routed_experts: of a mixture of experts, as of a Completion; empty where they were not asked for.
    """

    group_id: str
    prompt_id: str
    sample_index: int
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    reward: float | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[Mapping[str, Any], ...] = ()
    steps: tuple[tuple[int, float], ...] | None = None
    branch: int = 0
    role: str = ""
    routed_experts: str = ""

    def __post_init__(self) -> None:
        if not self.spans or self.spans[0].kind != "prompt" or not self.spans[0].token_ids:
            raise ValueError("a rollout begins with a prompt span of at least one token")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason {self.finish_reason!r} is none of {', '.join(FINISH_REASONS)}")
        if self.reward is not None and self.reward != self.reward:
            raise ValueError("reward is NaN")
        size = sum(len(span.token_ids) for span in self.spans[1:])
        if beyond := [place for place, _ in self.steps or () if not 0 <= place < size]:
            raise ValueError(f"a step ends at token {beyond[0]} of a response of {size}")

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The ids of the leading prompt span, which the main sequences of a group share."""
        return self.spans[0].token_ids

    @property
    def response_token_ids(self) -> tuple[int, ...]:
        """Every id after the leading prompt span: sampled and tool tokens."""
        return tuple(chain.from_iterable(span.token_ids for span in self.spans[1:]))

    @property
    def sampled_token_ids(self) -> tuple[int, ...]:
        """The ids that the sampler drew."""
        return tuple(chain.from_iterable(span.token_ids for span in self.spans if span.kind == "sampled"))

    @property
    def has_logprobs(self) -> bool:
        """True where each sampled token has its log-probability."""
        return all(len(span.logprobs) == len(span.token_ids) for span in self.spans if span.kind == "sampled")

    @property
    def num_sampled(self) -> int:
        return sum(len(span.token_ids) for span in self.spans if span.kind == "sampled")

    @property
    def num_trained(self) -> int:
        return sum(sum(span.mask) for span in self.spans)

    def without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        """The last ids of this response without the stop token that ended it."""
        return ids[:-1] if self.finish_reason == "stop" else ids

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy version of each sampled token."""
        return tuple(chain.from_iterable(span.versions for span in self.spans))

    def with_reward(self, value: float | None, components: Mapping[str, float], **metadata: Any) -> "Rollout":
        """This rollout with its reward set and `metadata` added."""
        return replace(self, reward=value, reward_components=dict(components), metadata={**self.metadata, **metadata})


@dataclass(frozen=True, slots=True)
class Response:
    """The response flattened, one entry a token. Tool tokens have mask 0, logprob 0.0 and version -1. A
    log-probability that nobody knows is NaN."""

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


def flatten_response(rollout: Rollout) -> Response:
    """The spans after the leading prompt as four parallel tuples."""
    sizes = [(span, len(span.token_ids)) for span in rollout.spans[1:]]
    unknown = {"sampled": math.nan, "tool": 0.0}
    return Response(
        token_ids=rollout.response_token_ids,
        mask=tuple(chain.from_iterable(span.mask or (0,) * size for span, size in sizes)),
        logprobs=tuple(chain.from_iterable(span.logprobs or (unknown[span.kind],) * size for span, size in sizes)),
        versions=tuple(chain.from_iterable(span.versions or (-1,) * size for span, size in sizes)),
    )


def span_of(completion: Completion) -> Span:
    """A sampler's answer as a span of tokens that are trained."""
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


def groups_of(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    """Rollouts by group id, groups in order of first appearance, members sorted by sample index and branch."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    for members in groups.values():
        members.sort(key=place_in_group)
    return groups


def place_in_group(rollout: Rollout) -> tuple[int, int]:
    return rollout.sample_index, rollout.branch


def main_sequences(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """One rollout a sample, in their order: what a count of samples, a filter and a mean reward look at."""
    return [rollout for rollout in rollouts if rollout.branch == 0]


def places_of_samples(rollouts: Sequence[Rollout]) -> list[int]:
    """Place of the rollout whose reward each one has: the first of its sample with its role."""
    first: dict[tuple[str, int, str], int] = {}
    return [
        first.setdefault((rollout.group_id, rollout.sample_index, rollout.role), at)
        for at, rollout in enumerate(rollouts)
    ]


def reward_spread(group: Sequence[Rollout]) -> float:
    """Largest minus smallest reward of the samples that have one; 0.0 when fewer than two have. With a process reward
    of the scores of all their steps, which advantages are then made of."""
    rewards = [member.reward for member in main_sequences(group) if member.reward is not None]
    if any(member.steps is not None for member in group):
        rewards = [score for member in group for _, score in member.steps or ()]
    return max(rewards) - min(rewards) if len(rewards) > 1 else 0.0


def to_json(rollout: Rollout) -> str:
    """One line of JSON, without the newline."""
    names = {"format": FORMAT_VERSION, "group_id": rollout.group_id, "prompt_id": rollout.prompt_id}
    rest: dict[str, Any] = {
        "reward": rollout.reward,
        "reward_components": dict(rollout.reward_components),
        "finish_reason": rollout.finish_reason,
        "metadata": dict(rollout.metadata),
        "media": list(rollout.media),
    }
    rare = {name: getattr(rollout, name) for name in ("steps", "branch", "role", "routed_experts")}
    rest |= {name: value for name, value in rare.items() if value not in (None, 0, "")}
    # orjson is five times as fast, but takes a NaN, which metadata might hold, for null
    spans = orjson.dumps([_span_record(span) for span in rollout.spans]).decode()
    return f'{_dumped({**names, "sample_index": rollout.sample_index})[:-1]},"spans":{spans},{_dumped(rest)[1:]}'


def from_json(line: str | bytes) -> Rollout:
    """The rollout of one line. Raises ValueError with the reason; `parsed_lines` adds file and line."""
    return from_record(orjson.loads(line))


def from_record(record: Any) -> Rollout:
    """The rollout of one line's JSON. Raises ValueError with the reason."""
    if not isinstance(record, dict):
        raise ValueError(f"a rollout is a JSON object, found {type(record).__name__}")
    version = record.get("format")
    if version != FORMAT_VERSION:
        raise ValueError(f"format is {version!r}; this version of nanodag reads format {FORMAT_VERSION}")
    rare = {name: record[name] for name in ("branch", "role", "routed_experts") if name in record}
    try:
        return Rollout(
            group_id=str(record["group_id"]),
            prompt_id=str(record["prompt_id"]),
            sample_index=int(record["sample_index"]),
            spans=tuple(_span_from(span) for span in record["spans"]),
            media=tuple(record["media"]),
            steps=tuple((place, score) for place, score in record["steps"]) if "steps" in record else None,
            **{name: record[name] for name in ("reward", "reward_components", "finish_reason", "metadata")},
            **rare,
        )
    except KeyError as error:
        raise ValueError(f"the key {error.args[0]!r} is missing") from error


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Write rollouts as JSON lines, a lone surrogate in a text as `?`. The file appears under its name only when it is
    complete."""
    write_bytes(path, b"".join(to_json(rollout).encode(errors="replace") + b"\n" for rollout in rollouts))


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """Yield the rollouts of a JSON lines file, in order. Raises as `parsed_lines`."""
    return parsed_lines(path, lambda line, _: from_json(line))


def parsed_lines(path: Path, parse: Callable[[bytes, int], T]) -> Iterator[T]:
    """Yield what a parser makes of each line of a file that is not blank, and of the byte at which the line begins.
    Raises SourceError that names file, line and reason for a line that is no rollout."""
    begin = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                if line.strip():
                    yield parse(line, begin)
            except (ValueError, TypeError) as error:
                raise SourceError(
                    f"{path}, line {number}: not a rollout: {error}. Remove the line, or write the file again."
                ) from error
            begin += len(line)


def read_lines(path: Path, *, is_whole: bool = False) -> Iterator[dict[str, Any]]:
    """Objects of a file of JSON lines; a last one that is being written, or was cut off, is left out. is_whole: nobody
    writes it any more, so its last line counts without its line end, too."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").split("\n")
        yield from (json.loads(line) for line in (lines if is_whole else lines[:-1]) if line.strip())


def _dumped(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _span_record(span: Span) -> dict[str, Any]:
    record: dict[str, Any] = {"kind": span.kind, "token_ids": span.token_ids}
    if span.kind == "sampled":
        record["logprobs"] = span.logprobs
        record["mask"] = _runs(span.mask)
        record["versions"] = _runs(span.versions)
    return record


def _span_from(record: Mapping[str, Any]) -> Span:
    return Span(
        kind=record["kind"],
        token_ids=tuple(record["token_ids"]),
        logprobs=tuple(record.get("logprobs", ())),
        mask=_unrolled(record.get("mask", ())),
        versions=_unrolled(record.get("versions", ())),
    )


def _runs(values: Sequence[int]) -> list[list[int]]:
    if values and values.count(values[0]) == len(values):  # nearly always, and a C loop
        return [[values[0], len(values)]]
    return [[value, sum(1 for _ in run)] for value, run in groupby(values)]


def _unrolled(runs: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(repeat(value, count) for value, count in runs))
