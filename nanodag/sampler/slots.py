"""The table of running samples: one row per cache slot, in arrays, so that a step is a few numpy calls; and how often
those who read streams are told of what came. And how many slots fit into memory, and how long they are.

Letters: B slots, C capacity of a slot in tokens.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nanodag.errors import BadRequest
from nanodag.inference.cache_size import SLOT_UNIT, slot_tokens, token_bytes
from nanodag.inference.protocol import GREEDY_BELOW, Completion, FinishReason, Request, Top, VersionSpan
from nanodag.model.architecture import Architecture
from nanodag.sampler.drawing import DrawSettings, sample_key

MIN_CONTEXT = 512
MAX_TOP_K = 1 << 31  # more than any vocabulary
REPORT_CPU_S = 60e-6
"""Cost of one report to a stream for this process, HTTP included: half a token of a model of 6 M parameters."""
MAX_REPORT_SHARE = 0.03
"""Share of the engine's time for streams whose parts are joined; many streams are told of less often to keep it."""
MAX_SILENCE_S = 0.5
"""Longest silence of a stream for the sake of that share."""

Listener = Callable[[int, Completion], None]
"""Called with the sample's number and what there is of it; finish_reason None means that more will follow."""


@dataclass(eq=False, kw_only=True)
class ActiveRequest:
    """A request inside the engine."""

    request: Request
    rid: str
    prompt: np.ndarray  # (T,) int64
    stop_ids: np.ndarray  # (S,) int64
    max_new_tokens: int
    seed: int
    listener: Listener
    wants_stream: bool
    tells_once: bool  # the listener of a stream hears of each token once, and of no text
    prompt_logprobs: list[float] = field(default_factory=list)  # (T - 1,), empty if not asked
    prompt_top_logprobs: list[Top] = field(default_factory=list)  # (T - 1,), empty if not asked

    @property
    def is_scored(self) -> bool:
        """True where the request asks for logprobs of the prompt."""
        return self.request.score_prompt and self.request.return_logprob

    @property
    def num_top(self) -> int:
        """Number of likeliest tokens that are told at each place."""
        return self.request.top_logprobs if self.request.return_logprob else 0


@dataclass(eq=False, kw_only=True)
class ActiveSample:
    """One of a request's n samples. What it already has is here while it waits, and in the table while it runs."""

    running: ActiveRequest
    index: int
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Top] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    num_cached_tokens: int = 0
    routed_experts: str = ""  # as of a completion, at the end
    num_told: int = 0  # tokens that the listener will not hear of again

    def prefix(self) -> np.ndarray:
        """(T,) int64: what has to be in the cache before the next token can be drawn."""
        return np.concatenate([self.running.prompt, np.array(self.output_ids, dtype=np.int64)])


class SlotTable:
    """Rows 0 to B-1, each free or running a sample. All arrays have B rows."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.samples: list[ActiveSample | None] = [None] * num_slots
        self.active = np.zeros(num_slots, dtype=bool)
        self.tokens = np.zeros(num_slots, dtype=np.int64)  # last drawn, not yet in the cache
        self.positions = np.zeros(num_slots, dtype=np.int64)  # tokens in the cache
        self.counts = np.zeros(num_slots, dtype=np.int64)  # tokens drawn
        self.limits = np.zeros(num_slots, dtype=np.int64)
        self.stop_ids = np.full((num_slots, 1), -1, dtype=np.int64)
        self.output_ids = np.zeros((num_slots, capacity), dtype=np.int64)
        self.logprobs = np.zeros((num_slots, capacity), dtype=np.float64)
        self.temperature = np.ones(num_slots, dtype=np.float32)
        self.greedy = np.zeros(num_slots, dtype=bool)
        self.top_p = np.ones(num_slots, dtype=np.float64)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.keys = np.zeros(num_slots, dtype=np.uint64)
        self.streams = np.zeros(num_slots, dtype=bool)
        self.has_stop = np.zeros(num_slots, dtype=bool)  # strings
        self.told: set[int] = set()  # rows whose likeliest tokens are told
        self._changed()

    def _changed(self) -> None:
        """To be called when a row begins or ends."""
        self._settings: dict[int, DrawSettings] = {}
        self.active_rows = np.flatnonzero(self.active)
        """(A,) int64, ascending."""
        self.num_rows = int(self.active_rows[-1]) + 1 if len(self.active_rows) else 0
        """Rows up to the last active one."""
        self.watched_rows = np.flatnonzero(self.active & (self.streams | self.has_stop))
        """(W,) int64, ascending: those that stream, or wait for a stop string."""

    def sample_at(self, row: int) -> ActiveSample:
        """The sample of an active row."""
        sample = self.samples[row]
        assert sample is not None, row
        return sample

    def free_rows(self) -> np.ndarray:
        return np.flatnonzero(~self.active)

    def fill(self, row: int, sample: ActiveSample, prefix_length: int) -> None:
        """Start or resume ``sample`` in a free row whose cache holds its prefix."""
        assert not self.active[row], row
        running, params = sample.running, sample.running.request.params
        count = len(sample.output_ids)
        self.samples[row] = sample
        self.active[row] = True
        self.positions[row] = prefix_length
        self.counts[row] = count
        self.limits[row] = running.max_new_tokens
        self.output_ids[row, :count] = sample.output_ids
        self.logprobs[row, :count] = sample.logprobs
        width = len(running.stop_ids)
        if width > self.stop_ids.shape[1]:
            wider = np.full((self.num_slots, width), -1, dtype=np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, :width] = running.stop_ids
        self.greedy[row] = params.temperature < GREEDY_BELOW
        self.temperature[row] = 1.0 if self.greedy[row] else params.temperature
        self.top_p[row] = 1.0 if self.greedy[row] else params.top_p
        self.top_k[row] = 0 if self.greedy[row] else min(max(params.top_k, 0), MAX_TOP_K)
        self.keys[row] = sample_key(running.seed, sample.index)
        self.streams[row] = running.wants_stream
        self.has_stop[row] = bool(params.stop)
        if running.num_top:
            self.told.add(row)
        self._changed()

    def empty(self, row: int) -> ActiveSample:
        """Free a row and give its sample back with all it has drawn."""
        assert self.active[row], row
        sample = self.sample_at(row)
        count = int(self.counts[row])
        sample.output_ids = self.output_ids[row, :count].tolist()
        sample.logprobs = self.logprobs[row, :count].tolist()
        self.samples[row] = None
        self.active[row] = False
        self.told.discard(row)
        self._changed()
        return sample

    def move(self, source: int, target: int) -> None:
        """Make the free row ``target`` what ``source`` is, and ``source`` free, with the tokens in its cache that
        ``target`` had."""
        assert self.active[source] and not self.active[target], (source, target)
        num_held = self.positions[target]
        for array in (
            self.active, self.tokens, self.positions, self.counts, self.limits, self.stop_ids, self.temperature,
            self.greedy, self.top_p, self.top_k, self.keys, self.streams, self.has_stop,
        ):  # fmt: skip
            array[target] = array[source]
        self.positions[source] = num_held
        count = self.counts[source]
        self.output_ids[target, :count] = self.output_ids[source, :count]
        self.logprobs[target, :count] = self.logprobs[source, :count]
        self.samples[target], self.samples[source] = self.samples[source], None
        self.active[source] = False
        self.told = {target if row == source else row for row in self.told}
        self._changed()

    def draw_settings(self, rows: int) -> DrawSettings:
        """Settings for the first ``rows`` rows. Free ones copy a running one, lest they need a path of their own."""
        settings = self._settings.get(rows)
        if settings is None:
            like = np.arange(rows)
            like[~self.active[:rows]] = self.active_rows[0]
            settings = DrawSettings(**{name: getattr(self, name)[like] for name in DrawSettings.__dataclass_fields__})
            self._settings[rows] = settings
        return settings

    def record(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Append one token to each of the active ``rows``; returns those of them that end with it."""
        counts = self.counts[rows]
        self.output_ids[rows, counts] = tokens
        self.logprobs[rows, counts] = logprobs
        self.tokens[rows] = tokens
        self.counts[rows] = counts + 1
        stopped = (self.stop_ids[rows] == tokens[:, None]).any(axis=1)
        return rows[stopped | (counts + 1 >= self.limits[rows])]


def completion(sample: ActiveSample, reason: FinishReason | None, version: str, text: str | None) -> Completion:
    """The sample so far, for its listener; only what is new to a listener that hears of each token once."""
    count, told = len(sample.output_ids), sample.num_told
    starts = [start for _, start in sample.spans] + [count]
    spans = [
        VersionSpan(version=name, start=start, end=end)
        for (name, start), end in zip(sample.spans, starts[1:], strict=True)
        if end > start
    ]
    running = sample.running
    is_only, tells_prompt = running.request.params.n == 1, running.is_scored and not told
    return Completion(
        rid=running.rid if is_only else f"{running.rid}_{sample.index}",
        output_ids=sample.output_ids[told:],
        logprobs=sample.logprobs[told:] if running.request.return_logprob else [],
        finish_reason=reason,
        weight_version=spans[-1].version if spans else version,
        weight_versions=spans,
        num_prompt_tokens=len(running.prompt),
        num_told_tokens=told,
        num_cached_tokens=sample.num_cached_tokens,
        text=text,
        prompt_logprobs=[None, *running.prompt_logprobs] if tells_prompt else [],
        prompt_ids=running.prompt.tolist() if tells_prompt else [],
        top_logprobs=sample.top_logprobs[told:count],
        prompt_top_logprobs=[None, *running.prompt_top_logprobs] if tells_prompt and running.num_top else [],
        routed_experts=sample.routed_experts,
    )


class StreamPace:
    """every_s: the least time between two reports; 0 for a report after every token. Many streams are told of less
    often, so that reports take no more than MAX_REPORT_SHARE of the engine's thread."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._told_at = self._told_at_cpu = 0.0  # when streams were told of last: clock, thread

    def is_due(self, num_streams: int) -> bool:
        """True where all streams are to be told of now."""
        if not self._every_s:
            return True
        since_s, worked_s = time.monotonic() - self._told_at, time.thread_time() - self._told_at_cpu
        worth_s = num_streams * REPORT_CPU_S / MAX_REPORT_SHARE
        if since_s < self._every_s or (worked_s < worth_s and since_s < MAX_SILENCE_S):
            return False
        self._told_at, self._told_at_cpu = time.monotonic(), time.thread_time()
        return True


def plan_cache(
    architecture: Architecture, max_batch: int, context_length: int | None, cache_bytes: int, element_bytes: int = 4
) -> tuple[int, int]:
    """Number of slots, and tokens in each. element_bytes: of a number in the cache. Raises BadRequest if not even one
    sample fits."""
    a = architecture
    if max_batch < 1:
        raise BadRequest(f"max_batch is {max_batch}: at least one sample must run")
    if context_length is not None and not 2 <= context_length <= a.max_positions:
        raise BadRequest(f"context_length {context_length} is not between 2 and the model's {a.max_positions}")
    each = token_bytes(
        num_layers=a.num_layers, num_kv_heads=a.num_kv_heads, head_width=a.head_dim, element_bytes=element_bytes
    )
    context = context_length or a.max_positions
    if context_length is None:
        least = min(MIN_CONTEXT, a.max_positions)
        context = min(context, max(cache_bytes // (max_batch * each) // SLOT_UNIT * SLOT_UNIT, least))
    slot_bytes = each * slot_tokens(context)
    num_slots = min(max_batch, cache_bytes // slot_bytes)
    if num_slots < 1:
        raise BadRequest(
            f"one sample of {context} tokens needs {slot_bytes >> 20} MiB of cache, more than the "
            f"{cache_bytes >> 20} MiB allowed: lower context_length or raise cache_bytes"
        )
    return num_slots, context
