"""Packing: pieces of token sequences into rows of equal length, best fit, with little waste.

At each position a piece has one input token, the token to be predicted, and whether that prediction is trained. A
document `t1 .. tn` has the positions `bos->t1, t1->t2, .., tn->bos`, so a row begins with bos and a document's end
is learned; a conversation ends with its last token as a label. As a label has its own position, filling a row to the
brim loses no prediction at its end.

A preference is laid out as a prompt and, behind it, its two answers (`PairPiece`), of which one may be absent.

For each row the largest piece that fits is taken from a buffer again and again (the idea of nanochat's data loader).
Where nothing fits, a document is cut; a conversation never is, and where there are only such the rest of the row is
padding. So rows run from long pieces to short ones: who trains on them shuffles them.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nanodag.host.images import IMAGE_TOKENS

Answer = tuple[np.ndarray, np.ndarray]
ABSENT: Answer = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=bool))
"""Stands for the missing answer in a pair that has one."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Part or all of a document or conversation. tokens: (n + 1,) int32. trained: (n,) bool. is_document: it
    may be cut. surplus_bytes: that its tokens stand for beyond those of its text, as a SentencePiece's blank in
    front. record: number of its source, and the pass over it; None for what was cut off. judged: of a pair how much
    better the chosen answer is, by whoever judged; of an answer whose steps are judged, how right each is, at the
    trained positions."""

    tokens: np.ndarray
    trained: np.ndarray
    is_document: bool
    surplus_bytes: int = 0
    record: tuple[int, int] | None = None
    judged: tuple[float, ...] = ()

    @property
    def num_positions(self) -> int:
        return len(self.trained)

    @property
    def input_ids(self) -> np.ndarray:
        """The input token at each position, (n,) int32."""
        return self.tokens[:-1]

    @property
    def labels(self) -> np.ndarray:
        """The token to be predicted at each position, (n,) int32; -100 where that is not trained."""
        return np.where(self.trained, self.tokens[1:], np.int32(-100))

    @property
    def parts(self) -> tuple[int, ...]:
        """Positions of what the others continue, then of each of these; of a plain sequence, its own alone."""
        return (self.num_positions,)

    def shortened(self, num_positions: int) -> "Piece":
        """The first positions of a piece that is longer, and no part of an image."""
        is_image = self.tokens >= IMAGE_TOKENS
        while num_positions and is_image[num_positions - 1] and is_image[num_positions]:
            num_positions -= 1
        trained = self.trained[:num_positions]
        judged = self.judged[: int(trained.sum())]
        return Piece(self.tokens[: num_positions + 1], trained, is_document=False, judged=judged)


@dataclass(frozen=True, eq=False)
class PairPiece(Piece):
    """A prompt and two answers to it, the chosen one first. tokens: (P,) int32, the prompt's. answers: ids and mask of
    each, (A,) int32 and bool; trained by the mask. Positions: the prompt's but its last, then for each answer the
    prompt's last token and the answer's but its last. So each position predicts one token, and what both share is
    computed once. scores_ends: the answers' last tokens are read too, and these positions alone are trained. One of the
    answers may be ABSENT."""

    answers: tuple[Answer, ...] = ()
    scores_ends: bool = False

    @property
    def parts(self) -> tuple[int, ...]:
        return len(self.tokens) - 1, *(len(ids) + self.scores_ends for ids, _ in self.answers)

    @property
    def input_ids(self) -> np.ndarray:
        end = None if self.scores_ends else -1
        return np.concatenate(
            [self.tokens[:-1], *(p for ids, _ in self.answers if len(ids) for p in (self.tokens[-1:], ids[:end]))]
        )

    @property
    def labels(self) -> np.ndarray:
        ids = [np.full(len(self.tokens) - 1, -100, np.int32)]
        ids += [np.append(answer, 0)[: len(answer) + self.scores_ends] for answer, _ in self.answers]
        return np.where(self.trained, np.concatenate(ids), np.int32(-100))

    @property
    def key(self) -> int:
        """A number that follows from its tokens, by which what is known of it is found."""
        digest = hashlib.blake2b(np.array(self.parts, np.int32).tobytes(), digest_size=8)
        digest.update(self.input_ids.astype(np.int32).tobytes() + self.labels.astype(np.int32).tobytes())
        return int.from_bytes(digest.digest(), "little")

    def shortened(self, num_positions: int) -> Piece:
        """The pair with the end of its longer answer cut off, then of both; untrained where none is left, or where both
        become one."""
        room = num_positions - (len(self.tokens) - 1) - self.scores_ends * 2
        sizes = [len(ids) for ids, _ in self.answers]
        first = min(sizes[0], max(room // 2, room - sizes[1]))
        cut = zip(self.answers, (first, room - first), strict=True)
        has_room = room >= np.count_nonzero(sizes)
        answers = [a if a is ABSENT else (a[0][:n], a[1][:n]) for a, n in cut] if has_room else []
        return pair_piece(self.tokens, answers, scores_ends=self.scores_ends, margin=self.judged[0])


def pair_piece(
    prompt: np.ndarray,
    answers: Sequence[Answer | None],
    *,
    scores_ends: bool = False,
    margin: float = 0.0,
) -> Piece:
    """The piece of a prompt and its answers, chosen and rejected, None for one that is absent; an untrained one where
    there is nothing to learn: no prompt, no answer, one without a trained token, equal ones."""
    pair = tuple(ABSENT if answer is None else answer for answer in answers)
    is_pair = len(prompt) > 1 and len(pair) == 2 and all(a is ABSENT or a[1].any() for a in pair)
    if not is_pair or np.array_equal(pair[0][0], pair[1][0]):
        return conversation_piece(prompt, np.zeros(len(prompt), dtype=bool))
    masks = [np.arange(len(m) + 1) == len(m) if scores_ends else m for _, m in pair]
    trained = np.concatenate([np.zeros(len(prompt) - 1, dtype=bool), *masks])
    return PairPiece(prompt, trained, is_document=False, answers=pair, scores_ends=scores_ends, judged=(margin,))


def document_piece(ids: Sequence[int], bos_id: int, surplus_bytes: int = 0) -> Piece:
    """A whole document, from the prediction of its first token to that of its end. An empty one trains nothing."""
    tokens = np.empty(len(ids) + 2, dtype=np.int32)
    tokens[0] = tokens[-1] = bos_id
    tokens[1:-1] = ids
    return Piece(tokens, np.full(len(ids) + 1, len(ids) > 0), is_document=True, surplus_bytes=surplus_bytes)


def conversation_piece(ids: np.ndarray, mask: np.ndarray) -> Piece:
    """A whole conversation. ids: (n,) int32. mask: (n,) bool, True for tokens to be learned."""
    return Piece(ids, mask[1:], is_document=False)


class Packer:
    """Best-fit packer for rows of row_length.

    The rest of a document that must be cut is packed later. A conversation is never cut; add none above row_length.
    num_cut: cuts so far.
    """

    def __init__(self, row_length: int, *, bos_id: int) -> None:
        self._row_length = row_length
        self._bos_id = bos_id
        self._keys: list[tuple[int, int]] = []
        self._pieces: dict[int, Piece] = {}  # by serial number, which counts up: of equals, the oldest goes first
        self._serial = 0
        self.num_positions = 0  # of the pieces in the buffer
        self.num_cut = 0

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, piece: Piece) -> None:
        """Put a piece into the buffer, cut to row length where it is longer."""
        while piece.num_positions > self._row_length:
            head, rest = self._split(piece, self._row_length)
            self._insert(head)
            piece = rest
        self._insert(piece)

    def row(self) -> list[Piece]:
        """Pieces of the next row, row_length at most; empty when the buffer is."""
        row: list[Piece] = []
        room = self._row_length
        while room:
            place = bisect_left(self._keys, (room + 1,)) - 1  # of the largest that fits
            piece = self._pop(place) if place >= 0 else self._cut_shortest(room)
            if piece is None:
                break
            row.append(piece)
            room -= piece.num_positions
        return row

    def _insert(self, piece: Piece) -> None:
        self._serial += 1
        self.num_positions += piece.num_positions
        self._pieces[self._serial] = piece
        insort(self._keys, (piece.num_positions, -self._serial))

    def _cut_shortest(self, room: int) -> Piece | None:
        """The first positions of the shortest document, the oldest of equals; None without a document. Of the shortest
        one fewest tokens are lost, or left without what stood before them."""
        shortest = None
        for place, (num_positions, negative) in enumerate(self._keys):
            if shortest is not None and num_positions > self._keys[shortest][0]:
                break
            if self._pieces[-negative].is_document:
                shortest = place
        if shortest is None:
            return None
        head, rest = self._split(self._pop(shortest), room)
        self._insert(rest)
        return head

    def _split(self, piece: Piece, num_positions: int) -> tuple[Piece, Piece]:
        """The first positions of a document, and the rest as a piece that begins with bos again.

        What bos is followed by in the rest is not trained: documents do not begin there. Every prediction of the piece
        is in one of the two.
        """
        assert piece.is_document
        self.num_cut += 1
        head = replace(piece, tokens=piece.tokens[: num_positions + 1], trained=piece.trained[:num_positions])
        tokens = np.concatenate([np.array([self._bos_id], dtype=np.int32), piece.tokens[num_positions:]])
        return head, Piece(tokens, np.concatenate([[False], piece.trained[num_positions:]]), is_document=True)

    def _pop(self, place: int) -> Piece:
        piece = self._pieces.pop(-self._keys.pop(place)[1])
        self.num_positions -= piece.num_positions
        return piece


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows for one micro-batch, B x T.

    input_ids: int64. labels: int64, the token to be predicted at each position, -100 for no loss. document_ids: int32,
    0 and up within a row, -1 for padding. surplus_bytes: of its pieces. position_ids: int64, from 0 in each document,
    and in the padding of each row, and in what continues another document, from where that one ends.
    continued: (B, T) int32, the document that one continues, -1 for none; None where none does. keys: of the pairs in
    it, in their order. judged: of its pieces. answers: numbers of the answers that are there: 2 p of pair p's chosen
    one, 2 p + 1 of its rejected one.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    document_ids: np.ndarray
    surplus_bytes: int = 0
    continued: np.ndarray | None = None
    keys: tuple[int, ...] = ()
    judged: tuple[float, ...] = ()
    answers: tuple[int, ...] = ()
    position_ids: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Made with the batch, ahead of the step that trains on it."""
        documents, counting = self.document_ids, np.arange(self.document_ids.shape[1])
        begins = np.ones(documents.shape, dtype=bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        positions = counting - np.maximum.accumulate(np.where(begins, counting, 0), axis=1)
        if self.continued is not None:  # one that others continue is not itself one that continues another
            lengths = [np.bincount(row[row >= 0], minlength=1) for row in documents]
            before = [np.where(c >= 0, n[c.clip(0)], 0) for n, c in zip(lengths, self.continued, strict=True)]
            positions = positions + np.stack(before)
        object.__setattr__(self, "position_ids", positions)

    @property
    def num_tokens(self) -> int:
        """Input tokens that are not padding."""
        return int((self.document_ids >= 0).sum())

    @property
    def num_labels(self) -> int:
        """Predictions that carry loss."""
        return int((self.labels != -100).sum())


def make_batch(rows: Sequence[Sequence[Piece]], *, num_rows: int, row_length: int, pad_id: int) -> Batch:
    """Lay pieces out; rows that are missing at the end are padding."""
    shape = (num_rows, row_length)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, -100, dtype=np.int64)
    documents, continued = np.full(shape, -1, dtype=np.int32), np.full(shape, -1, dtype=np.int32)
    for number, row in enumerate(rows):
        start = document = 0
        for piece in row:
            end, first = start + piece.num_positions, document
            input_ids[number, start:end] = piece.input_ids
            labels[number, start:end] = piece.labels
            for length in filter(None, piece.parts):
                documents[number, start : start + length] = document
                continued[number, start : start + length] = first if document > first else -1
                start, document = start + length, document + 1
    pieces = [piece for row in rows for piece in row]
    pairs = [piece for piece in pieces if isinstance(piece, PairPiece)]
    judged = tuple(value for piece in pieces for value in piece.judged)
    of_pairs: dict[str, Any] = {"keys": tuple(p.key for p in pairs), "judged": judged}
    if pairs:
        sizes = [len(ids) for piece in pairs for ids, _ in piece.answers]
        of_pairs |= {"continued": continued, "answers": tuple(np.flatnonzero(sizes).tolist())}
    return Batch(input_ids, labels, documents, sum(piece.surplus_bytes for piece in pieces), **of_pairs)
