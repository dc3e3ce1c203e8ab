"""The forward pass of a decoder over a static key/value cache with one slot per running sample.

``prefill`` runs whole prompts and fills slots; ``decode`` runs one token for each of the first ``rows`` slots;
``logits`` turns what either left in ``hidden`` into scores.

On one CPU thread prompts and steps are calls of compiled code (``kernel.py``, ``steps.py``); the torch path below is
for every other device and shape, and what the compiled one is checked against.

Deterministic mode. The compiled code sums in one order whatever runs beside. A library's product picks its kernel by
the shape, so in torch prompts are run one at a time, and so are rows, each over as much of the cache as it has.

Letters: B slots, R rows in use, L tokens of the cache that are read, C capacity of a slot, P prompts, T prompt tokens,
H hidden, Q query heads, K key/value heads, G = Q / K, D head, F intermediate, V vocabulary padded to a multiple of 64.
"""

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nanodag.inference.cache_size import slot_tokens
from nanodag.inference.protocol import Top
from nanodag.model.architecture import Architecture
from nanodag.model.rope import rope_frequencies, rope_scale
from nanodag.sampler.drawing import prompt_scores
from nanodag.sampler.kernel import CACHE_BLOCK, Buffers, Kernel, bind
from nanodag.sampler.weights import LayerWeights, NamedTensors, Weights


@dataclass(eq=False)
class SamplerModel:
    """Weights, cache and buffers of one model. Not thread-safe: one thread at a time calls it. Matrices are bfloat16
    where they are large, and so is the cache, whose reading bounds a step. Attention computes in float32 on a CPU; on a
    GPU it multiplies in the cache's precision and adds up in float32. num_slots: B. capacity: C, tokens."""

    keeps_prompts = True  # a slot, its prompt, until another sample takes it
    architecture: Architecture
    weights: Weights
    _: KW_ONLY
    num_slots: int
    capacity: int
    deterministic: bool
    cache_dtype: torch.dtype
    buffers: Buffers = field(init=False)
    kernel: Kernel | None = field(init=False)

    def __post_init__(self) -> None:
        self.device, a = self.weights.head.device, self.architecture
        # In float32 throughout, as transformers computes it.
        angles = torch.arange(self.capacity, dtype=torch.float32)[:, None] * rope_frequencies(a.rope, a.head_dim)
        scale = rope_scale(a.rope)
        self.rotations = torch.complex(angles.cos() * scale, angles.sin() * scale).to(self.device)
        self.make_cache()

    def use(self, weights: NamedTensors) -> None:
        """Compute with these from now on; they belong to the model then."""
        assert isinstance(weights, Weights)
        was_here = hasattr(self, "weights")
        self.weights = weights
        if self.kernel is not None:
            self.kernel.use(weights)
        elif not was_here:
            self._bind()

    @property
    def is_whole(self) -> bool:
        """True with weights and a cache; without either it computes nothing."""
        return hasattr(self, "weights") and hasattr(self, "buffers")

    def drop_weights(self) -> None:
        """Free their memory; `use` brings others."""
        self.kernel = None
        del self.weights

    def drop_cache(self) -> None:
        """Free the memory of the cache and of what decoding works in."""
        self.kernel = None
        del self.buffers

    def make_cache(self) -> None:
        """An empty one."""
        self.buffers = Buffers(self.architecture, self.num_slots, self.capacity, self.device, self.cache_dtype)
        self._bind()

    def _bind(self) -> None:
        made = (self.architecture, self.weights, self.buffers, self.rotations) if self.is_whole else None
        self.kernel = None if made is None else bind(*made)

    @property
    def extends_prompts(self) -> bool:
        """True where a prompt may be run behind what a slot holds of it. In deterministic mode only where compiled:
        torch rounds a prompt in pieces otherwise than at once."""
        return self.kernel is not None or not self.deterministic

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[np.ndarray], slots: Sequence[Sequence[int]], starts: Sequence[int] = ()
    ) -> None:
        """Run each prompt once and write its keys, values and last hidden state to each of its slots.

        prompts: P arrays (T_p,) int64, padded here to the longest; padding lies to the right, where causal attention
        does not see it. slots: for each prompt, the slots that start from it. starts: for each prompt, how many of its
        tokens the first of its slots holds already, which are not run again; () for none. Where torch runs it, a prompt
        of which something is held comes alone.
        """
        starts, firsts = starts or [0] * len(prompts), [targets[0] for targets in slots]
        if self.kernel is not None:
            self.kernel.prefill(prompts, firsts, starts)
        else:
            assert len(prompts) == 1 or not any(starts), starts
            self._prefill(prompts, firsts, starts[0])
        for prompt, targets in zip(prompts, slots, strict=True):
            for slot in targets:
                self.start_from_prompt(slot, len(prompt), targets[0])

    def _prefill(self, prompts: Sequence[np.ndarray], slots: Sequence[int], start: int) -> None:
        a, rests = self.architecture, [prompt[start:] for prompt in prompts]
        longest = max(len(rest) for rest in rests)
        ids = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, rest in zip(ids, rests, strict=True):
            row[: len(rest)] = rest
        slot_index = torch.tensor(slots, device=self.device)
        last = torch.tensor([p * longest + len(rest) - 1 for p, rest in enumerate(rests)], device=self.device)
        x = self.weights.embed(torch.from_numpy(ids).to(self.device).view(-1))
        for index, layer in enumerate(self.weights.layers):
            caches = [cache[index] for cache in (self.buffers.keys, self.buffers.values)]
            held = [cache[slot_index, :, :start] for cache in caches] if start else []
            attended, *new = self._prefill_attention(index, x, len(prompts), longest, held)
            for cache, part in zip(caches, new, strict=True):
                cache[slot_index, :, start : start + longest] = part
            if index == a.num_layers - 1:
                x, attended = x[last], attended[last]
            self._add_rest(layer, x, attended)
        self.buffers.prompt_hidden[slot_index] = x

    def _prefill_attention(
        self, index: int, x: Tensor, num_prompts: int, length: int, held: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of the layer of this number: (P*T, H) -> output (P*T, Q*D), keys and values (P, K, T, D).
        held: keys and values (P, K, S, D) of the S tokens before, where there are some."""
        window, start = self.architecture.window_of(index), held[0].shape[2] if held else 0
        rotations = self.rotations[start : start + length].expand(num_prompts, -1, -1)
        query, key, value = self._heads(index, x, rotations)
        keys, values = (torch.cat([held[0], key], 2), torch.cat([held[1], value], 2)) if held else (key, value)
        mask = None
        if held or (window is not None and window < length):
            mask = torch.ones(length, start + length, dtype=torch.bool, device=self.device).tril(start)
            mask = mask if window is None else mask.triu(start + 1 - window)
        keys, values, is_grouped = keys.to(query.dtype), values.to(query.dtype), self.architecture.heads_per_kv > 1
        attended = functional.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=mask is None, enable_gqa=is_grouped
        )
        return attended.transpose(1, 2).reshape(num_prompts * length, -1).float(), key, value

    def _heads(self, index: int, x: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the layer of this number: (N, H), and (P, T, D/2) of the tokens' places -> query
        (P, Q, T, D) as it is multiplied, key and value (P, K, T, D) as the cache holds them."""
        a, layer, (num_rows, length) = self.architecture, self.weights.layers[index], rotations.shape[:2]
        group = a.heads_per_kv
        qkv = _multiply(_normalised(x, a.norm_eps), layer.qkv, layer.qkv_bias)
        heads = qkv.view(num_rows, length, a.num_kv_heads, group + 2, a.head_dim)
        rotated = heads[..., : group + 1, :]
        if layer.qk_gain is not None:
            scale = rotated.square().mean(-1, keepdim=True).add_(a.norm_eps).rsqrt_()
            rotated.mul_(scale).mul_(layer.qk_gain[: group + 1])
        if index not in a.unrotated_layers:
            torch.view_as_complex(rotated.unflatten(-1, (a.head_dim // 2, 2))).mul_(rotations[:, :, None, None])
        query = heads[..., :group, :].permute(0, 2, 3, 1, 4).reshape(num_rows, a.num_heads, length, a.head_dim)
        key, value = (heads[..., group + n, :].transpose(1, 2).to(self.buffers.cache_dtype) for n in (0, 1))
        return query if self.device.type == "cpu" else query.to(key.dtype), key, value

    def _add_rest(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> None:
        """Add the rest of a layer, after its attention, to x (N, H)."""
        x += _multiply(attended, layer.output, layer.output_bias)
        gate, up = _multiply(_normalised(x, self.architecture.norm_eps), layer.gate_up).chunk(2, dim=-1)
        x += _multiply(functional.silu(gate).mul_(up), layer.down)

    @torch.inference_mode()
    def prompt_logprobs(self, prompt: np.ndarray, num_top: int = 0) -> tuple[list[float], list[Top]]:
        """log_softmax(logits) of each token of a prompt (T,) int64 but the first: T - 1 of them; and the num_top
        likeliest tokens at each of these places, none for 0. Touches no slot."""
        a, ids = self.architecture, torch.from_numpy(prompt).to(self.device)
        x = self.weights.embed(ids)
        for index, layer in enumerate(self.weights.layers):
            attended, _, _ = self._prefill_attention(index, x, 1, len(prompt))
            self._add_rest(layer, x, attended)
        return prompt_scores(x, ids, lambda hidden: self._scores_of(hidden)[:, : a.vocab_size], num_top)

    def _scores_of(self, hidden: Tensor, inverse_temperature: Tensor | None = None) -> Tensor:
        """(N, H) -> (N, V) float32."""
        normed = _normalised(hidden, self.architecture.norm_eps).mul_(self.weights.norm)
        if inverse_temperature is not None:
            normed.mul_(inverse_temperature.to(self.device))
        return _multiply(normed, self.weights.head)

    @torch.inference_mode()
    def start_from_prompt(self, slot: int, length: int, source: int | None = None) -> None:
        """Set ``slot`` to the state right after its prompt of ``length`` tokens. source: the slot whose cache begins
        with that prompt; None when it is ``slot`` itself."""
        buffers = self.buffers
        if source is not None and source != slot:
            self._copy_cache(source, slot, length)
            buffers.prompt_hidden[slot] = buffers.prompt_hidden[source]
        buffers.hidden[slot] = buffers.prompt_hidden[slot]

    def _copy_cache(self, source: int, target: int, length: int) -> None:
        """The first tokens of a slot, in whole blocks, in which the compiled code may have them in another order."""
        end = -(-length // CACHE_BLOCK) * CACHE_BLOCK
        for cache in (*self.buffers.keys, *self.buffers.values):
            cache[target, :, :end] = cache[source, :, :end]

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int, num_held: int) -> None:
        """Make slot ``target`` what ``source`` is now; ``length`` tokens of it are in the cache. ``source`` then holds
        the first ``num_held`` tokens that ``target`` held."""
        buffers, end = self.buffers, -(-num_held // CACHE_BLOCK) * CACHE_BLOCK
        held = [cache[target, :, :end].clone() for cache in (*buffers.keys, *buffers.values)]
        self._copy_cache(source, target, length)
        for cache, part in zip((*buffers.keys, *buffers.values), held, strict=True):
            cache[source, :, :end] = part
        buffers.hidden[target] = buffers.hidden[source]
        buffers.prompt_hidden[[source, target]] = buffers.prompt_hidden[[target, source]]

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Forget what is in a slot, NaN included."""
        for tensor in (*self.buffers.keys, *self.buffers.values, self.buffers.hidden, self.buffers.prompt_hidden):
            tensor[slot] = 0.0

    def retain(self, slots: Collection[int]) -> None:
        """Nothing: a slot stays until another sample takes it."""

    @torch.inference_mode()
    def decode(self, tokens: np.ndarray, positions: np.ndarray, length: int) -> None:
        """Run one token for each of the first R slots: append to the cache, leave the last layer's output in hidden.

        tokens, positions: (R,) int64; positions[r] is where the token goes, below ``length``. length: L, the part of
        the cache that is read; all of a slot's tokens lie below it. Slots that are free are computed too: what they
        write lies behind their prompt and is masked.
        """
        for rows in self._apart(len(tokens)):
            own = slot_tokens(int(positions[rows][0]) + 1) if self.deterministic else length
            self._decode(rows, tokens[rows], positions[rows], own)

    def _apart(self, num_rows: int) -> list[slice]:
        """The first rows, as they are computed: all together, but one by one in deterministic mode."""
        return [slice(row, row + 1) for row in range(num_rows)] if self.deterministic else [slice(0, num_rows)]

    def _decode(self, rows: slice, tokens: np.ndarray, positions: np.ndarray, length: int) -> None:
        a, window = self.architecture, self.architecture.window
        ids, at = (torch.from_numpy(array).to(self.device) for array in (tokens, positions))
        places = torch.arange(length, device=self.device)
        slots = torch.arange(rows.start, rows.stop, device=self.device)
        seen = (places <= at[:, None])[:, None, None]
        within = seen if window is None else seen & (places > at[:, None] - window)[:, None, None]
        x, rotations = self.weights.embed(ids), self.rotations[at][:, None]
        for index, layer in enumerate(self.weights.layers):
            query, *new = self._heads(index, x, rotations)
            caches = [cache[index] for cache in (self.buffers.keys, self.buffers.values)]
            for cache, part in zip(caches, new, strict=True):
                cache[slots, :, at] = part[:, :, 0]
            # The queries of one key/value head are rows of one product.
            query = query.view(len(x), a.num_kv_heads, a.heads_per_kv, a.head_dim)
            keys, values = (cache[rows, :, :length].to(query.dtype) for cache in caches)
            mask = seen if a.window_of(index) is None else within
            attended = functional.scaled_dot_product_attention(query, keys, values, mask)
            self._add_rest(layer, x, attended.reshape(len(x), -1).float())
        self.buffers.hidden[rows] = x

    @torch.no_grad()  # whoever draws overwrites them
    def logits(self, rows: int, inverse_temperature: Tensor | None) -> Tensor:
        """(R, V) float32: logits / temperature of the first ``rows`` slots, from ``hidden``; padding is -inf.
        inverse_temperature: (R, 1) float32 on any device, None where all are 1."""
        inverse = torch.ones(rows, 1) if inverse_temperature is None else inverse_temperature
        logits = torch.cat([self._scores_of(self.buffers.hidden[part], inverse[part]) for part in self._apart(rows)])
        logits[:, self.architecture.vocab_size :] = -torch.inf
        return logits


def _normalised(x: Tensor, eps: float) -> Tensor:
    """(N, H) -> x / sqrt(|x|^2 + H eps)."""
    return x * x.square().sum(-1, keepdim=True).add_(x.shape[-1] * eps).rsqrt_()


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """(N, in) float32, (in, out) of either dtype -> (N, out) float32, plus bias."""
    product = (x.to(matrix.dtype) @ matrix).float()
    return product if bias is None else product.add_(bias)
