"""Draw one token per row from scores, with random numbers that depend on the request alone.

No vocabulary-wide random numbers are drawn: a token is where one uniform number falls in the cumulative distribution.
That number comes from a counter-based generator keyed by (seed of the sample, number of the token). So the rest of the
batch has no influence on it. Rows are independent of one another in every operation here.

Letters: R rows, V vocabulary (a multiple of BLOCK), N = V / BLOCK.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nanodag.inference.protocol import Top

BLOCK = 64
LOGIT_ROWS = 256  # of a prompt, scored at once: all of its logits would be large
MAX_REDRAWS = 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TRY = np.uint64(0xD1B54A32D192ED03)


def mix(values: np.ndarray) -> np.ndarray:
    """Scramble (R,) uint64 bijectively. Source: SplitMix64's finalizer, doi:10.1145/2660193.2660195."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample_key(seed: int, sample: int) -> np.uint64:
    """The generator's key for sample number ``sample`` of a request with this seed (any integer, taken modulo 2^64)."""
    words = np.array([seed % (1 << 64), sample], dtype=np.uint64)
    return mix(mix(words[:1] + _GOLDEN) + words[1:] * _TRY)[0]


def uniforms(keys: np.ndarray, counts: np.ndarray, attempt: int = 0) -> np.ndarray:
    """(R,) float64 in [0, 1), a pure function of the key, the number of the token and the attempt. keys: (R,) uint64
    from ``sample_key``. counts: (R,) int64, tokens that the sample already has."""
    state = keys + (counts.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    if attempt:
        state = mix(state) + np.full_like(state, attempt) * _TRY
    return (mix(state) >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True, kw_only=True)
class DrawSettings:
    """Settings by which each of R rows is drawn, as arrays (R,); made again when a row changes hands, not at every
    token. ``temperature`` is 1 and the others are off (top_k 0, top_p 1) where greedy."""

    temperature: np.ndarray  # float32
    greedy: np.ndarray  # bool
    top_p: np.ndarray  # float64
    top_k: np.ndarray  # int64
    keys: np.ndarray  # uint64

    @cached_property
    def inverse_temperature(self) -> Tensor | None:
        """(R, 1) float32, or None where every temperature is 1."""
        if (self.temperature == 1.0).all():
            return None
        return torch.from_numpy(1.0 / self.temperature)[:, None]

    @cached_property
    def greedy_rows(self) -> np.ndarray:
        return np.flatnonzero(self.greedy)

    @cached_property
    def top_p_rows(self) -> np.ndarray:
        """Rows with top-p and no top-k; a row with both is drawn from its k tokens."""
        return np.flatnonzero((self.top_p < 1.0) & (self.top_k == 0))

    @cached_property
    def top_k_groups(self) -> list[tuple[int, np.ndarray]]:
        return [(int(k), np.flatnonzero(self.top_k == k)) for k in np.unique(self.top_k) if k > 0]

    @cached_property
    def cut_off(self) -> tuple[np.ndarray, "DrawSettings | None"]:
        """The rows with top-p or top-k, and the settings of these alone, None where there are none."""
        rows = np.flatnonzero((self.top_p < 1.0) | (self.top_k > 0))
        if not len(rows):
            return rows, None
        arrays = {name: getattr(self, name)[rows] for name in self.__dataclass_fields__}
        return rows, DrawSettings(**arrays)


def draw(scores: Tensor, settings: DrawSettings, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row.

    scores: (R, V) float32, logits / temperature; padding is -inf. Overwritten.
    counts: (R,) int64, tokens that each sample already has.
    Returns tokens (R,) int64 and their log-probabilities (R,) float64 under softmax(scores), before top-k and top-p.
    A row of NaN has a log-probability of NaN.

    top-k keeps the k most likely tokens; top-p keeps a token if those likelier than it hold less than top_p of what
    top-k left. Both as transformers' TopKLogitsWarper and TopPLogitsWarper in that order, except that tokens which tie
    at top-p's border are all kept.
    """
    greedy = settings.greedy_rows
    all_greedy = len(greedy) == len(scores)
    likeliest = _likeliest(scores, None if all_greedy else greedy) if len(greedy) else np.zeros(0, dtype=np.int64)
    probabilities = torch.softmax(scores, dim=-1, out=scores)
    if all_greedy:
        tokens, chosen = likeliest, _gather(probabilities, likeliest)
    else:
        cumulative = _cumulative(probabilities)
        tokens, chosen = _invert(probabilities, cumulative, uniforms(settings.keys, counts))
        if len(settings.top_p_rows):
            _redraw_outside_top_p(probabilities, cumulative, tokens, chosen, settings, counts)
        for k, rows in settings.top_k_groups:
            uniform = uniforms(settings.keys[rows], counts[rows])
            tokens[rows] = _draw_sorted(probabilities, rows, k, settings.top_p[rows], uniform)
        if len(greedy):
            tokens[greedy] = likeliest
        if len(greedy) or settings.top_k_groups:
            chosen = _gather(probabilities, tokens)
    with np.errstate(invalid="ignore"):
        return tokens, np.log(np.minimum(chosen, 1.0))  # a softmax may round to a hair above 1


def likeliest(scores: Tensor, count: int) -> list[Top]:
    """For each row of (R, V) float32 scores its `count` best tokens with log_softmax(scores), the best first."""
    values, tokens = torch.log_softmax(scores, dim=-1).topk(min(count, scores.shape[1]), dim=-1)
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    # Padding is -inf, and comes last.
    return [[(token, value) for token, value in zip(*row, strict=True) if value > -math.inf] for row in pairs]


def prompt_scores(
    hidden: Tensor, ids: Tensor, logits_of: Callable[[Tensor], Tensor], num_top: int
) -> tuple[list[float], list[Top]]:
    """log_softmax(logits) of each token of a prompt but the first, and the num_top likeliest ones at each of these
    places, none for 0. hidden: (T, W), of each of its tokens ids (T,)."""
    logprobs: list[float] = []
    tops: list[Top] = []
    targets = ids[1:].to(hidden.device)
    for part, chosen in zip(hidden[:-1].split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        logits = logits_of(part)
        logprobs += (logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
        tops += likeliest(logits, num_top) if num_top else []
    return logprobs, tops


def _likeliest(scores: Tensor, rows: np.ndarray | None) -> np.ndarray:
    """(S,) int64: the best token of some rows, or of all."""
    chosen = scores if rows is None else scores[torch.from_numpy(rows).to(scores.device)]
    # Several times faster than argmax on a CPU.
    return chosen.max(dim=-1).indices.cpu().numpy()


def _gather(probabilities: Tensor, tokens: np.ndarray) -> np.ndarray:
    """(R, V), (R,) -> (R,) float64."""
    index = torch.from_numpy(tokens).to(probabilities.device)
    return probabilities.gather(1, index[:, None])[:, 0].double().cpu().numpy()


def _block_sums(probabilities: Tensor) -> np.ndarray:
    """(R, V) float32 -> (R, N) float32: sums of BLOCK neighbours."""
    rows, width = probabilities.shape
    return probabilities.view(rows, width // BLOCK, BLOCK).sum(-1).cpu().numpy()


def _cumulative(probabilities: Tensor) -> np.ndarray:
    """(R, V) -> (R, N + 1) float64: what lies before each block, and at last the sum."""
    sums = _block_sums(probabilities)
    cumulative = np.zeros((sums.shape[0], sums.shape[1] + 1))
    np.cumsum(sums, axis=1, dtype=np.float64, out=cumulative[:, 1:])
    return cumulative


def _invert(probabilities: Tensor, cumulative: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The token in whose interval of the cumulative distribution the uniform number falls.

    probabilities: (R, V), not negative, of any positive sum. cumulative: (R, N + 1). uniform: (R,) float64.
    Returns tokens (R,) int64, never one of probability 0, and their probabilities (R,) float64.
    """
    rows = np.arange(len(cumulative))
    num_blocks = cumulative.shape[1] - 1
    target = uniform * cumulative[:, -1]
    block = _first_beyond(cumulative[:, 1:], target)
    index = torch.from_numpy(rows * num_blocks + block).to(probabilities.device)
    values = probabilities.view(-1, BLOCK).index_select(0, index).cpu().numpy()
    inside = np.cumsum(values, axis=1, dtype=np.float64)
    offset = _first_beyond(inside, target - cumulative[rows, block])
    return block * BLOCK + offset, values[rows, offset].astype(np.float64)


def _first_beyond(cumulative: np.ndarray, target: np.ndarray) -> np.ndarray:
    """(R, W) ascending, (R,) -> (R,) int64: the first column beyond the target.

    Such a column is larger than the one before it, so it adds something: what has probability 0 is never found. A
    target that rounding has put at or beyond the last column is pulled in.
    """
    target = np.minimum(target, cumulative[:, -1] * (1.0 - 2.0**-52))
    return np.minimum((cumulative <= target[:, None]).sum(axis=1), cumulative.shape[1] - 1)


def _redraw_outside_top_p(
    probabilities: Tensor,
    cumulative: np.ndarray,
    tokens: np.ndarray,
    chosen: np.ndarray,
    settings: DrawSettings,
    counts: np.ndarray,
) -> None:
    """Replace in ``tokens`` and ``chosen`` what lies outside top-p, by drawing again.

    A token is inside if those likelier than it sum to less than top_p. Drawing until one is inside gives exactly the
    distribution restricted to top-p, in 1 / top_p tries on average and without sorting the vocabulary; a row that is
    out of luck MAX_REDRAWS times, which a small top_p makes likely, is sorted after all.
    """
    pending = settings.top_p_rows
    for attempt in range(1, MAX_REDRAWS + 2):
        candidates = probabilities[torch.from_numpy(pending).to(probabilities.device)]
        limit = torch.from_numpy(chosen[pending].astype(np.float32)).to(probabilities.device)[:, None]
        likelier = _block_sums(torch.where(candidates > limit, candidates, 0.0)).sum(axis=1, dtype=np.float64)
        pending = pending[likelier / cumulative[pending, -1] >= settings.top_p[pending]]
        if not len(pending):
            return
        uniform = uniforms(settings.keys[pending], counts[pending], attempt)
        if attempt > MAX_REDRAWS:
            width = probabilities.shape[1]
            tokens[pending] = _draw_sorted(probabilities, pending, width, settings.top_p[pending], uniform)
            chosen[pending] = _gather(probabilities, tokens)[pending]
        else:
            candidates = probabilities[torch.from_numpy(pending).to(probabilities.device)]
            tokens[pending], chosen[pending] = _invert(candidates, cumulative[pending], uniform)


def _draw_sorted(probabilities: Tensor, rows: np.ndarray, k: int, top_p: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Tokens for some rows, each drawn from its ``k`` likeliest tokens and of those from inside its top_p. rows (S,)
    int64, top_p (S,) float64, uniform (S,) float64 -> (S,) int64."""
    candidates = probabilities[torch.from_numpy(rows).to(probabilities.device)]
    values, indices = candidates.topk(min(k, probabilities.shape[1]), dim=-1)
    kept = values.cpu().numpy().astype(np.float64)
    before = np.cumsum(kept, axis=1) - kept
    cumulative = np.cumsum(np.where(before < top_p[:, None] * kept.sum(axis=1, keepdims=True), kept, 0.0), axis=1)
    place = _first_beyond(cumulative, uniform * cumulative[:, -1])
    return indices.cpu().numpy()[np.arange(len(rows)), place]
