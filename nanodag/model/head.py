"""Log-probabilities and losses straight from hidden states, without ever holding the logits of a whole batch.

Letters: N tokens, H hidden width, V vocabulary. The plain way, `log_softmax(hidden @ weight.T)`, holds several (N, V)
tensors in float32; with a vocabulary of 150,000 that is most of the memory of a step. Here the tokens are taken in
blocks of at most `block_bytes` of logits; on a CPU our own code walks over a block once (nanodag.model.cpu_head).

Two ways, by what is known when:
- `cross_entropy_sum`: the gradient is known in the forward pass up to one factor, so it is computed there, block by
  block, and only (N, H) and (V, H) are kept.
- `selected_logprobs`: the gradient of each log-probability comes later, from any loss. When all tokens fit in one block
  the logits are kept, in the dtype of `hidden`; otherwise they are computed again in the backward pass.

Sums are float32 in either dtype; logits are rounded to the dtype of `hidden`, as in `transformers`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nanodag.config.footprint import HEAD_BLOCK_BYTES
from nanodag.model import cpu_head
from nanodag.model.cpu_linear import times_transposed

CHUNK_ELEMENTS = 1 << 18  # on a CPU in float64
IGNORED = -100
# Tokens that carry loss are taken in multiples of this. A CPU's matmul library compiles a kernel for each new shape and
# keeps it (5 MB for a bfloat16 head): a different number of tokens in every batch took 90 MB more at every step.
ROW_UNIT = 256


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    block_bytes: int = HEAD_BLOCK_BYTES,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature), and that distribution's entropy.

    hidden: (N, H) float32 or bfloat16. weight: (V, H), same dtype. targets: (N,) int64 in [0, V). Returns two (N,)
    float32 tensors, both differentiable; the entropy is all zeros when `with_entropy` is False. Natural logarithms.
    """
    _check(hidden, weight, targets)
    if temperature <= 0.0:
        raise ValueError(f"temperature is {temperature}; it must be above 0. Greedy choices have no log-probability.")
    return _SelectedLogprobs.apply(hidden, weight, targets, temperature, block_bytes, with_entropy)


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    places: Tensor | None = None,
    block_bytes: int = HEAD_BLOCK_BYTES,
) -> Tensor:
    """Sum of -log softmax(hidden @ weight.T)[target] over the tokens whose target is not -100.

    hidden: (N, H) float32 or bfloat16. weight: (V, H), same dtype. targets: (N,) int64, -100 = no loss. places: of the
    others, int64, in order; without them the device is asked where they are, and waited for. Returns a float32 scalar;
    exactly 0 with zero gradients when no token carries loss. Tokens without loss cost nothing.
    """
    _check(hidden, weight, targets)
    rows = (targets != IGNORED).nonzero().squeeze(1) if places is None else places
    return _CrossEntropySum.apply(hidden, weight, targets, rows, block_bytes)


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
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, block_bytes: int, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # to tell what no loss looks at from zeros is to wait for the device
        num_tokens = hidden.shape[0]
        logsumexp = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        selected = torch.empty_like(logsumexp)
        entropies = torch.zeros_like(logsumexp)
        blocks = _blocks(num_tokens, weight, block_bytes)
        logits = hidden.new_empty(0)
        for block in blocks:
            logits = times_transposed(hidden[block], weight)
            if cpu_head.can_score(logits):
                found = cpu_head.score(logits, targets[block], temperature, with_entropy=entropy)
                selected[block], logsumexp[block], entropies[block] = found
                continue
            for chunk in _chunks(block, weight):
                scores = _scores(logits, block, chunk, temperature)
                selected[chunk] = scores.gather(1, targets[chunk, None]).squeeze(1)
                logsumexp[chunk], entropies[chunk] = _normaliser(scores, entropy)
        keep = len(blocks) == 1 and any(ctx.needs_input_grad)
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropies, logits if keep else None)
        ctx.temperature, ctx.block_bytes, ctx.entropy = temperature, block_bytes, entropy
        return selected - logsumexp, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, logsumexp, entropies, kept = ctx.saved_tensors
        d_logprobs = torch.zeros_like(logsumexp) if d_logprobs is None else d_logprobs
        gradients = _Gradients(hidden, weight, *ctx.needs_input_grad[:2])
        for block in _blocks(hidden.shape[0], weight, ctx.block_bytes):
            # The kept logits are not written over: the graph may be walked twice (retain_graph).
            logits = times_transposed(hidden[block], weight) if kept is None else kept
            if cpu_head.can_score(logits):
                d_logits = cpu_head.score_back(
                    logits,
                    targets[block],
                    ctx.temperature,
                    logsumexp=logsumexp[block],
                    entropies=entropies[block],
                    d_logprobs=d_logprobs[block],
                    d_entropies=d_entropies[block] if ctx.entropy and d_entropies is not None else None,
                )
                gradients.add(block, d_logits)
                continue
            d_logits = torch.empty_like(logits)
            for chunk in _chunks(block, weight):
                scores = _scores(logits, block, chunk, ctx.temperature)
                d_scores = scores.sub_(logsumexp[chunk, None])  # log-probabilities of every token
                if ctx.entropy and d_entropies is not None:
                    probabilities = d_scores.exp()
                    # dH/ds_j = -p_j (log p_j + H)
                    d_scores = d_scores.add_(entropies[chunk, None]).mul_(-d_entropies[chunk, None])
                    d_scores = d_scores.sub_(d_logprobs[chunk, None]).mul_(probabilities)
                else:
                    d_scores = d_scores.exp_().mul_(-d_logprobs[chunk, None])
                d_scores.scatter_add_(1, targets[chunk, None], d_logprobs[chunk, None])
                if ctx.temperature != 1.0:
                    d_scores.div_(ctx.temperature)
                d_logits[_within(block, chunk)] = d_scores
            gradients.add(block, d_logits)
        return *gradients.result(), None, None, None, None


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor, block_bytes: int) -> Tensor:
        dense = rows.numel() == targets.numel()
        used, labels, is_real = (hidden, targets, None) if dense else _rounded_up(hidden, targets, rows)
        needs_gradient = any(ctx.needs_input_grad)
        gradients = _Gradients(used, weight, *ctx.needs_input_grad[:2])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for block in _blocks(used.shape[0], weight, block_bytes):
            logits = times_transposed(used[block], weight)
            if cpu_head.can_score(logits):
                losses = cpu_head.losses(logits, labels[block], with_gradient=needs_gradient)
                total += (losses if is_real is None else losses * is_real[block, 0]).sum()
                if needs_gradient:
                    gradients.add(block, logits)
                continue
            for chunk in _chunks(block, weight):
                scores = _scores(logits, block, chunk, 1.0)
                selected = scores.gather(1, labels[chunk, None])
                highest = scores.amax(1, keepdim=True)
                exponentials = scores.sub_(highest).exp_()
                sums = exponentials.sum(1, keepdim=True)
                losses = sums.log() + highest - selected
                total += (losses if is_real is None else losses * is_real[chunk]).sum()
                if needs_gradient:
                    d_scores = exponentials.div_(sums)
                    d_scores.scatter_add_(1, labels[chunk, None], torch.full_like(sums, -1.0))
                    logits[_within(block, chunk)] = d_scores  # the logits are not needed again
            if needs_gradient:
                gradients.add(block, logits)
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
    """The chosen rows of both and as many zeros as ROW_UNIT asks for; and (M, 1) float32, 1 for a row that is real.

    What is added has no part in the weight's gradient, because its hidden state is 0.
    """
    count = rows.numel()
    padding = min(-count % ROW_UNIT, targets.numel() - count)
    used = functional.pad(hidden[rows], (0, 0, 0, padding))
    is_real = functional.pad(used.new_ones((count, 1), dtype=torch.float32), (0, 0, 0, padding))
    return used, functional.pad(targets[rows], (0, padding)), is_real


def _blocks(num_tokens: int, weight: Tensor, block_bytes: int) -> list[slice]:
    size = max(1, block_bytes // (weight.shape[0] * weight.element_size()))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _chunks(block: slice, weight: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // weight.shape[0]) if weight.device.type == "cpu" else block.stop - block.start
    for start in range(block.start, block.stop, size):
        yield slice(start, min(start + size, block.stop))


def _within(block: slice, chunk: slice) -> slice:
    return slice(chunk.start - block.start, chunk.stop - block.start)


def _scores(logits: Tensor, block: slice, chunk: slice, temperature: float) -> Tensor:
    """The chunk's logits over the temperature in a float32 tensor of its own, which may be written over."""
    scores = logits[_within(block, chunk)].to(torch.float32, copy=True)
    return scores if temperature == 1.0 else scores.div_(temperature)


def _normaliser(scores: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """log(sum(exp(scores))) and the entropy (or 0) of each row; writes over `scores`."""
    highest = scores.amax(1, keepdim=True)
    if not with_entropy:
        return scores.sub_(highest).exp_().sum(1).log_().add_(highest.squeeze(1)), torch.zeros_like(highest).squeeze(1)
    shifted = scores.sub_(highest)
    exponentials = shifted.exp()
    sums = exponentials.sum(1)
    # H = log(sum) - E[shifted]
    entropy = sums.log() - exponentials.mul_(shifted).sum(1) / sums
    return sums.log().add_(highest.squeeze(1)), entropy
