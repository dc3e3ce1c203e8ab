"""Weights in the layout that decoding wants, read from a Hugging Face folder.

Four departures from the checkpoint's layout, none of which changes what is computed:
1. Matrices are stored (in, out) and contiguous: ``x @ w`` on 1 to 64 rows is then up to a third faster.
2. Query, key and value are one matrix, as are gate and up. Its columns run by key/value head: that head's query heads,
   its key, its value; so one view splits them all, and no copy is made per layer.
3. Within a query or key head the two halves that RoPE rotates into each other are interleaved (0, D/2, 1, D/2+1, ...),
   which makes the rotation one complex multiplication. Scores are sums over the head and do not see the order.
4. The gain of an RMS norm, times sqrt(H), is folded into the matrix that follows: the norm is then x / |x|, two calls
   instead of five. The last norm's gain stays apart, because a tied embedding shares the matrix after it.

In bfloat16 a matrix is kept and multiplied in bfloat16 if it is large enough to gain by it; a smaller one is rounded to
bfloat16 and kept in float32. Activations are float32 between matrices.

Letters: V vocabulary (padded to a multiple of 64 columns), H hidden, Q query heads, K key/value heads, G = Q / K,
D head, F intermediate.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanodag.errors import BadRequest
from nanodag.model.architecture import Architecture
from nanodag.model.headers import weight_files

VOCABULARY_BLOCK = 64
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# A bfloat16 matmul of torch on a CPU costs some 18 us whatever its size; below this many elements float32 is faster.
MIN_BFLOAT16_ELEMENTS = 1 << 16
TURNED_ELEMENTS = 1 << 17
"""Elements of a matrix that are put into the layout at once: half a MiB of float32."""


@dataclass(kw_only=True)
class LayerWeights:
    """One decoder layer. Biases and the query/key gain are None where the model has none."""

    qkv: Tensor  # (H, K*(G+2)*D)
    qkv_bias: Tensor | None  # (K*(G+2)*D,)
    qk_gain: Tensor | None  # (G+2, D); the row of the value is ones
    output: Tensor  # (Q*D, H)
    output_bias: Tensor | None  # (H,)
    gate_up: Tensor  # (H, 2F)
    down: Tensor  # (F, H)


class NamedTensors:
    """A model's tensors by names, in one fixed order. Of a class of transformers its parameters, in the precision in
    which they compute; read from a folder also the buffers that are saved with them."""

    adapters: Any = None  # the AdapterBuilder that made them

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def named(self) -> dict[str, Tensor]:
        return self._tensors

    def tensors(self) -> list[Tensor]:
        return list(self.named().values())

    def sums(self) -> list[int]:
        """Sum of each tensor's bits, read as integers: what changes one of them changes its sum."""
        return [int(_as_integers(tensor).sum(dtype=torch.int64)) for tensor in self.tensors()]

    def differing(self, other: "NamedTensors") -> list[str]:
        """Names of the tensors that are not equal to the last bit."""
        theirs = other.named()
        return [name for name, ours in self.named().items() if name in theirs and not torch.equal(ours, theirs[name])]


@dataclass(kw_only=True)
class Weights(NamedTensors):
    """A whole model. ``embedding`` is None where it is tied: then tokens are columns of ``head``, kept once. Vectors
    are float32; matrices float32 or bfloat16, each for itself."""

    embedding: Tensor | None  # (V, H)
    layers: list[LayerWeights]
    norm: Tensor  # (H,), times sqrt(H)
    head: Tensor  # (H, V)

    def embed(self, token_ids: Tensor) -> Tensor:
        """(N,) int64 -> (N, H) float32, a new tensor."""
        if self.embedding is None:
            return self.head.index_select(1, token_ids).t().float().contiguous()
        return self.embedding.index_select(0, token_ids).float()

    def named(self) -> dict[str, Tensor]:
        """The tensors by the fields of these classes, in one fixed order."""
        layers = {
            f"layers.{n}.{name}": tensor for n, layer in enumerate(self.layers) for name, tensor in vars(layer).items()
        }
        tensors = {"embedding": self.embedding, **layers, "norm": self.norm, "head": self.head}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _as_integers(tensor: Tensor) -> Tensor:
    """A view; 8 bytes each where they go in, which is summed up fifty times as fast as 2."""
    flat = tensor.view(-1)
    narrow = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[tensor.dtype]
    return flat.view(torch.int64 if flat.nbytes % 8 == 0 and flat.data_ptr() % 8 == 0 else narrow)


def load_weights(path: Path, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read every tensor of the checkpoint in ``path``, rounded to ``dtype``. Raises BadRequest: no safetensors file, a
    file that cannot be read, and as ``WeightsBuilder`` does."""
    builder = WeightsBuilder(architecture, dtype, device, source=f"the checkpoint in {path}")
    builder.add(read_tensors(path))
    return builder.whole()


@dataclass(eq=False)
class WeightsBuilder:
    """Makes weights of a checkpoint's tensors, rounded to ``dtype``, as they come: a layer as soon as its tensors are
    there, which are then let go. So a model is held once beside what has come of the layer under way.

    source: where they are from, for messages. has_bias: whether a layer has biases of query, key and value, and of the
    output, so that it is known when a layer is whole.
    """

    architecture: Architecture
    dtype: torch.dtype
    device: torch.device
    _: KW_ONLY
    source: str
    has_bias: tuple[bool, bool] = (False, False)
    _raw: dict[str, Tensor] = field(default_factory=dict, init=False)
    _taken: set[str] = field(default_factory=set, init=False)
    _layers: dict[int, LayerWeights] = field(default_factory=dict, init=False)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """More of them, in any order. Raises BadRequest: a tensor that came before, has another shape, or holds NaN or
        infinity."""
        if twice := sorted(tensors.keys() & (self._raw.keys() | self._taken)):
            raise BadRequest(f"{twice[0]!r} in {self.source} came twice")
        self._raw.update(tensors)
        for index in {int(match[1]) for match in map(_OF_LAYER.match, tensors) if match}:
            names = [f"model.layers.{index}.{name}" for name in _layer_names(self.architecture, *self.has_bias)]
            if index < self.architecture.num_layers and all(name in self._raw for name in names):
                self._build(index)

    def whole(self) -> Weights:
        """Finish the weights. Raises BadRequest: a tensor that is missing, has another shape, holds NaN or infinity, or
        that this architecture has no place for."""
        a = self.architecture
        for index in range(a.num_layers):
            if index not in self._layers:
                self._build(index)
        padding = -a.vocab_size % VOCABULARY_BLOCK
        embedding, shape = "model.embed_tokens.weight", (a.vocab_size, a.hidden_size)
        norm = self._take("model.norm.weight", (a.hidden_size,)) * a.hidden_size**0.5
        weights = Weights(
            embedding=None if a.tied else _stored(self._take(embedding, shape), self.dtype),
            layers=[self._layers[index] for index in range(a.num_layers)],
            norm=norm,
            head=self._turned([embedding if a.tied else "lm_head.weight"], shape, padding=padding),
        )
        known = self._taken | {"lm_head.weight"} if a.tied else self._taken
        # Old Llama checkpoints carry the rotary frequencies, which follow from the config.
        left = [name for name in self._raw if name not in known and not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise BadRequest(f"the sampler has no place for {sorted(left)[:5]} ({len(left)} tensors) of {self.source}")
        return weights

    def _build(self, index: int) -> None:
        prefix = f"model.layers.{index}."
        self._layers[index] = self._layer(prefix)
        for name in self._taken & self._raw.keys():
            if name.startswith(prefix):
                del self._raw[name]

    def _layer(self, prefix: str) -> LayerWeights:
        a, take = self.architecture, self._take
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q_width, kv_width = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        widths = {"q": q_width, "k": kv_width, "v": kv_width}
        projections = [take(f"{attention}{n}_proj.weight", (width, a.hidden_size)) for n, width in widths.items()]
        has_bias, has_output_bias = (f"{attention}{n}_proj.bias" in self._raw for n in "qo")
        biases = [take(f"{attention}{n}_proj.bias", (width,)) for n, width in widths.items()] if has_bias else None
        norm = take(prefix + "input_layernorm.weight", (a.hidden_size,))
        mlp_norm = take(prefix + "post_attention_layernorm.weight", (a.hidden_size,))
        gate_and_up = [f"{mlp}{name}_proj.weight" for name in ("gate", "up")]
        # The gain folded in: it takes x / |x| where the checkpoint's takes gain * x / rms(x).
        qkv = (_fuse_heads(projections, a) * (norm * a.hidden_size**0.5)).t()
        return LayerWeights(
            qkv=_stored(qkv, self.dtype),
            qkv_bias=_fuse_heads(biases, a) if biases else None,
            qk_gain=self._qk_gain(attention) if a.qk_norm else None,
            output=self._turned([attention + "o_proj.weight"], (a.hidden_size, q_width)),
            output_bias=take(attention + "o_proj.bias", (a.hidden_size,)) if has_output_bias else None,
            gate_up=self._turned(gate_and_up, (a.intermediate_size, a.hidden_size), gain=mlp_norm),
            down=self._turned([mlp + "down_proj.weight"], (a.hidden_size, a.intermediate_size)),
        )

    def _qk_gain(self, attention: str) -> Tensor:
        """(G+2, D): the gain of each query head, of the key, and ones for the value."""
        a = self.architecture
        query, key = (self._take(f"{attention}{n}_norm.weight", (a.head_dim,))[_interleaved(a.head_dim)] for n in "qk")
        return torch.stack([query] * a.heads_per_kv + [key, torch.ones_like(key)])

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, rounded to dtype, in float32."""
        # A copy, never a view of the mapped file: its owner may replace or delete it.
        return self._rounded(name, self._checked(name, shape)).clone()

    def _turned(
        self, names: Sequence[str], shape: tuple[int, int], *, gain: Tensor | None = None, padding: int = 0
    ) -> Tensor:
        """Matrices (out, in) of one shape, one under the other and then `padding` rows of zeros, as (in, all of out)
        in the dtype that it is multiplied in; with the gain (in,) of the norm before it folded in.

        Block by block, so that a model of gigabytes is read and written once: what lies between stays in the cache.
        """
        rows, depth = shape
        out = torch.zeros if padding else torch.empty
        width = len(names) * rows + padding
        whole = out(depth, width, dtype=_kept_dtype(depth * width, self.dtype), device=self.device)
        size = max(TURNED_ELEMENTS // depth // 64, 1) * 64
        for place, name in enumerate(names):
            raw = self._checked(name, shape)
            for begin in range(0, rows, size):
                block = self._rounded(name, raw[begin : begin + size])
                if gain is not None:
                    block = (block * (gain * depth**0.5)).to(self.dtype)
                at = place * rows + begin
                whole[:, at : at + len(block)] = block.to(whole.dtype).t().contiguous()
        return whole

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._raw:
            raise BadRequest(f"{self.source} has no tensor {name!r}")
        tensor = self._raw[name]
        if tuple(tensor.shape) != shape:
            raise BadRequest(
                f"{name!r} in {self.source} has shape {tuple(tensor.shape)}; its config.json implies {shape}"
            )
        self._taken.add(name)
        return tensor

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        """Rounded to dtype, in float32; may be the tensor itself."""
        tensor = tensor.to(device=self.device, dtype=self.dtype).to(torch.float32)
        check_finite(name, tensor, self.source)
        return tensor


def check_finite(name: str, tensor: Tensor, source: str) -> None:
    """Raise BadRequest for a tensor that holds NaN or infinity."""
    # Their sum is finite unless one is not, or they are huge.
    if not math.isfinite(tensor.sum().item()) and not tensor.isfinite().all():
        raise BadRequest(f"{name!r} in {source} holds NaN or infinity")


def _layer_names(a: Architecture, has_qkv_bias: bool, has_output_bias: bool) -> list[str]:
    """Names of a layer's tensors, without its prefix."""
    names = [f"self_attn.{n}_proj.weight" for n in "qkvo"] + [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    names += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names += [f"self_attn.{n}_norm.weight" for n in "qk" if a.qk_norm]
    names += [f"self_attn.{n}_proj.bias" for n in "qkv" if has_qkv_bias]
    return names + ["self_attn.o_proj.bias"] * has_output_bias


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint in ``path``, by name. Raises BadRequest if it cannot be read."""
    tensors: dict[str, Tensor] = {}
    for file_path in weight_files(path):
        try:
            with safe_open(file_path, framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise BadRequest(f"{file_path} cannot be read: {error}") from error
    return tensors


def _stored(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """(in, out) float32 -> contiguous, in the dtype that it will be multiplied in."""
    return matrix.to(dtype).to(_kept_dtype(matrix.numel(), dtype)).contiguous()


def _kept_dtype(num_elements: int, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if num_elements < MIN_BFLOAT16_ELEMENTS else dtype


def _interleaved(head_dim: int) -> Tensor:
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)


def _fuse_heads(parts: Sequence[Tensor], a: Architecture) -> Tensor:
    """Query (Q*D, ...), key (K*D, ...) and value (K*D, ...) -> (K*(G+2)*D, ...), grouped by key/value head, interleaved
    for rotation."""
    query, key, value = parts
    order = _interleaved(a.head_dim)
    rest = query.shape[1:]
    heads = query.view(a.num_kv_heads, a.heads_per_kv, a.head_dim, *rest)[:, :, order]
    keys = key.view(a.num_kv_heads, 1, a.head_dim, *rest)[:, :, order]
    values = value.view(a.num_kv_heads, 1, a.head_dim, *rest)
    return torch.cat([heads, keys, values], dim=1).reshape(a.qkv_width, *rest)
