"""Log-probabilities and losses straight from hidden states, without ever holding the logits of a whole batch.

Letters: N tokens, H hidden width, V vocabulary. The plain way, `log_softmax(hidden @ weight.T)`, holds several (N, V)
tensors in float32; with a vocabulary of 150,000 that is most of the memory of a step. Here the tokens are taken in
blocks of at most HEAD_BLOCK_BYTES of logits; on a CPU `head.c` walks over a block once, where torch takes seven walks.

Two ways, by what is known when:
- `cross_entropy_sum`: the gradient is known in the forward pass up to one factor, so it is computed there, block by
  block, and only (N, H) and (V, H) are kept.
- `selected_logprobs`: the gradient of each log-probability comes later, from any loss. When all tokens fit in one block
  the logits are kept, in the dtype of `hidden`; otherwise they are computed again in the backward pass.

Sums are float32 in either dtype; logits are rounded to the dtype of `hidden`, as in `transformers`.
"""

import ctypes
from ctypes import Structure, c_double, c_int64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nanodag.config.footprint import HEAD_BLOCK_BYTES
from nanodag.model.c_library import DTYPES, c_library, fields, on_threads
from nanodag.model.cpu_linear import times_transposed
from nanodag.model.transformers_class import capped

SOURCE = Path(__file__).with_name("head.c")
LANES = 16  # at most: how much longer a row's scratch is than V
IGNORED = -100
# Tokens that carry loss are taken in multiples of this. A CPU's matmul library compiles a kernel for each new shape and
# keeps it (5 MB for a bfloat16 head): a different number of tokens in every batch took 90 MB more at every step.
ROW_UNIT = 256


def selected_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature), and that distribution's entropy.

    hidden: (N, H) float32 or bfloat16. weight: (V, H), same dtype. targets: (N,) int64 in [0, V). Returns two (N,)
    float32 tensors, both differentiable. Natural logarithms. cap: logits become cap * tanh(logit / cap) first.
    """
    _check(hidden, weight, targets)
    if temperature <= 0.0:
        raise ValueError(f"temperature is {temperature}; it must be above 0. Greedy choices have no log-probability.")
    return _SelectedLogprobs.apply(hidden, weight, targets, temperature, cap)


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, places: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """Sum of -log softmax(hidden @ weight.T)[target] over the tokens whose target is not -100.

    hidden: (N, H) float32 or bfloat16. weight: (V, H), same dtype. targets: (N,) int64, -100 = no loss. places: of the
    others, int64, in order; without them the device is asked where they are, and waited for. Returns a float32 scalar;
    exactly 0 with zero gradients when no token carries loss. Tokens without loss cost nothing. cap: as above.
    """
    _check(hidden, weight, targets)
    rows = (targets != IGNORED).nonzero().squeeze(1) if places is None else places
    return _CrossEntropySum.apply(hidden, weight, targets, rows, cap)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"shapes do not fit: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets "
            f"{tuple(targets.shape)}; wanted (N, H), (V, H), (N,)"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; both must have the same dtype")


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # to tell what no loss looks at from zeros is to wait for the device
        num_tokens = hidden.shape[0]
        logsumexp = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        selected, entropies = torch.empty_like(logsumexp), torch.empty_like(logsumexp)
        blocks = _blocks(num_tokens, weight)
        logits = hidden.new_empty(0)
        for block in blocks:
            logits = capped(times_transposed(hidden[block], weight), cap)
            selected[block], logsumexp[block], entropies[block] = score(logits, targets[block], temperature)
        keep = len(blocks) == 1 and any(ctx.needs_input_grad)
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropies, logits if keep else None)
        ctx.temperature, ctx.cap = temperature, cap
        return selected - logsumexp, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, logsumexp, entropies, kept = ctx.saved_tensors
        d_logprobs = torch.zeros_like(logsumexp) if d_logprobs is None else d_logprobs
        gradients = _Gradients(hidden, weight, *ctx.needs_input_grad[:2])
        for block in _blocks(hidden.shape[0], weight):
            # The kept logits are not written over: the graph may be walked twice (retain_graph).
            logits = capped(times_transposed(hidden[block], weight), ctx.cap) if kept is None else kept
            d_logits = score_back(
                logits,
                targets[block],
                ctx.temperature,
                logsumexp=logsumexp[block],
                entropies=entropies[block],
                d_logprobs=d_logprobs[block],
                d_entropies=None if d_entropies is None else d_entropies[block],
            )
            gradients.add(block, _uncapped(d_logits, logits, ctx.cap))
        return *gradients.result(), None, None, None


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor, cap: float | None) -> Tensor:
        dense = rows.numel() == targets.numel()
        used, labels, is_real = (hidden, targets, None) if dense else _rounded_up(hidden, targets, rows)
        needs_gradient = any(ctx.needs_input_grad)
        gradients = _Gradients(used, weight, *ctx.needs_input_grad[:2])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for block in _blocks(used.shape[0], weight):
            logits = capped(times_transposed(used[block], weight), cap)
            before = logits if cap is None else logits.clone()
            of_block = losses(logits, labels[block], with_gradient=needs_gradient)
            total += (of_block if is_real is None else of_block * is_real[block]).sum()
            if needs_gradient:
                gradients.add(block, _uncapped(logits, before, cap))
        if needs_gradient:
            d_hidden, d_weight = gradients.result()
            if not dense and d_hidden is not None:
                d_hidden = torch.zeros_like(hidden).index_copy_(0, rows, d_hidden[: rows.numel()])
            ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if saved is None else saved * d_total.to(saved.dtype) for saved in ctx.saved_tensors)
        return *gradients, None, None, None


class _Gradients:
    """Gradients of hidden and weight, gathered block by block; that of the weight is summed in float32 over blocks."""

    def __init__(self, hidden: Tensor, weight: Tensor, hidden_wanted: bool, weight_wanted: bool) -> None:
        self._hidden, self._weight = hidden, weight
        self._d_hidden = torch.empty_like(hidden) if hidden_wanted else None
        self._weight_wanted = weight_wanted
        self._d_weight: Tensor | None = None

    def add(self, block: slice, d_logits: Tensor) -> None:
        if self._d_hidden is not None:
            self._d_hidden[block] = times_transposed(d_logits, self._weight.T)
        if self._weight_wanted:
            part = times_transposed(d_logits.T, self._hidden[block].T)
            self._d_weight = part if self._d_weight is None else self._d_weight.float().add_(part)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        if self._weight_wanted and self._d_weight is None:  # there was no token
            self._d_weight = torch.zeros_like(self._weight)
        return self._d_hidden, None if self._d_weight is None else self._d_weight.to(self._weight.dtype)


def _rounded_up(hidden: Tensor, targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen rows of both and as many zeros as ROW_UNIT asks for; and (M,) float32, 1 for a row that is real.

    What is added has no part in the weight's gradient, because its hidden state is 0.
    """
    count = rows.numel()
    padding = min(-count % ROW_UNIT, targets.numel() - count)
    used = functional.pad(hidden[rows], (0, 0, 0, padding))
    is_real = functional.pad(used.new_ones(count, dtype=torch.float32), (0, padding))
    return used, functional.pad(targets[rows], (0, padding)), is_real


def _blocks(num_tokens: int, weight: Tensor) -> list[slice]:
    size = max(1, HEAD_BLOCK_BYTES // (weight.shape[0] * weight.element_size()))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _uncapped(d_capped: Tensor, logits: Tensor, cap: float | None) -> Tensor:
    """The gradient before `capped`, by that after it. logits: capped."""
    return d_capped if cap is None else d_capped * (1 - (logits / cap).square())


def losses(logits: Tensor, targets: Tensor, *, with_gradient: bool) -> Tensor:
    """-log p of each target, (N,) float32; with_gradient: the logits (N, V) become its gradient."""
    if _is_own(logits):
        results = torch.empty(len(logits))
        _run("losses", logits, targets, 1.0, d_logits=logits if with_gradient else None, losses=results)
        return results
    scores = _scores(logits, 1.0)
    selected = scores.gather(1, targets[:, None])
    highest = scores.amax(1, keepdim=True)
    exponentials = scores.sub_(highest).exp_()
    sums = exponentials.sum(1, keepdim=True)
    if with_gradient:
        d_scores = exponentials.div_(sums)
        logits.copy_(d_scores.scatter_add_(1, targets[:, None], torch.full_like(sums, -1.0)))
    return (sums.log() + highest - selected).squeeze(1)


def score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Over the temperature: each target's logit, logsumexp, and entropy, (N,) float32 each."""
    if _is_own(logits):
        selected, logsumexp, entropies = torch.zeros(3, len(logits)).unbind()
        outputs = {"selected": selected, "logsumexp": logsumexp, "entropies": entropies}
        _run("score", logits, targets, temperature, **outputs)
        return selected, logsumexp, entropies
    scores = _scores(logits, temperature)
    selected = scores.gather(1, targets[:, None]).squeeze(1)
    highest = scores.amax(1, keepdim=True)
    shifted = scores.sub_(highest)
    exponentials = shifted.exp()
    sums = exponentials.sum(1)
    # H = log(sum) - E[shifted]
    entropies = sums.log() - exponentials.mul_(shifted).sum(1) / sums
    return selected, sums.log().add_(highest.squeeze(1)), entropies


def score_back(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    logsumexp: Tensor,
    entropies: Tensor,
    d_logprobs: Tensor,
    d_entropies: Tensor | None,
) -> Tensor:
    """The gradient of the logits (N, V), in their dtype, from those of log-probabilities and entropies."""
    if _is_own(logits):
        d_logits = torch.empty_like(logits)
        _run(
            "score_back",
            logits,
            targets,
            temperature,
            d_logits=d_logits,
            logsumexp=logsumexp,
            entropies=entropies,
            d_logprobs=d_logprobs.contiguous(),
            d_entropies=None if d_entropies is None else d_entropies.contiguous(),
        )
        return d_logits
    d_scores = _scores(logits, temperature).sub_(logsumexp[:, None])  # log-probabilities of every token
    if d_entropies is not None:
        probabilities = d_scores.exp()
        # dH/ds_j = -p_j (log p_j + H)
        d_scores = d_scores.add_(entropies[:, None]).mul_(-d_entropies[:, None])
        d_scores = d_scores.sub_(d_logprobs[:, None]).mul_(probabilities)
    else:
        d_scores = d_scores.exp_().mul_(-d_logprobs[:, None])
    d_scores.scatter_add_(1, targets[:, None], d_logprobs[:, None])
    if temperature != 1.0:
        d_scores.div_(temperature)
    return d_scores.to(logits.dtype)


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Likeliest token of each row of logits (N, V), the first of several, (N,) int64; and logsumexp, (N,) float32."""
    if not _is_own(logits):
        return logits.argmax(-1), logits.float().logsumexp(-1)
    places, logsumexp = torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))
    _run("likeliest", logits, places, 1.0, places=places, logsumexp=logsumexp)
    return places, logsumexp


def _is_own(logits: Tensor) -> bool:
    """True for logits that `head.c` takes."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES


def _scores(logits: Tensor, temperature: float) -> Tensor:
    """The logits over the temperature in a float32 tensor of its own, which may be written over."""
    scores = logits.to(torch.float32, copy=True)
    return scores if temperature == 1.0 else scores.div_(temperature)


class _Rows(Structure):
    _fields_ = [
        *fields(c_int64, "num_rows vocabulary is_bf16"),
        *fields(c_void_p, "logits d_logits targets"),
        ("temperature", c_double),
        *fields(c_void_p, "losses selected logsumexp entropies d_logprobs d_entropies places"),
    ]


def _run(function: str, logits: Tensor, targets: Tensor, temperature: float, **tensors: Tensor | None) -> None:
    kept = {"logits": logits, "targets": targets.contiguous(), **tensors}
    for name, tensor in kept.items():
        assert tensor is None or tensor.is_contiguous(), name
    num_rows, vocabulary = logits.shape
    places = targets.numpy()  # its bounds are no question to torch, which on other devices is one to wait for
    lowest, highest = (int(places.min()), int(places.max())) if num_rows else (0, 0)
    if lowest < 0 or highest >= vocabulary:  # C would read beyond the row
        raise IndexError(f"targets are from {lowest} to {highest}; the vocabulary has {vocabulary} tokens")
    addresses = {name: None if tensor is None else tensor.data_ptr() for name, tensor in kept.items()}
    is_bf16 = logits.dtype == torch.bfloat16
    rows = _Rows(num_rows=num_rows, vocabulary=vocabulary, is_bf16=is_bf16, temperature=temperature, **addresses)
    reference, call = ctypes.byref(rows), getattr(_library(), function)

    def work(thread: int, num_threads: int) -> None:
        scratch = torch.empty(vocabulary + LANES)
        bounds = (num_rows * place // num_threads for place in (thread, thread + 1))
        call(reference, *bounds, scratch.data_ptr())

    on_threads(work)


_NAMES, _TYPES = ("losses", "score", "score_back", "likeliest"), ([c_void_p, c_int64, c_int64, c_void_p], None)
_library = cache(partial(c_library, SOURCE, "the losses of training on a CPU", dict.fromkeys(_NAMES, _TYPES)))
