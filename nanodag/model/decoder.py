"""The decoder that is trained, of the types in architecture.py, with the parameter names of transformers.

Letters: B rows, T tokens a row, W width, D head width, V vocabulary, Q tokens whose last hidden states are asked for.

Why not the classes of transformers: their layer is two dozen small operations with a Python call each, and their loss
holds all logits. Here a layer is two pure functions of tensors (nanodag.model.layer) around the attention, so that
- each is compiled once and serves every layer (its weights are arguments, not attributes), or is our own code;
- ZeRO-3 can gather a layer's weights when the layer is called, compiled or not;
- any attention can stand between them (nanodag.model.attention.Attend).
Names and arithmetic agree with transformers, so a checkpoint of one is a checkpoint of the other.
"""

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nanodag.model.architecture import Architecture
from nanodag.model.attention import Attend, document_attention
from nanodag.model.head import IGNORED, cross_entropy_sum, selected_logprobs
from nanodag.model.layer import Functions, rms_norm
from nanodag.model.rope import rope_frequencies, rope_scale
from nanodag.model.transformers_class import capped

Want = Literal["loss", "logprobs", "all_logprobs", "logits", "hidden"]


class Norm(nn.RMSNorm):
    """Holds a weight of RMSNorm. Called, as the last one is, so that ZeRO-3 gathers it; rounds as transformers does."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Holds the attention's weights."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.q_proj = nn.Linear(of.hidden_size, of.num_heads * of.head_dim, bias=of.qkv_bias)
        self.k_proj = nn.Linear(of.hidden_size, of.num_kv_heads * of.head_dim, bias=of.qkv_bias)
        self.v_proj = nn.Linear(of.hidden_size, of.num_kv_heads * of.head_dim, bias=of.qkv_bias)
        self.o_proj = nn.Linear(of.num_heads * of.head_dim, of.hidden_size, bias=of.output_bias)
        if of.qk_norm:
            self.q_norm, self.k_norm = Norm(of.head_dim, of.norm_eps), Norm(of.head_dim, of.norm_eps)


class MLP(nn.Module):
    """Holds the inner weights."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(of.hidden_size, of.intermediate_size, bias=False)
        self.up_proj = nn.Linear(of.hidden_size, of.intermediate_size, bias=False)
        self.down_proj = nn.Linear(of.intermediate_size, of.hidden_size, bias=False)


class Layer(nn.Module):
    """One decoder layer. It computes on all its weights at once, so ZeRO-3 must gather all (a leaf module)."""

    def __init__(self, of: Architecture, functions: Functions, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.input_layernorm = Norm(of.hidden_size, of.norm_eps)
        self.post_attention_layernorm = Norm(of.hidden_size, of.norm_eps)
        self.self_attn, self.mlp = SelfAttention(of), MLP(of)
        self._functions, self._of = functions, of

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, places: Tensor | None = None) -> Tensor:
        """x (B, T, W), cos and sin (B, T, 1, D / 2) -> (B, T, W). places: (Q,) of one row, to which it is computed
        alone: (1, Q, W). Then attend takes a query of these."""
        attention, mlp = self.self_attn, self.mlp
        rows: tuple[int, ...] = x.shape[:2]
        projected = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = None if attention.q_proj.bias is None else tuple(p.bias for p in projected)
        qk_norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
        weights = tuple(p.weight for p in projected)
        flat, cos, sin = x.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1)
        flat, query, key, value = self._functions.before(
            flat, cos, sin, self.input_layernorm.weight, weights, biases, qk_norms, of=self._of, places=places
        )
        key, value = key.unflatten(0, rows), value.unflatten(0, rows)
        rows = rows if places is None else (1, len(places))
        attended = attend(query.unflatten(0, rows), key, value, self.window)
        del query, key, value
        out = self._functions.after(
            flat,
            attended.flatten(2).flatten(0, 1),
            attention.o_proj.weight,
            attention.o_proj.bias,
            self.post_attention_layernorm.weight,
            mlp.gate_proj.weight,
            mlp.up_proj.weight,
            mlp.down_proj.weight,
            of=self._of,
        )
        return out.unflatten(0, rows)


class Head(nn.Module):
    """The output head. Its weight, (V, W), is used inside `forward` only: there ZeRO-3 has gathered it. cap: of the
    logits, as cap * tanh(logit / cap)."""

    def __init__(self, weight: nn.Parameter, cap: float | None = None) -> None:
        super().__init__()
        self.weight, self.cap = weight, cap

    def forward(
        self, hidden: Tensor, targets: Tensor | None, want: Want, temperature: float, places: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if want == "logits":
            return capped(functional.linear(hidden, self.weight), self.cap)
        assert targets is not None
        flat, labels = hidden.flatten(0, 1), targets.flatten()
        if want == "loss":
            return cross_entropy_sum(flat, self.weight, labels, places=places, cap=self.cap)
        if want == "logprobs":
            chosen = (labels != IGNORED).nonzero().squeeze(1)
            flat, labels = flat.index_select(0, chosen), labels[chosen]
        return selected_logprobs(flat, self.weight, labels, temperature=temperature, cap=self.cap)


class Body(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, of: Architecture, functions: Functions) -> None:
        super().__init__()
        empty = torch.empty(of.vocab_size, of.hidden_size)  # not drawn: on `meta` torch would import sympy for it
        self.embed_tokens = nn.Embedding(of.vocab_size, of.hidden_size, _weight=empty)
        self.layers = nn.ModuleList(Layer(of, functions, of.window_of(number)) for number in range(of.num_layers))
        self.norm = Norm(of.hidden_size, of.norm_eps)


class Decoder(nn.Module):
    """A causal language model on packed rows. leaf_modules: classes whose weights ZeRO-3 gathers all at once.

    compiled: compile the layer (seconds at the first step, cached on disk between runs): by Triton on CUDA, on a CPU by
    g++ where our own code does not take it.
    activation_checkpointing: keep only a layer's input and compute the layer again in the backward pass.
    """

    def __init__(self, of: Architecture, *, compiled: bool = False, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.architecture, self.leaf_modules = of, (Layer,)
        self.functions = Functions(compiled=compiled)
        self.activation_checkpointing = activation_checkpointing
        self.model = Body(of, self.functions)
        tied = cast(nn.Parameter, self.model.embed_tokens.weight)
        self.lm_head = Head(tied if of.tied else nn.Parameter(torch.empty(of.vocab_size, of.hidden_size)))
        self._frequencies = rope_frequencies(of.rope, of.head_dim)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        want: Want = "loss",
        temperature: float = 1.0,
        attend: Attend | None = None,
        attend_last: Attend | None = None,
        places: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input_ids, position_ids, document_ids, targets: (B, T) integers as in a data batch; targets -100 = no loss.
        attend: instead of document_ids, which are read back from their device, any attention. places: (N,) int64, where
        the flattened targets are not -100, for the loss; without them the device is asked. attend_last: the last
        layer's, where it is computed at places (Q,) int64 of one row alone, for `hidden`.

        Returns by want: `loss`, the float32 sum of -log p(target); `logprobs`, log p(target) at the temperature and the
        entropy, two (N,) float32 over the places with a target, row by row; `all_logprobs`, the same where every place
        has one, without looking, for which a GPU must be waited for; `logits`, (B, T, V); `hidden`, (B, T, W),
        what the head is given.
        """
        x = self.model.embed_tokens(input_ids)
        if attend is None:
            assert document_ids is not None
            attend = document_attention(document_ids.cpu().numpy())
        layers, turns = list(self.model.layers), self._turns(position_ids, x.dtype)
        for layer, turn in list(zip(layers, turns, strict=True))[: -1 if attend_last else None]:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, *turn, attend, use_reentrant=False)
            else:
                x = layer(x, *turn, attend)
        if attend_last is not None:
            x = layers[-1](x, *turns[-1], attend_last, places)
        x = self.model.norm(x)
        return x if want == "hidden" else self.lm_head(x, targets, want, temperature, places)

    def checkpoint(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of a checkpoint, of whole parameters by name: the names agree, and a tied head is left out."""
        is_tied = self.architecture.tied
        return {name: tensor for name, tensor in weights.items() if not (is_tied and name == "lm_head.weight")}

    def _turns(self, position_ids: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines of each layer, (B, T, 1, D / 2): those of positions, or of no turn."""
        of, self._frequencies = self.architecture, self._frequencies.to(position_ids.device)
        angles, scale = position_ids[..., None, None].float() * self._frequencies, rope_scale(of.rope)
        rotated = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
        still = (torch.ones_like(rotated[0]), torch.zeros_like(rotated[0])) if of.unrotated_layers else rotated
        return [still if number in of.unrotated_layers else rotated for number in range(of.num_layers)]
