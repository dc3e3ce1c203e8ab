"""Packs rollouts into micro-batches without padding, a group's prompt once for all its responses. numpy only.

A micro-batch is one row of tokens: for each group its prompt, then its responses one after the other. A response sees
the prompt and itself, and its position ids continue the prompt's. So the numbers are those of the response alone.
The last token of a response is left out of the row: nothing is predicted from it.

Letters: T tokens of the row, G prompts, R responses, N tokens to score (every response token).
"""

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanodag.errors import ConfigError
from nanodag.rl.rollouts.rollout import Rollout, flatten_response

Ints = NDArray[np.int64]
DTYPES: dict[str, Any] = {"mask": np.bool_, "sampler_logprobs": np.float32, "routes": np.int32}  # of the others int64


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One row.

    token_ids, position_ids: (T,) int64. prompts: (G, 2) int64, start and length in the row. responses: (R, 3) int64,
    start, length in the row (one less than the response's tokens), number of its prompt. predictors: (N,) int64, the
    place in the row whose hidden state predicts the token. targets: (N,) int64. mask: (N,) bool, trained.
    sampler_logprobs: (N,) float32. sequence_ids: (N,) int64, 0 to R - 1. rollouts: (R,) int64, places in the list that
    was packed. routes: (T, E) int32, the experts of each token in all layers; (0,) where none are replayed.
    """

    token_ids: Ints
    position_ids: Ints
    prompts: Ints
    responses: Ints
    predictors: Ints
    targets: Ints
    mask: NDArray[np.bool_]
    sampler_logprobs: NDArray[np.float32]
    sequence_ids: Ints
    rollouts: Ints
    routes: NDArray[np.int32]


Piece = tuple[int, ...]
"""Rollouts of one group that share a row, by their places in the list that is packed."""


def pack(
    rollouts: Sequence[Rollout],
    *,
    budget_tokens: int,
    num_ranks: int = 1,
    rank: int = 0,
    shares_prompts: bool = True,
    replays_routes: bool = False,
) -> list[MicroBatch]:
    """The micro-batches of one rank: the same number for every rank, of nearly equal size, none above the budget.
    shares_prompts: else each response has a prompt of its own, as a model computes them that takes rows apart.
    replays_routes: rows have the experts of each rollout; prompts cannot be shared then.

    Where there is too little to share out, ranks get a repeated micro-batch with an all-False mask, which costs time
    but changes nothing. Rollouts without sampled tokens are left out. The result depends only on the rollouts and the
    numbers given; those of other ranks are not made. Raises ConfigError when one prompt with one response exceeds the
    budget, or routes to replay are missing.
    """
    pieces = _pieces(rollouts, budget_tokens, shares_prompts)
    while len(pieces) < num_ranks and any(len(piece) > 1 for piece in pieces):
        largest = max((piece for piece in pieces if len(piece) > 1), key=lambda piece: _row_size(rollouts, piece))
        middle = len(largest) // 2
        pieces = [*(piece for piece in pieces if piece is not largest), largest[:middle], largest[middle:]]
    if not pieces:
        raise ValueError("there is no rollout with a sampled token to pack")
    rows = _rows(rollouts, pieces, budget_tokens, num_ranks)
    sizes = [sum(_row_size(rollouts, piece) for piece in row) for row in rows]
    places = [*range(len(rows)), *[sizes.index(min(sizes))] * (-len(rows) % num_ranks)]
    # ranks work at the same time on rows of like size
    in_order = sorted(enumerate(places), key=lambda entry: sizes[entry[1]], reverse=True)
    own = [(number, _micro_batch(rollouts, rows[place], replays_routes)) for number, place in in_order[rank::num_ranks]]
    return [row if number < len(rows) else replace(row, mask=np.zeros_like(row.mask)) for number, row in own]


def _row_size(rollouts: Sequence[Rollout], indices: Sequence[int]) -> int:
    responses = (sum(len(span.token_ids) for span in rollouts[index].spans[1:]) - 1 for index in indices)
    return len(rollouts[indices[0]].prompt_token_ids) + sum(responses)


def _pieces(rollouts: Sequence[Rollout], budget: int, shares_prompts: bool) -> list[Piece]:
    """Each group as one piece, or as several with the prompt repeated where it exceeds the budget."""
    groups: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
    for index, rollout in enumerate(rollouts):
        if rollout.num_sampled:
            key = (rollout.group_id, rollout.prompt_token_ids, 0 if shares_prompts else index)
            groups.setdefault(key, []).append(index)
    pieces = []
    for members in groups.values():
        current: list[int] = []
        for index in members:
            if current and _row_size(rollouts, [*current, index]) > budget:
                pieces.append(tuple(current))
                current = []
            current.append(index)
            if (size := _row_size(rollouts, current)) > budget:
                raise ConfigError(
                    f"A rollout of prompt {rollouts[index].prompt_id} has {size} tokens, more than micro_batch_tokens "
                    f"{budget}. Raise micro_batch_tokens to at least {size}, or lower max_new_tokens."
                )
        pieces.append(tuple(current))
    return pieces


def _rows(rollouts: Sequence[Rollout], pieces: Sequence[Piece], budget: int, num_ranks: int) -> list[list[Piece]]:
    """The fewest rows that fit, a multiple of the ranks if possible; the largest piece first into the emptiest row."""
    size_of = {piece: _row_size(rollouts, piece) for piece in pieces}
    ordered = sorted(pieces, key=lambda piece: (-size_of[piece], piece))
    min_rows = max(1, -(-sum(size_of.values()) // budget))
    while True:
        num_rows = min(-(-min_rows // num_ranks) * num_ranks, len(pieces))
        rows: list[list[Piece]] = [[] for _ in range(num_rows)]
        sizes = [0] * num_rows
        for piece in ordered:
            emptiest = sizes.index(min(sizes))
            rows[emptiest].append(piece)
            sizes[emptiest] += size_of[piece]
        if max(sizes) <= budget:
            return rows
        min_rows = num_rows + 1


def _routes_of(rollout: Rollout, num_tokens: int) -> NDArray[np.int32]:
    """(T, E), of all its tokens but the last."""
    try:
        routes = np.frombuffer(b64decode(rollout.routed_experts), np.int32)
    except (TypeError, ValueError):  # no base64, or no whole numbers
        routes = np.empty(0, np.int32)
    if not len(routes) or len(routes) % num_tokens:
        raise ConfigError(
            f"A rollout of prompt {rollout.prompt_id} has {len(routes)} routed experts for {num_tokens} tokens. Start "
            "SGLang with --enable-return-routed-experts, make files with router_replay, or leave it out."
        )
    return routes.reshape(num_tokens, -1)


def _micro_batch(rollouts: Sequence[Rollout], pieces: Sequence[Piece], replays_routes: bool) -> MicroBatch:
    row: dict[str, list[Any]] = {column.name: [] for column in fields(MicroBatch)}
    token_ids = row["token_ids"]
    for number, piece in enumerate(pieces):
        prompt = rollouts[piece[0]].prompt_token_ids
        row["prompts"].append((len(token_ids), len(prompt)))
        prompt_end = len(token_ids) + len(prompt) - 1
        token_ids += prompt
        row["position_ids"] += range(len(prompt))
        for index in piece:
            response = flatten_response(rollouts[index])
            start, size = len(token_ids), len(response.token_ids)
            row["sequence_ids"] += [len(row["responses"])] * size
            row["responses"].append((start, size - 1, number))
            row["rollouts"].append(index)
            row["predictors"] += [prompt_end, *range(start, start + size - 1)]
            row["targets"] += response.token_ids
            row["mask"] += response.mask
            row["sampler_logprobs"] += response.logprobs
            token_ids += response.token_ids[:-1]
            row["position_ids"] += range(len(prompt), len(prompt) + size - 1)
            row["routes"].extend(_routes_of(rollouts[index], len(prompt) + size - 1) if replays_routes else ())
    return MicroBatch(**{name: np.array(values, DTYPES.get(name, np.int64)) for name, values in row.items()})
