"""The forward pass of a decoder over a static key/value cache with one slot per running sample.

``prefill`` runs whole prompts and fills slots; ``decode`` runs one token for each of the first ``rows`` slots;
``logits`` turns what either left in ``hidden`` into scores. Decoding makes no views and allocates next to nothing: for
each pair (rows, length) the views of all buffers are made once and kept (``decode_views.py``).

On one CPU thread prompts and steps are calls of compiled code (``kernel.py``, ``steps.py``); the torch path below is
for every other device and shape and for sliding windows, and what the compiled one is checked against.

Deterministic mode. The compiled code sums in one order whatever runs beside. In torch, the bits for one slot must not
depend on which other slots are busy, on its own number, or on how far the cache is read for a longer neighbour. So
prompts are run one at a time; attention reads the cache in chunks of fixed size whose partial sums are added in order,
so that a chunk which is masked away adds exactly zero; and ``rows`` takes only values for which this machine's kernels
were seen to give the same bits in every row (``steps.py``).

Letters: B slots, R rows in use, L tokens of the cache that are read, C capacity of a slot, P prompts, T prompt tokens,
H hidden, Q query heads, K key/value heads, G = Q / K, D head, F intermediate, V vocabulary padded to a multiple of 64.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nanodag.inference.protocol import Top
from nanodag.model.architecture import Architecture, Rope
from nanodag.model.rope import rope_frequencies, rope_scale
from nanodag.sampler.decode_views import ATTENTION_CHUNK, Buffers, DecodeViews
from nanodag.sampler.drawing import likeliest
from nanodag.sampler.kernel import CACHE_BLOCK, Kernel, bind
from nanodag.sampler.weights import LayerWeights, NamedTensors, Weights

LOGIT_ROWS = 256  # scored at once: the whole prompt's logits would be large
NUM_CACHED_VIEWS = 128


class SamplerModel:
    """Weights, cache and buffers of one model. Not thread-safe: one thread at a time calls it.

    Matrices are bfloat16 where they are large, and so is the cache, whose reading bounds a step. Attention computes in
    float32 on a CPU; on a GPU it multiplies in the cache's precision and adds up in float32.
    """

    keeps_prompts = True  # a slot, its prompt, until another sample takes it
    weights: Weights
    buffers: Buffers
    kernel: Kernel | None

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        *,
        num_slots: int,
        capacity: int,
        deterministic: bool,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        """num_slots: B. capacity: C, tokens, a multiple of ATTENTION_CHUNK."""
        assert capacity % ATTENTION_CHUNK == 0, capacity
        self.architecture = architecture
        self.weights = weights
        self.num_slots = num_slots
        self.capacity = capacity
        self.deterministic = deterministic
        self.device = weights.head.device
        self._vocab_width, self._cache_dtype = weights.head.shape[1], cache_dtype
        self.rotations = _rotations(architecture.rope, architecture.head_dim, capacity).to(self.device)
        self._views: dict[tuple[int, int], DecodeViews] = {}
        self._score_scale = architecture.head_dim**-0.5
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
        self._views.clear()
        del self.buffers

    def make_cache(self) -> None:
        """An empty one."""
        self.buffers = Buffers(
            self.architecture, self.num_slots, self.capacity, self._vocab_width, self.device, self._cache_dtype
        )
        self._bind()

    def _bind(self) -> None:
        is_taken = self.is_whole and self.architecture.window is None  # the compiled code knows no window
        self.kernel = bind(self.architecture, self.weights, self.buffers, self.rotations) if is_taken else None

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
        starts = starts or [0] * len(prompts)
        is_copied = self.kernel is not None or any(starts)
        if self.kernel is not None:
            self.kernel.prefill(prompts, [targets[0] for targets in slots], starts)
        else:
            assert len(prompts) == 1 or not any(starts), starts
            self._prefill(prompts, [targets[:1] for targets in slots] if is_copied else slots, starts[0])
        for prompt, targets in zip(prompts, slots, strict=True):
            for slot in targets:
                self.start_from_prompt(slot, len(prompt), targets[0] if is_copied else None)

    def _prefill(self, prompts: Sequence[np.ndarray], slots: Sequence[Sequence[int]], start: int) -> None:
        a, rests = self.architecture, [prompt[start:] for prompt in prompts]
        longest = max(len(rest) for rest in rests)
        ids = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, rest in zip(ids, rests, strict=True):
            row[: len(rest)] = rest
        sources = [p for p, targets in enumerate(slots) for _ in targets]
        source_index = torch.tensor(sources, device=self.device)
        slot_index = torch.tensor([slot for targets in slots for slot in targets], device=self.device)
        last = torch.tensor([p * longest + len(rest) - 1 for p, rest in enumerate(rests)], device=self.device)
        x = self.weights.embed(torch.from_numpy(ids).to(self.device).view(-1))
        for index, layer in enumerate(self.weights.layers):
            caches = [
                cache[index].view(self.num_slots, a.num_kv_heads, self.capacity, a.head_dim)
                for cache in (self.buffers.keys, self.buffers.values)
            ]
            held = [cache[slot_index[:1], :, :start] for cache in caches] if start else []
            attended, *new = self._prefill_attention(index, x, len(prompts), longest, held)
            for cache, part in zip(caches, new, strict=True):
                cache[slot_index, :, start : start + longest] = part[source_index]
            if index == a.num_layers - 1:
                x, attended = x[last], attended[last]
            self._add_rest(layer, x, attended)
        self.buffers.prompt_hidden[slot_index] = x[source_index]

    def _prefill_attention(
        self, index: int, x: Tensor, num_prompts: int, length: int, held: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of the layer of this number: (P*T, H) -> output (P*T, Q*D), keys and values (P, K, T, D).
        held: keys and values (P, K, S, D) of the S tokens before, where there are some."""
        a, layer, window = self.architecture, self.weights.layers[index], self.architecture.window_of(index)
        group, start = a.heads_per_kv, held[0].shape[2] if held else 0
        qkv = _multiply(_normalised(x, a.norm_eps), layer.qkv, layer.qkv_bias)
        heads = qkv.view(num_prompts, length, a.num_kv_heads, group + 2, a.head_dim)
        rotated = heads[..., : group + 1, :]
        if layer.qk_gain is not None:
            scale = rotated.square().mean(-1, keepdim=True).add_(a.norm_eps).rsqrt_()
            rotated.mul_(scale).mul_(layer.qk_gain[: group + 1])
        if index not in a.unrotated_layers:
            pairs = torch.view_as_complex(rotated.unflatten(-1, (a.head_dim // 2, 2)))
            pairs.mul_(self.rotations[start : start + length, None, None])
        query = heads[..., :group, :].permute(0, 2, 3, 1, 4).reshape(num_prompts, a.num_heads, length, a.head_dim)
        key, value = heads[..., group, :].transpose(1, 2), heads[..., group + 1, :].transpose(1, 2)
        key, value = key.to(self.buffers.cache_dtype), value.to(self.buffers.cache_dtype)
        dtype = self.buffers.attention_dtype
        keys, values = (
            (torch.cat(parts, dim=2) for parts in zip(held, (key, value), strict=True)) if held else (key, value)
        )
        mask = None
        if held or (window is not None and window < length):
            mask = torch.ones(length, start + length, dtype=torch.bool, device=self.device).tril(start)
            mask = mask if window is None else mask.triu(start + 1 - window)
        attended = functional.scaled_dot_product_attention(
            query.to(dtype), keys.to(dtype), values.to(dtype), mask, is_causal=mask is None, enable_gqa=group > 1
        )
        return attended.transpose(1, 2).reshape(num_prompts * length, -1).float(), key, value

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
        logprobs: list[float] = []
        tops: list[Top] = []
        for before, targets in zip(x[:-1].split(LOGIT_ROWS), ids[1:].split(LOGIT_ROWS), strict=True):
            hidden = _normalised(before, a.norm_eps).mul_(self.weights.norm)
            logits = _multiply(hidden, self.weights.head)[:, : a.vocab_size]
            logprobs += (logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
            tops += likeliest(logits, num_top) if num_top else []
        return logprobs, tops

    @torch.inference_mode()
    def start_from_prompt(self, slot: int, length: int, source: int | None = None) -> None:
        """Set ``slot`` to the state right after its prompt of ``length`` tokens.

        source: the slot whose cache begins with that prompt; None when it is ``slot`` itself.
        """
        buffers, target = self.buffers, self._rows_of(slot)
        if source is not None and source != slot:
            self._copy_cache(source, slot, length)
            buffers.prompt_hidden[slot] = buffers.prompt_hidden[source]
        buffers.hidden[slot] = buffers.prompt_hidden[slot]
        buffers.mask[target, :length] = 0.0
        buffers.mask[target, length:] = -torch.inf

    def _copy_cache(self, source: int, target: int, length: int) -> None:
        """The first tokens of a slot, in whole blocks, in which the compiled code may have them in another order."""
        end = -(-length // CACHE_BLOCK) * CACHE_BLOCK
        for cache in (*self.buffers.keys, *self.buffers.values):
            cache[self._rows_of(target), :end] = cache[self._rows_of(source), :end]

    def _rows_of(self, slot: int) -> slice:
        """Rows of a slot, one for each key/value head, in the cache and the mask."""
        num_kv = self.architecture.num_kv_heads
        return slice(slot * num_kv, (slot + 1) * num_kv)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int, num_held: int) -> None:
        """Make slot ``target`` what ``source`` is now; ``length`` tokens of it are in the cache. ``source`` then holds
        the first ``num_held`` tokens that ``target`` held."""
        buffers, end = self.buffers, -(-num_held // CACHE_BLOCK) * CACHE_BLOCK
        held = [cache[self._rows_of(target), :end].clone() for cache in (*buffers.keys, *buffers.values)]
        self._copy_cache(source, target, length)
        for cache, part in zip((*buffers.keys, *buffers.values), held, strict=True):
            cache[self._rows_of(source), :end] = part
        buffers.mask[self._rows_of(target)] = buffers.mask[self._rows_of(source)]
        buffers.hidden[target] = buffers.hidden[source]
        buffers.prompt_hidden[[source, target]] = buffers.prompt_hidden[[target, source]]

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Forget what is in a slot, NaN included."""
        for cache in (*self.buffers.keys, *self.buffers.values):
            cache[self._rows_of(slot)] = 0.0
        self.buffers.hidden[slot] = 0.0
        self.buffers.prompt_hidden[slot] = 0.0

    def retain(self, slots: Collection[int]) -> None:
        """Nothing: a slot stays until another sample takes it."""

    @torch.inference_mode()
    def decode(self, tokens: np.ndarray, positions: np.ndarray, length: int) -> None:
        """Run one token for each of the first R slots: append to the cache, leave the last layer's output in hidden.

        tokens, positions: (R,) int64; positions[r] is where the token goes, below ``length``. length: L, the part of
        the cache that is read; all of a slot's tokens lie below it. Slots that are free are computed too: what they
        write lies behind their prompt and is masked.
        """
        v = self._views_of(len(tokens), length)
        v.tokens.copy_(torch.from_numpy(tokens))
        v.positions.copy_(torch.from_numpy(positions))
        v.x.copy_(self.weights.embed(v.tokens))
        torch.index_select(self.rotations, 0, v.positions, out=v.rotation_rows)
        v.rotation_heads.copy_(v.rotation_rows_expanded)
        torch.add(v.cache_base, v.positions_column, out=v.cache_index_rows)
        v.mask_flat.index_fill_(0, v.cache_index, 0.0)
        masks = v.mask_chunks if self.deterministic else [v.mask]
        windowed = masks if self.architecture.window is None else self._windowed(masks, v.positions)
        for index, layer in enumerate(self.weights.layers):
            is_windowed = self.architecture.window_of(index) is not None
            self._decode_attention(v, layer, index, windowed if is_windowed else masks)
            self._normalise(v)
            _multiply_into(v.gate_up, v.normed, layer.gate_up)
            torch.ops.aten.silu.out(v.gate, out=v.activated)
            v.activated.mul_(v.up)
            _add_product(v.x, v.activated, layer.down)

    def _windowed(self, masks: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
        """Masks (R*K, G, L each) of all tokens up to those at positions (R,), as windowed layers have them."""
        window, ends = self.architecture.window, np.cumsum([mask.shape[2] for mask in masks])
        assert window is not None
        first = (positions + 1 - window).repeat_interleave(self.architecture.num_kv_heads)[:, None, None]
        places = torch.arange(int(ends[-1]), device=self.device).tensor_split(torch.from_numpy(ends[:-1]))
        return [mask.masked_fill(at < first, -torch.inf) for mask, at in zip(masks, places, strict=True)]

    def _decode_attention(self, v: DecodeViews, layer: LayerWeights, index: int, masks: Sequence[Tensor]) -> None:
        """Add one layer's attention to v.x, and this token's key and value to the cache. masks: (R*K, G, L), of the
        tokens that are seen, for each chunk of the cache, or one for all of it."""
        self._normalise(v)
        _multiply_into(v.qkv, v.normed, layer.qkv)
        if layer.qkv_bias is not None:
            v.qkv.add_(layer.qkv_bias)
        if layer.qk_gain is not None:
            scale = torch.linalg.vector_norm(v.query_and_key, dim=-1, keepdim=True)
            torch.addcmul(self.buffers.epsilon, scale, scale, value=1 / self.architecture.head_dim, out=scale)
            torch.rsqrt(scale, out=v.qk_scale)  # the row of the value stays 1
            v.heads.mul_(v.head_scale).mul_(layer.qk_gain)
        if index not in self.architecture.unrotated_layers:
            v.pairs.mul_(v.rotation)
        dtype = self.buffers.attention_dtype
        v.key_rows[index].index_copy_(0, v.cache_index, v.key.to(self.buffers.cache_dtype))
        v.value_rows[index].index_copy_(0, v.cache_index, v.value.to(self.buffers.cache_dtype))
        if self.deterministic:
            self._attend_in_chunks(v, index, masks)
        elif dtype != torch.float32:
            query, keys, values, mask = (
                part.unsqueeze(1) for part in (v.query.to(dtype), v.keys[index], v.values[index], masks[0])
            )
            attended = functional.scaled_dot_product_attention(query, keys, values, mask, scale=self._score_scale)
            v.attended.copy_(attended.squeeze(1))
        else:
            torch.baddbmm(masks[0], v.query, v.keys_transposed[index].float(), alpha=self._score_scale, out=v.scores)
            torch.softmax(v.scores, -1, out=v.weights)
            torch.bmm(v.weights, v.values[index].float(), out=v.attended)
        _add_product(v.x, v.attended_rows, layer.output)
        if layer.output_bias is not None:
            v.x.add_(layer.output_bias)

    def _attend_in_chunks(self, v: DecodeViews, index: int, masks: Sequence[Tensor]) -> None:
        """Attention whose bits do not depend on how many masked chunks follow: they add exact zeros, in order."""
        keys, values = v.key_chunks[index], v.value_chunks[index]
        for chunk, scores in enumerate(v.score_chunks):
            torch.baddbmm(masks[chunk], v.query, keys[chunk].float(), alpha=self._score_scale, out=scores)
        v.chunked_scores.sub_(v.chunked_scores.amax(dim=(0, 3), keepdim=True)).exp_()
        sums = v.chunked_scores.sum(-1, keepdim=True)
        total = sums[0]
        torch.bmm(v.score_chunks[0], values[0].float(), out=v.attended)
        for chunk in range(1, len(v.score_chunks)):
            total += sums[chunk]
            v.attended.baddbmm_(v.score_chunks[chunk], values[chunk].float())
        v.attended.div_(total)

    def _normalise(self, v: DecodeViews, row_scale: Tensor | None = None) -> None:
        """v.normed = x / sqrt(|x|^2 + H eps), times ``row_scale`` (R, 1) where given; gains are folded into weights."""
        torch.linalg.vector_norm(v.x_and_epsilon, dim=-1, keepdim=True, out=v.scale)
        if row_scale is not None:
            v.scale.div_(row_scale)
        torch.div(v.x, v.scale, out=v.normed)

    @torch.inference_mode()
    def logits(self, rows: int, inverse_temperature: Tensor | None) -> Tensor:
        """(R, V) float32: logits / temperature of the first ``rows`` slots, from ``hidden``; padding is -inf.

        inverse_temperature: (R, 1) float32 on any device, None where all are 1. The result is a buffer that the next
        call overwrites.
        """
        v = self._views_of(rows, ATTENTION_CHUNK)
        self._normalise(v, None if inverse_temperature is None else inverse_temperature.to(self.device))
        v.normed.mul_(self.weights.norm)
        _multiply_into(v.logits, v.normed, self.weights.head)
        if v.logits_padding is not None:
            v.logits_padding.fill_(-torch.inf)
        return v.logits

    def _views_of(self, rows: int, length: int) -> DecodeViews:
        views = self._views.get((rows, length))
        if views is None:
            if len(self._views) >= NUM_CACHED_VIEWS:
                self._views.clear()
            views = DecodeViews(self.buffers, self.architecture, rows, length, in_chunks=self.deterministic)
            self._views[rows, length] = views
        return views


def _normalised(x: Tensor, eps: float) -> Tensor:
    """(N, H) -> x / sqrt(|x|^2 + H eps)."""
    return x * x.square().sum(-1, keepdim=True).add_(x.shape[-1] * eps).rsqrt_()


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """(N, in) float32, (in, out) of either dtype -> (N, out) float32, plus bias."""
    product = (x.to(matrix.dtype) @ matrix).float()
    return product if bias is None else product.add_(bias)


def _multiply_into(out: Tensor, x: Tensor, matrix: Tensor) -> None:
    """out = x @ matrix, float32 but for a bfloat16 matrix."""
    if matrix.dtype == torch.float32:
        torch.mm(x, matrix, out=out)
    else:
        out.copy_(torch.mm(x.to(matrix.dtype), matrix))


def _add_product(x: Tensor, y: Tensor, matrix: Tensor) -> None:
    """x += y @ matrix, float32 but for a bfloat16 matrix."""
    if matrix.dtype == torch.float32:
        x.addmm_(y, matrix)
    else:
        x.add_(torch.mm(y.to(matrix.dtype), matrix))


def _rotations(rope: Rope, head_dim: int, num_positions: int) -> Tensor:
    """(C, D/2) complex64: scale * e^(i * position * frequency), in float32 throughout, as transformers computes it."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * rope_frequencies(rope, head_dim)
    scale = rope_scale(rope)
    return torch.complex(angles.cos() * scale, angles.sin() * scale)
