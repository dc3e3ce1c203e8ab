"""Continuous batching over the slots of one model.

    engine = Engine(EngineSettings(model=path, dtype="float32", max_batch=64))
    engine.submit(Request(input_ids=[...], params=SamplingParams(n=8)), listener)
    while engine.has_work:
        engine.step()

A step decodes one token for every running sample, admits waiting ones into free slots (their prompts are run once each,
however many samples start from them, and what a slot still holds of a prompt is not run again), and draws. So samples
come and go at every step. Weights change between steps: a token is computed from one set of weights only.

Not thread-safe: ``engine_loop.EngineLoop`` owns an engine for the server.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanodag.errors import BadRequest
from nanodag.host.images import layout_of
from nanodag.inference.cache_size import PREFILL_TOKENS, slot_tokens
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.number_formats import DTYPES
from nanodag.inference.protocol import FinishReason, MemoryTag, Request, check_request
from nanodag.model.architecture import check_same_shape, read_checkpoint
from nanodag.sampler.adapters import base_tensors, builder_of
from nanodag.sampler.device import give_back
from nanodag.sampler.drawing import sample_key
from nanodag.sampler.model import SamplerModel
from nanodag.sampler.slots import ActiveRequest, ActiveSample, Listener, SlotTable, StreamPace, completion, plan_cache
from nanodag.sampler.steps import CompiledSteps, TorchSteps
from nanodag.sampler.text import Text
from nanodag.sampler.transformers_sampler import ClassWeightsBuilder, TransformersSampler, load_class_weights
from nanodag.sampler.weights import NamedTensors, WeightsBuilder, load_weights

DEFAULT_MAX_BATCH = 64
STEP_PREFILL_TOKENS = 4096
"""New prompts that one step takes in; more would hold up what is running."""
TOKEN_BYTES = np.dtype(np.int64).itemsize


class Prompt(NamedTuple):
    """A prompt to be run: its tokens (T,), the rows that start from it, and how many tokens the first one holds."""

    tokens: np.ndarray
    rows: list[int]
    start: int


class Held(NamedTuple):
    """Tokens that a slot holds, as bytes of ids (T,) int64: keys and values of ``tokens``, and the hidden state at the
    end of ``prompt``, with which they begin."""

    prompt: bytes
    tokens: bytes


class Engine:
    """A model with its running and waiting samples. steps: None while the model lacks weights or cache."""

    steps: TorchSteps | CompiledSteps | None

    def __init__(self, settings: EngineSettings) -> None:
        """Load the checkpoint in the folder ``settings.model``. Beside what the settings say of themselves:

        dtype: auto is the checkpoint's own; float16 becomes float32. max_batch: None is DEFAULT_MAX_BATCH.
        context_length: at most what the model was trained for; by default as much of that as ``cache_bytes`` has room
        for with max_batch samples, and if that is less than MIN_CONTEXT, with fewer samples; num_slots says how many
        fit. cache_bytes: of keys and values, which are in the weights' dtype. deterministic: CPU and one torch thread
        only. stream_every_s: beside a stream's first token and its end; many streams report less often, see StreamPace.

        Raises BadRequest: not a checkpoint that the sampler can run, or sizes that do not fit.
        """
        folder, deterministic = settings.base or settings.model, settings.deterministic
        self.checkpoint = read_checkpoint(folder)
        self.device = torch.device(settings.device)
        self.dtype_name = settings.dtype
        if self.dtype_name == "auto":
            self.dtype_name = "bfloat16" if self.checkpoint.dtype == "bfloat16" else "float32"
        if self.dtype_name not in DTYPES.values():
            known = " or ".join(DTYPES.values())
            raise BadRequest(f"dtype {settings.dtype!r} is not built into the sampler: use auto, {known}")
        if deterministic and (self.device.type != "cpu" or torch.get_num_threads() != 1):
            raise BadRequest(
                f"deterministic mode needs the CPU and one torch thread; this is {settings.device!r} with "
                f"{torch.get_num_threads()} threads"
            )
        self._dtype = getattr(torch, self.dtype_name)
        a, max_batch = self.checkpoint.architecture, settings.max_batch
        max_batch = DEFAULT_MAX_BATCH if max_batch is None else max_batch
        self.num_slots, self.context_length = plan_cache(
            a, max_batch, settings.context_length, settings.cache_bytes, self._dtype.itemsize
        )
        sizes: dict[str, Any] = {
            "num_slots": self.num_slots, "capacity": slot_tokens(self.context_length), "deterministic": deterministic
        }  # fmt: skip
        if a.model_code == "transformers":
            self.model: SamplerModel | TransformersSampler = TransformersSampler(
                *load_class_weights(folder, self._dtype, self.device), **sizes
            )
        else:
            weights = load_weights(folder, a, self._dtype, self.device)
            self._has_bias = (weights.layers[0].qkv_bias is not None, weights.layers[0].output_bias is not None)
            self.model = SamplerModel(a, weights, cache_dtype=self._dtype, **sizes)
        self.base = cache(partial(base_tensors, folder, a))  # which adapters are merged onto
        tokenizer = folder / "tokenizer.json"
        self.text = Text(tokenizer) if tokenizer.exists() else None
        self._images = layout_of(folder) if getattr(self.model, "pictures", None) else None
        self.table = SlotTable(self.num_slots, self.context_length)
        self._make_steps()
        self.released: set[MemoryTag] = set()
        self.waiting: deque[ActiveSample] = deque()
        self.weight_version = settings.weight_version
        self._seed = settings.seed or 0
        self._pace = StreamPace(settings.stream_every_s)
        self._request_numbers = itertools.count()
        self._held: dict[int, Held] = {}  # by row, the one that was filled or ended longest ago first
        if settings.model != folder:
            self.update_weights(self.load(settings.model), settings.model, None)

    def validate(self, request: Request) -> None:
        """Raise BadRequest if the request cannot be served, now or ever. Touches no state: any thread may call it."""
        sizes = {"vocab_size": self.checkpoint.architecture.vocab_size, "context_length": self.context_length}
        check_request(request, **sizes, takes_images=self._images is not None)
        if self._images is not None:
            self._images.check(request.input_ids, is_scored=request.score_prompt)
        if request.params.stop and self.text is None:
            raise BadRequest(f"stop strings need a tokenizer, and there is none in {self.checkpoint.path}")

    def submit(
        self, request: Request, listener: Listener, *, stream: bool = False, tells_once: bool = False
    ) -> ActiveRequest:
        """Queue a request; ``listener`` is called from ``step`` when a sample ends, and at every token if streaming.

        tells_once: the listener of a stream hears of each token once, and of no text; else of all so far.
        A prompt that is to be scored is scored here and now, and the listener of a request for nothing else is called.

        Raises BadRequest as ``validate`` does.
        """
        self.validate(request)
        if not self.model.is_whole:
            raise BadRequest(f"nothing can be sampled: {self._what_is_missing()}")
        records = isinstance(self.model, TransformersSampler) and self.model.records_routes
        if request.return_routed_experts and not (records and records()):
            raise BadRequest(f"return_routed_experts: no routers of experts are known in {self.checkpoint.path}")
        if request.lora_path:
            raise BadRequest(f"lora_path {request.lora_path!r}: the embedded sampler has one model; leave it out")
        number, params = next(self._request_numbers), request.params
        room = self.context_length - len(request.input_ids)
        stop_ids = () if params.ignore_eos else {*params.stop_token_ids, *self.checkpoint.eos_token_ids}
        running = ActiveRequest(
            request=request,
            rid=request.rid if request.rid is not None else f"request-{number}",
            prompt=np.array(request.input_ids, dtype=np.int64),
            stop_ids=np.array(sorted(stop_ids), dtype=np.int64),
            max_new_tokens=room if params.max_new_tokens is None else params.max_new_tokens,
            seed=int(sample_key(self._seed, number)) if params.sampling_seed is None else params.sampling_seed,
            listener=listener,
            wants_stream=stream,
            tells_once=tells_once,
        )
        if running.is_scored:
            scores = self.model.prompt_logprobs(running.prompt, running.num_top)
            running.prompt_logprobs, running.prompt_top_logprobs = scores
        samples = [ActiveSample(running=running, index=index) for index in range(params.n)]
        if np.isnan(running.prompt_logprobs).any():
            for sample in samples:
                self._end(sample, self._not_finite())
        elif running.max_new_tokens == 0:
            for sample in samples:
                self._end(sample, FinishReason(type="length"))
        else:
            self.waiting.extend(samples)
        return running

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or bool(self.table.num_rows)

    def abort(self, is_aborted: Callable[[ActiveRequest], bool], message: str) -> int:
        """End the requests for which the predicate holds, with what they have; returns the number of samples."""
        reason = FinishReason(type="abort", message=message)
        waiting = [sample for sample in self.waiting if is_aborted(sample.running)]
        if waiting:
            self.waiting = deque(sample for sample in self.waiting if not is_aborted(sample.running))
        rows = [row for row in self.table.active_rows.tolist() if is_aborted(self.table.sample_at(row).running)]
        for sample in [*waiting, *map(self._empty, rows)]:
            self._end(sample, reason)
        return len(waiting) + len(rows)

    def retract(self) -> None:
        """Put all running samples back at the head of the queue; what is in the cache for them is computed again."""
        rows = self.table.active_rows
        self.waiting.extendleft(reversed([self.table.empty(int(row)) for row in rows]))
        self.forget_prompts()

    def load(self, path: Path) -> NamedTensors:
        """Read a checkpoint that fits this engine's model, or adapters of it. Touches no state: any thread may call it.
        Raises BadRequest if it cannot be read or has another architecture."""
        if (adapters := builder_of(self, path)) is not None:
            return adapters.whole()
        mine = self.checkpoint.architecture
        check_same_shape(read_checkpoint(path), mine)
        if mine.model_code == "transformers":
            return load_class_weights(path, self._dtype, self.device)[1]
        return load_weights(path, mine, self._dtype, self.device)

    def builder(self, source: str) -> WeightsBuilder | ClassWeightsBuilder:
        """Makes weights of this engine's model of a checkpoint's tensors. source: where they are from. Touches no
        state: any thread may call it and use what it returns."""
        a = self.checkpoint.architecture
        if isinstance(self.model, TransformersSampler):
            return ClassWeightsBuilder(self.model.places, self.device, source=source)
        return WeightsBuilder(a, self._dtype, self.device, source=source, has_bias=self._has_bias)

    def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """Free the memory of the weights, of the cache, or of both; what was in them is lost. Raises BadRequest while
        samples run or wait, or for what was released before."""
        if self.has_work:
            raise BadRequest(f"memory cannot be released: {len(self.waiting) + self.table.num_rows} samples need it")
        if twice := self.released & set(tags):
            raise BadRequest(f"{' and '.join(sorted(twice))}: released already; POST /resume_memory_occupation first")
        self.forget_prompts()
        self.steps = None
        for tag in tags:
            self.model.drop_weights() if tag == "weights" else self.model.drop_cache()
        self.released |= set(tags)
        give_back(self.device)

    def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Take it again: an empty cache, and room for weights, which are to come. Raises BadRequest for what was not
        released."""
        if held := set(tags) - self.released:
            raise BadRequest(f"{' and '.join(sorted(held))}: not released, so it cannot be resumed")
        self.released -= set(tags)
        if "kv_cache" in tags:
            self.model.make_cache()
        self._make_steps()

    def _make_steps(self) -> None:
        kernel, self.steps = self.model.kernel, None
        if self.model.is_whole:
            self.steps = TorchSteps(self.model, self.table) if kernel is None else CompiledSteps(kernel, self.table)

    def _what_is_missing(self) -> str:
        if self.released:
            names = " and ".join(sorted(self.released))
            return f"the memory of {names} is released; POST /resume_memory_occupation first"
        return "the weights were released and others have not come yet"

    def check_room_for_weights(self) -> None:
        """Raise BadRequest where new weights have no memory."""
        if "weights" in self.released:
            raise BadRequest(f"weights cannot be taken: {self._what_is_missing()}")

    @torch.inference_mode()
    def update_weights(self, weights: NamedTensors, path: Path, version: str | None) -> None:
        """Sample every token from here on with ``weights``. Running samples continue with the cache they have."""
        self.check_room_for_weights()
        self.model.use(weights)
        if self.steps is None:
            self._make_steps()
        self.checkpoint = replace(self.checkpoint, path=path)
        self.forget_prompts()
        if version is not None:
            self.weight_version = version
        for row in self.table.active_rows.tolist():
            self._note_version(self.table.sample_at(row), int(self.table.counts[row]))

    def forget_prompts(self) -> None:
        """Run every prompt from here on, whatever slots hold now, those of running samples too."""
        self._held.clear()

    def step(self) -> None:
        """Decode, admit, draw one token for every sample that then runs, and report to the listeners."""
        table = self.table
        assert self.steps is not None  # no work begins without
        if table.num_rows:
            self.steps.decode(table.num_rows)
        if self.waiting:
            self._admit()
        ended, broken = self.steps.draw(table.num_rows)
        if len(broken):
            reason = self._not_finite()
            for row in broken.tolist():
                self._held.pop(row, None)
                self.model.clear(row)
                self._end(table.empty(row), reason)
        if len(table.watched_rows):
            ended = self._report_watched(ended)
        for row in ended.tolist():
            last = int(table.tokens[row])
            stopped = last in table.stop_ids[row]
            reason = FinishReason(type="stop", matched=last) if stopped else FinishReason(type="length")
            self._end(self._empty(row), reason)
        if not self.waiting:
            self._compact()

    def _admit(self) -> None:
        """Give free rows to waiting samples, in order."""
        groups: dict[bytes, Prompt] = {}
        free = self.table.free_rows().tolist()
        num_tokens = 0
        while self.waiting and free and num_tokens < STEP_PREFILL_TOKENS:
            sample = self.waiting.popleft()
            prefix = sample.prefix()
            key = prefix.tobytes()
            row, num_held = self._take_row(None if key in groups else self._source_of(key, free), key, free)
            if key in groups:
                groups[key].rows.append(row)
                num_held = len(prefix)
            elif num_held < len(prefix):
                groups[key] = Prompt(prefix, [row], num_held)
                num_tokens += len(prefix) - num_held
            else:
                self._held[row] = Held(key, key)
            sample.num_cached_tokens = num_held
            self._note_version(sample, len(sample.output_ids))
            self.table.fill(row, sample, len(prefix))
        for batch in self._prefill_batches(list(groups.values())):
            self.model.prefill(*map(list, zip(*batch, strict=True)))
        for key, prompt in groups.items() if self.model.keeps_prompts else ():
            self._held |= dict.fromkeys(prompt.rows, Held(key, key))

    def _source_of(self, key: bytes, free: Collection[int]) -> int | None:
        """The row that holds a prompt, or else most of its beginning; a free one, if there are several."""
        extends = self.model.extends_prompts
        found = [
            (held.prompt == key, min(len(held.tokens), len(key)), row in free, -age, row)
            for age, (row, held) in enumerate(self._held.items())
            if held.prompt == key or (extends and key.startswith(held.tokens))
        ]
        return max(found)[-1] if found else None

    def _take_row(self, source: int | None, key: bytes, free: list[int]) -> tuple[int, int]:
        """Take a free row for a prompt; returns it and how many of the prompt's tokens, the source's, it holds."""
        if source is not None and source in free:
            row = source
        else:  # what nobody came back to for longest is overwritten
            oldest = (row for row in self._held if row in free)
            row = next(itertools.chain((row for row in free if row not in self._held), oldest))
        num_tokens, num_held = len(key) // TOKEN_BYTES, 0
        if source is not None:
            held = self._held[source]
            # The last token is run again where only its keys and values are there.
            num_held = num_tokens if held.prompt == key else min(len(held.tokens) // TOKEN_BYTES, num_tokens - 1)
            self.model.start_from_prompt(row, num_held, source)
        free.remove(row)
        self._held.pop(row, None)
        return row, num_held

    def _prefill_batches(self, prompts: list[Prompt]) -> list[list[Prompt]]:
        """Split prompts into batches of similar length, so that little is padded; one by one in deterministic mode."""
        if self.model.kernel is not None:  # takes them one after another, without padding
            return [prompts] if prompts else []
        batches: list[list[Prompt]] = []
        for prompt in sorted(prompts, key=lambda entry: (entry.start, len(entry.tokens))):
            is_alone = self.model.deterministic or prompt.start
            if batches and not is_alone and _fits(len(prompt.tokens), batches[-1]):
                batches[-1].append(prompt)
            else:
                batches.append([prompt])
        return batches

    def _empty(self, row: int) -> ActiveSample:
        """Free a row, and note what it holds: all but the last token that was drawn; nothing if weights changed."""
        sample, held = self.table.empty(row), self._held.pop(row, None)
        if sample.running.request.return_routed_experts and isinstance(self.model, TransformersSampler):
            sample.routed_experts = self.model.routes_of(row)
        if held is not None:
            self._held[row] = Held(held.prompt, sample.prefix()[: self.table.positions[row]].tobytes())
        return sample

    def _note_version(self, sample: ActiveSample, count: int) -> None:
        """Note that the sample is drawn with the present weights from token number ``count`` on."""
        if not sample.spans or sample.spans[-1][0] != self.weight_version:
            sample.spans.append((self.weight_version, count))

    def _compact(self) -> None:
        """Move samples from the highest rows into free ones below: the next steps are smaller."""
        num_active, free = len(self.table.active_rows), self.table.free_rows().tolist()
        for row in reversed(self.table.active_rows.tolist()):
            if row < num_active:
                return
            target = free.pop(0)
            num_held = int(self.table.positions[target]) if target in self._held else 0
            self.model.move(row, target, int(self.table.positions[row]), num_held)
            self.table.move(row, target)
            names = {row: target, target: row}
            self._held = {names.get(other, other): held for other, held in self._held.items()}

    def _end(self, sample: ActiveSample, reason: FinishReason, text: str | None = None) -> None:
        if text is None:
            text = self._text_of(sample, reason)
        sample.running.listener(sample.index, completion(sample, reason, self.weight_version, text))

    def _not_finite(self) -> FinishReason:
        return FinishReason(
            type="abort",
            message=f"the model's scores are not finite (weights {self.weight_version}, {self.checkpoint.path})",
            status_code=500,
        )

    def _text_of(self, sample: ActiveSample, reason: FinishReason | None) -> str | None:
        if self.text is None or sample.running.tells_once:
            return None
        has_stop_token = reason is not None and reason.type == "stop"
        return self.text.answer(sample.output_ids, sample.running.request.params, has_stop_token=has_stop_token)

    def _report_watched(self, ended: np.ndarray) -> np.ndarray:
        """Send what streams, and end what met a stop string; returns the rows that are still to be ended."""
        table, remaining, rows = self.table, set(ended.tolist()), self.table.watched_rows
        is_due = self._pace.is_due(len(rows))
        if not is_due:
            rows = rows[(table.counts[rows] == 1) | table.has_stop[rows]]
        for row in rows.tolist():
            sample = table.sample_at(row)
            count, params = int(table.counts[row]), sample.running.request.params
            sample.output_ids += table.output_ids[row, len(sample.output_ids) : count].tolist()
            sample.logprobs += table.logprobs[row, len(sample.logprobs) : count].tolist()
            matched = self.text.matched_stop(sample.output_ids, params) if self.text and params.stop else None
            if matched is not None:
                text, stop = matched
                remaining.discard(row)
                self._end(self._empty(row), FinishReason(type="stop", matched=stop), text)
            elif sample.running.wants_stream and row not in remaining and (is_due or count == 1):
                so_far = self._text_of(sample, None)
                sample.running.listener(sample.index, completion(sample, None, self.weight_version, so_far))
                sample.num_told = count if sample.running.tells_once else 0
        return np.array(sorted(remaining), dtype=np.int64)


def _fits(length: int, batch: Sequence[Prompt]) -> bool:
    """True where a prompt of that many tokens joins a batch of shorter ones without much padding."""
    return (len(batch) + 1) * length <= PREFILL_TOKENS and length <= 1.25 * len(batch[0].tokens)
