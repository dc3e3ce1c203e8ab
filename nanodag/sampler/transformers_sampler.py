"""A model in its class of transformers as the engine's slots see it (nanodag.sampler.model), over transformers' cache.

A prompt is read once, alone, whatever its layers keep: keys and values, windows of them, states. Running samples are
rows of one batch, whose shorter ones are filled up on the left, which the mask hides and no position counts. In
deterministic mode every sample is a batch of its own, so that its bits depend on no other; that costs a pass over the
weights a token and sample.
"""

import inspect
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from nanodag.errors import BadRequest, ConfigError
from nanodag.inference.protocol import Top
from nanodag.model.expert_routing import ExpertRouting, routing_of
from nanodag.model.pictures import Pictures
from nanodag.model.transformers_class import LoadedClass, capped, load_class
from nanodag.sampler.drawing import prompt_scores
from nanodag.sampler.weights import VOCABULARY_BLOCK, NamedTensors, check_finite

STATES = ("conv_states", "recurrent_states")  # of a layer's cache, by number; not by token
CACHE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
LAYERS = {
    *("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer"),
    *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"),
}


class ClassWeightsBuilder:
    """Makes weights of tensors by a class's own names, as they come. places: what they must be like, by name. source:
    where they are from, for messages."""

    def __init__(self, places: Mapping[str, Tensor], device: torch.device, *, source: str) -> None:
        self._places, self._device, self._source, self._tensors = places, device, source, dict[str, Tensor]()

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """More of them, in any order. Raises BadRequest for one that came before, has no place or another shape, or
        holds NaN or infinity."""
        for name, tensor in tensors.items():
            place = self._places.get(name)
            if place is None or name in self._tensors or place.shape != tensor.shape:
                raise BadRequest(f"{name!r} in {self._source} came twice, or has no place of shape {tensor.shape}")
            check_finite(name, tensor, self._source)
            self._tensors[name] = tensor.to(self._device, place.dtype, copy=True)

    def whole(self) -> NamedTensors:
        """Finish the weights. Raises BadRequest where one is missing."""
        if missing := sorted(self._places.keys() - self._tensors.keys()):
            raise BadRequest(f"{self._source} has no tensor {missing[0]!r}")
        return NamedTensors(self._tensors)


def load_class_weights(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[LoadedClass, NamedTensors]:
    """A folder's model and its weights. Raises BadRequest where it cannot be read."""
    try:
        loaded = load_class(path)
    except ConfigError as error:
        raise BadRequest(str(error)) from error
    loaded.cast(device, dtype)
    parameters, saved = dict(loaded.whole.named_parameters()), loaded.whole.state_dict()
    buffers = {name: buffer for name, buffer in loaded.whole.named_buffers() if name in saved}
    weights = NamedTensors({**{name: parameter.data for name, parameter in parameters.items()}, **buffers})
    for name, tensor in weights.named().items():
        check_finite(name, tensor, f"the checkpoint in {path}")
    return loaded, weights


@dataclass(eq=False)
class Batch:
    """Samples that are decoded together: their slots, row by row, and the cache. lengths: (R,) tokens in it of each,
    the last of its `columns`. shifts: (R,) what is added to a length for the position:
    below 0 behind images, which take fewer positions than tokens."""

    slots: list[int]
    cache: Any
    lengths: np.ndarray
    shifts: np.ndarray
    columns: int


class TransformersSampler:
    """Weights and caches of one model. Not thread-safe: one thread at a time calls it.

    num_slots: B. capacity: C, tokens of prompt and answer. What it holds follows what runs, not these two.
    """

    kernel = None
    keeps_prompts = extends_prompts = False
    weights: NamedTensors

    def __init__(
        self, loaded: LoadedClass, weights: NamedTensors, *, num_slots: int, capacity: int, deterministic: bool
    ) -> None:
        self._loaded, self.num_slots, self.capacity, self.deterministic = loaded, num_slots, capacity, deterministic
        known = inspect.signature(loaded.body.forward).parameters  # type: ignore[attr-defined]
        self._cache_name = "past_key_values" if "past_key_values" in known else "cache_params"
        self._takes_positions = "position_ids" in known
        named = loaded.whole.named_parameters()
        self.places = {name: torch.empty_like(parameter, device="meta") for name, parameter in named}
        self._routing: ExpertRouting | None = None
        self.use(weights)
        self.make_cache()
        self._check()
        self.make_cache()

    @property
    def is_whole(self) -> bool:
        """True with weights and a cache; without either it computes nothing."""
        return hasattr(self, "weights") and hasattr(self, "_hidden")

    def use(self, weights: NamedTensors) -> None:
        """Compute with these from now on; they belong to the model then."""
        self.weights = weights
        parameters, buffers = (dict(named) for named in (self._loaded.whole.named_parameters(),
                                                         self._loaded.whole.named_buffers()))  # fmt: skip
        for name, tensor in weights.named().items():
            if name in parameters:
                parameters[name].data = tensor
            else:
                buffers[name].copy_(tensor)

    @property
    def pictures(self) -> Pictures | None:
        """Reader of images; None for a model that reads none."""
        return self._loaded.pictures

    def drop_weights(self) -> None:
        """Free their memory; `use` brings others."""
        del self.weights
        for parameter in self._loaded.whole.parameters():
            parameter.data = parameter.data.new_empty(0)

    def drop_cache(self) -> None:
        """Forget all samples."""
        del self._hidden, self._batches

    def make_cache(self) -> None:
        """An empty one."""
        self._hidden: dict[int, Tensor] = {}
        self._batches: list[Batch] = []
        self._routes: dict[int, list[np.ndarray]] = {}  # by slot, (T, L, K) int32 each, where experts are recorded

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[np.ndarray], slots: Sequence[Sequence[int]], starts: Sequence[int] = ()
    ) -> None:
        """Run each prompt once, for all the slots that start from it."""
        assert not any(starts), "no slot holds what a prompt begins with"
        self.retain({slot for batch in self._batches for slot in batch.slots}.difference(*slots))
        for prompt, targets in zip(prompts, slots, strict=True):
            cache = self._empty_cache()
            ids = torch.from_numpy(prompt)[None]
            seen = {} if self.pictures is None else self.pictures.inputs_of(ids)
            hidden = self._run(ids, cache, **seen)[0, -1]
            self._hidden |= dict.fromkeys(targets, hidden)
            routes = self._chosen()
            self._routes |= {slot: list(routes) for slot in targets}
            length = np.array([len(prompt)])
            shift = np.array([int(seen["position_ids"].max()) + 1 - len(prompt) if seen else 0])
            if self.deterministic:
                self._batches += [Batch([slot], deepcopy(cache), length, shift, len(prompt)) for slot in targets]
                continue
            cache.reorder_cache(torch.zeros(len(targets), dtype=torch.int64))
            lengths, shifts = (one.repeat(len(targets)) for one in (length, shift))
            self._join(Batch(list(targets), cache, lengths, shifts, len(prompt)))

    def start_from_prompt(self, slot: int, length: int, source: int | None = None) -> None:
        raise AssertionError("no slot holds a prompt for others")

    @torch.no_grad()
    def retain(self, slots: Collection[int]) -> None:
        """Forget the samples of other slots."""
        for batch in self._batches:
            rows = [row for row, slot in enumerate(batch.slots) if slot in slots]
            if rows and len(rows) < len(batch.slots):
                batch.cache.reorder_cache(torch.tensor(rows))
                batch.lengths, batch.shifts = batch.lengths[rows], batch.shifts[rows]
            batch.slots = [batch.slots[row] for row in rows]
        self._batches = [batch for batch in self._batches if batch.slots]
        for batch in self._batches:
            if (surplus := batch.columns - int(batch.lengths.max())) > 0:
                _cut(batch.cache, surplus)
                batch.columns -= surplus

    def move(self, source: int, target: int, length: int, num_held: int) -> None:
        """Make slot ``target`` what ``source`` is now."""
        self._hidden[target] = self._hidden.pop(source)
        self._routes[target] = self._routes.pop(source)
        for batch in self._batches:
            batch.slots = [target if slot == source else -1 if slot == target else slot for slot in batch.slots]

    def clear(self, slot: int) -> None:
        """Forget what is in a slot, NaN included."""
        self._hidden.pop(slot, None)
        for batch in self._batches:
            batch.slots = [-1 if other == slot else other for other in batch.slots]

    @torch.no_grad()
    def decode(self, tokens: np.ndarray, positions: np.ndarray, length: int) -> None:
        """Run one token for each sample that was retained, by slot: (B,) int64 both."""
        for batch in self._batches:
            rows = np.array(batch.slots)
            inputs: dict[str, Tensor] = {}
            if self._takes_positions:
                inputs["position_ids"] = torch.from_numpy(batch.lengths + batch.shifts)[:, None]
            # States alone have no columns, and would take the mask for one of this token.
            if (batch.lengths < batch.columns).any() and any(hasattr(layer, "keys") for layer in batch.cache.layers):
                first = torch.from_numpy(batch.columns - batch.lengths)[:, None]
                inputs["attention_mask"] = (torch.arange(batch.columns + 1)[None] >= first).long()
            assert (positions[rows] == batch.lengths).all(), "each sample has a token more than at the last step"
            hidden = self._run(torch.from_numpy(tokens[rows])[:, None], batch.cache, **inputs)[:, -1]
            batch.lengths, batch.columns = batch.lengths + 1, batch.columns + 1
            self._hidden |= dict(zip(batch.slots, hidden, strict=True))
            for routes in self._chosen():
                for row, slot in enumerate(batch.slots):
                    self._routes[slot].append(routes[row : row + 1])

    @torch.no_grad()
    def logits(self, rows: int, inverse_temperature: Tensor | None) -> Tensor:
        """(R, V) float32: logits / temperature of the first ``rows`` slots, as of the other model; a free one's are
        another's."""
        some = next(iter(self._hidden.values()))
        hidden = torch.stack([self._hidden.get(slot, some) for slot in range(rows)])
        if self.deterministic:  # a product of other rows may be rounded otherwise
            logits = torch.cat([self._logits_of(row[None]) for row in hidden])
        else:
            logits = self._logits_of(hidden)
        return logits if inverse_temperature is None else logits * inverse_temperature.to(logits.device)

    @torch.no_grad()
    def prompt_logprobs(self, prompt: np.ndarray, num_top: int = 0) -> tuple[list[float], list[Top]]:
        """log_softmax(logits) of each token of a prompt (T,) int64 but the first: T - 1 of them; and the num_top
        likeliest tokens at each of these places, none for 0. Touches no slot."""
        ids = torch.from_numpy(prompt)
        return prompt_scores(self._run(ids[None], self._empty_cache())[0], ids, self._logits_of, num_top)

    def records_routes(self) -> bool:
        """Record the experts of each token that is run from now on; False where no routers are known."""
        if self._routing is None:
            self._routing = routing_of(self._loaded.whole)
        return self._routing is not None

    def routes_of(self, slot: int) -> str:
        """Experts of the tokens that a slot holds, as of a completion."""
        return b64encode(np.concatenate(self._routes[slot]).tobytes()).decode()

    def _chosen(self) -> list[np.ndarray]:
        """Experts of the tokens that were run last, (R * T, L, K) int32; none where they are not recorded."""
        return [] if self._routing is None else [self._routing.chosen().numpy()]

    def _check(self) -> None:
        """Raise BadRequest where samples over the cache are not what the class computes of their whole texts."""
        name = type(self._loaded.whole).__name__
        texts = [np.arange(length) % len(self._loaded.head) for length in (6, 4)]
        try:
            self.prefill([text[:-1] for text in texts], [[0], [1]])
            last = np.array([text[-1] for text in texts])
            self.decode(last, np.array([len(text) - 1 for text in texts]), 0)
            with torch.no_grad():
                device = self._loaded.head.device
                whole = [self._loaded.hidden_of(input_ids=torch.from_numpy(text)[None].to(device), use_cache=False)
                         for text in texts]  # fmt: skip
        except (ValueError, RuntimeError, AttributeError, TypeError) as error:
            raise BadRequest(f"{name} cannot be sampled over its cache: {error}") from error
        largest = max(float(hidden.abs().max()) for hidden in whole)
        worst = max(float((self._hidden[slot] - hidden[0, -1]).abs().max()) for slot, hidden in enumerate(whole))
        if worst > CACHE_TOLERANCE[self._loaded.head.dtype] * largest:
            raise BadRequest(
                f"{name} computes other numbers over its cache, by {worst / largest:.1g} of the largest: set "
                "deterministic, which samples one by one, or sample it by another engine"
            )

    def _logits_of(self, hidden: Tensor) -> Tensor:
        """(N, W) -> (N, V) float32, filled up with -inf to a whole number of blocks."""
        logits = capped((hidden @ self._loaded.head.T).float(), self._loaded.cap)
        return pad(logits, (0, -logits.shape[1] % VOCABULARY_BLOCK), value=-torch.inf)

    def _empty_cache(self) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(config=self._loaded.whole.config)
        if unknown := {type(layer).__name__ for layer in cache.layers} - LAYERS:
            raise BadRequest(f"the cache of {type(self._loaded.whole).__name__} has layers unknown here: {unknown}")
        return cache

    def _run(self, ids: Tensor, cache: Any, **inputs: Tensor) -> Tensor:
        """(R, T) int64 -> (R, T, W), behind what the cache holds, which then holds these, too."""
        device = self._loaded.head.device
        moved = {name: tensor.to(device) for name, tensor in {"input_ids": ids, **inputs}.items()}
        return self._loaded.hidden_of(**moved, **{self._cache_name: cache}, use_cache=True)

    def _join(self, batch: Batch) -> None:
        """Decode a batch together with those that run."""
        if not self._batches:
            self._batches = [batch]
            return
        (running,) = self._batches
        for mine, other in zip(running.cache.layers, batch.cache.layers, strict=True):
            for name in ("keys", "values"):
                if (a := getattr(mine, name, None)) is not None and a.numel():
                    b = getattr(other, name)
                    longest = max(a.shape[-2], b.shape[-2])
                    setattr(mine, name, torch.cat([pad(t, (0, 0, longest - t.shape[-2], 0)) for t in (a, b)]))
            for name in STATES:
                for number, state in getattr(mine, name, {}).items():
                    if state is not None:
                        getattr(mine, name)[number] = torch.cat([state, getattr(other, name)[number]])
            if hasattr(mine, "cumulative_length"):
                mine.cumulative_length = max(mine.cumulative_length, other.cumulative_length)
        running.slots += batch.slots
        running.lengths = np.concatenate([running.lengths, batch.lengths])
        running.shifts = np.concatenate([running.shifts, batch.shifts])
        running.columns = max(running.columns, batch.columns)


def _cut(cache: Any, columns: int) -> None:
    """Forget the first columns of a cache, which no row has a token in."""
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is None or not keys.numel():
            continue
        kept = keys.shape[-2] - columns
        if hasattr(layer, "cumulative_length"):  # of a window
            layer.cumulative_length -= columns
            kept = min(layer.cumulative_length, layer.sliding_window - 1)
        first = keys.shape[-2] - kept
        layer.keys, layer.values = keys[..., first:, :], layer.values[..., first:, :]
