"""From sources to batches: draw, tokenise, pack, with an exact position after every batch."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from nanodag.data.canonical import record_bytes
from nanodag.data.config import SourceConfig, mixes_by_epochs
from nanodag.data.mixture import Mixture
from nanodag.data.parts import Part
from nanodag.errors import ConfigError, SourceError
from nanodag.train.packing import (
    Batch,
    Packer,
    PackerState,
    Piece,
    conversation_piece,
    document_piece,
    make_batch,
    packer_state_from_json,
    packer_state_to_json,
)

_DRAWN_AT_ONCE = 64  # records that are tokenised in one call


@dataclass(frozen=True)
class _Counts:
    """Totals since the beginning."""

    batches: int = 0
    tokens: int = 0  # inputs that are not padding
    label_tokens: int = 0  # predictions that carry loss
    padding: int = 0
    document_tokens: int = 0  # inputs that are of documents
    records: int = 0
    truncated_records: int = 0
    truncated_tokens: int = 0
    dropped_records: int = 0
    dropped_tokens: int = 0


@dataclass(frozen=True)
class _Reading:
    """How far the mixture was read, as it was then."""

    mixture: dict[str, Any]
    sources: dict[str, dict[str, float]]
    progress: float | None


@dataclass(frozen=True)
class _Chunk:
    """Records that are tokenised in one call. reading: the mixture behind them."""

    num_records: int
    pieces: Callable[[], list[Piece]]
    reading: _Reading


@dataclass(frozen=True)
class _Position:
    """Everything after one batch, as it was then."""

    reading: _Reading
    packer: PackerState
    counts: _Counts


class TokenBatches:
    """Iterator over batches of batch_rows x sequence_length for one data-parallel rank.

    kind: "document" fills every row (documents are cut where nothing fits, see cut); "chat" packs whole conversations,
    with loss on what the assistant says, and beside them the documents of those sources whose adapter makes nothing
    else, trained whole. too_long: a conversation above sequence_length is truncated, or dropped; either is counted, and
    one without anything left to learn is dropped. part, once, repeat, shuffle: as in Mixture. prefetch: batches that a
    thread makes ahead while others are trained. tokenising_threads: as many tokenise what that thread has read; with 0
    it does so itself. Neither changes a batch.

    The position (`state_dict`) is that of the batch returned last, however far ahead reading is. Batches after
    restoring it are the same to the byte. Without repeat, a mixture by epochs ends: the last batch is filled up with
    padding, and ranks may end at different batches (`empty_batch` lets one go on beside the others).
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        *,
        tokenizer_path: Path,
        kind: Literal["document", "chat"],
        batch_rows: int,
        sequence_length: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        part: Part = "train",
        once: bool = False,
        repeat: bool = False,
        shuffle: bool = True,
        mirror: Path | None = None,
        too_long: Literal["truncate", "drop"] = "truncate",
        cut: Literal["keep", "drop"] = "keep",
        buffer_pieces: int = 512,
        prefetch: int = 0,
        tokenising_threads: int = 0,
    ) -> None:
        self._kind = kind
        self._rows, self._length = batch_rows, sequence_length
        self._too_long = too_long
        self._buffer_pieces = buffer_pieces
        self._ends = once or (mixes_by_epochs(sources) and not repeat)
        self._mixture = Mixture(
            sources,
            kind=kind,
            seed=seed,
            rank=rank,
            world=world,
            part=part,
            once=once,
            repeat=repeat,
            shuffle=shuffle,
            mirror=mirror,
        )
        self._pieces_of, bos_id, self._pad_id = _tokenising(kind, tokenizer_path)
        self._packer = Packer(sequence_length, cut=cut, bos_id=bos_id)
        self._exhausted = False
        self._counts = _Counts()
        self._prefetch = prefetch
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="batches") if prefetch else None
        self._ahead: deque[Future[tuple[Batch, _Position] | None]] = deque()
        self._num_chunks = tokenising_threads + 1
        self._tokenisers = ThreadPoolExecutor(tokenising_threads) if tokenising_threads else None
        self._chunks: deque[_Chunk] = deque()  # drawn, and not yet in the packer
        self._reading = self._read_so_far()  # behind the last chunk that is in the packer
        self._returned = self._position()
        self._beginning = self.state_dict()

    def __iter__(self) -> "TokenBatches":
        return self

    def __next__(self) -> Batch:
        made = self._ahead.popleft().result() if self._ahead else self._make()
        if made is None:
            raise StopIteration
        batch, self._returned = made
        while self._executor is not None and len(self._ahead) < self._prefetch:
            self._ahead.append(self._executor.submit(self._make))
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch returned last. JSON values; about 6 bytes a buffered token."""
        position = self._returned
        return {
            "mixture": position.reading.mixture,
            "packer": packer_state_to_json(position.packer),
            "counts": dict(vars(position.counts)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that was returned last when `state_dict` was called."""
        wait(self._ahead)
        self._ahead.clear()
        self._chunks.clear()
        self._mixture.load_state_dict(state["mixture"])
        self._reading = self._read_so_far()
        self._packer.restore(packer_state_from_json(state["packer"]))
        self._counts = _Counts(**state["counts"])
        self._exhausted = False
        self._returned = self._position()

    def stats(self) -> dict[str, Any]:
        """Totals of this rank up to the batch returned last.

        batches; tokens (inputs without padding); label_tokens; document_tokens; padding; records; cut_documents;
        truncated and dropped records and tokens; progress (0 to 1 of a mixture by epochs, else None); sources: records
        and epochs by URL.
        """
        position = self._returned
        counts = dict(vars(position.counts))
        counts["dropped_tokens"] += position.packer.num_dropped_positions
        counts["cut_documents"] = position.packer.num_cut
        return {**counts, "progress": position.reading.progress, "sources": position.reading.sources}

    def count(self) -> int:
        """Batches of this rank from beginning to end, found by packing everything once; the position stays.

        Raises ConfigError when there is no end.
        """
        if not self._ends:
            raise ConfigError(
                "These batches have no end, so they cannot be counted: a mixture by weights, or a repeated one. "
                "State how many tokens to train on."
            )
        here = self.state_dict()
        self.load_state_dict(self._beginning)
        rows = 0
        while self._packer.row(self._refill):
            rows += 1
        self.load_state_dict(here)
        return -(-rows // self._rows)

    def empty_batch(self) -> Batch:
        """A batch of padding alone, without loss."""
        return make_batch([], num_rows=self._rows, row_length=self._length, pad_id=self._pad_id)

    def close(self) -> None:
        """End the threads."""
        for executor in (self._executor, self._tokenisers):
            if executor is not None:
                executor.shutdown(cancel_futures=True)

    def _make(self) -> tuple[Batch, _Position] | None:
        rows: list[list[Piece]] = []
        while len(rows) < self._rows and (row := self._packer.row(self._refill)):
            rows.append(row)
        if not rows:
            return None
        batch = make_batch(rows, num_rows=self._rows, row_length=self._length, pad_id=self._pad_id)
        tokens = batch.num_tokens
        self._add(
            batches=1,
            tokens=tokens,
            label_tokens=batch.num_labels,
            padding=batch.input_ids.size - tokens,
            document_tokens=sum(piece.num_positions for row in rows for piece in row if piece.is_document),
        )
        return batch, self._position()

    def _refill(self) -> None:
        while len(self._packer) < self._buffer_pieces and not self._exhausted:
            while len(self._chunks) < self._num_chunks and not self._is_last(self._chunks):
                self._chunks.append(self._draw())
            chunk = self._chunks.popleft()
            self._exhausted = self._is_last([chunk])
            self._reading = chunk.reading
            self._add(records=chunk.num_records)
            for piece in chunk.pieces():
                if (fitting := self._fitting(piece)) is not None:
                    self._packer.add(fitting)

    def _draw(self) -> _Chunk:
        records = [drawn.record for drawn in islice(self._mixture, _DRAWN_AT_ONCE)]
        tokenise = partial(self._pieces_of, records)
        pieces = tokenise if self._tokenisers is None else self._tokenisers.submit(tokenise).result
        return _Chunk(len(records), pieces, self._read_so_far())

    def _is_last(self, chunks: Sequence[_Chunk]) -> bool:
        return bool(chunks) and chunks[-1].num_records < _DRAWN_AT_ONCE

    def _read_so_far(self) -> _Reading:
        mixture = self._mixture
        return _Reading(mixture.state_dict(), mixture.stats(), mixture.progress)

    def _fitting(self, piece: Piece) -> Piece | None:
        """The piece as the packer may have it, or None for one that is dropped."""
        if not piece.is_document and piece.num_positions > self._length:
            if self._too_long == "drop":
                self._add(dropped_records=1, dropped_tokens=piece.num_positions)
                return None
            self._add(truncated_records=1, truncated_tokens=piece.num_positions - self._length)
            piece = Piece(piece.tokens[: self._length + 1], piece.trained[: self._length], is_document=False)
        if not piece.trained.any():
            self._add(dropped_records=1, dropped_tokens=piece.num_positions)
            return None
        return piece

    def _add(self, **amounts: int) -> None:
        self._counts = replace(self._counts, **{k: getattr(self._counts, k) + n for k, n in amounts.items()})

    def _position(self) -> _Position:
        return _Position(self._reading, self._packer.state(), self._counts)


def tokenising_threads(device: str, *, cores: int, ranks: int) -> int:
    """How many a rank may have beside a GPU: four at most, and two cores stay for training and packing. None on a CPU,
    where training needs the cores."""
    return 0 if device == "cpu" else max(0, min(4, cores // ranks - 2))


Tokenise = Callable[[Sequence[dict[str, Any]]], list[Piece]]


def _tokenising(kind: str, tokenizer_path: Path) -> tuple[Tokenise, int, int]:
    """Records -> pieces, the id that begins documents, and the id of padding."""
    from nanodag.tokenizer.chat import NO_SWITCHES, load_renderer
    from nanodag.tokenizer.encoding import Encoding

    encoding = Encoding(tokenizer_path)

    def from_documents(records: Sequence[dict[str, Any]]) -> list[Piece]:
        pieces = []
        for record, ids in zip(records, encoding.encode_batch([r["text"] for r in records]), strict=True):
            surplus = int(encoding.token_bytes[ids].sum()) - record_bytes(record)
            pieces.append(document_piece(ids, encoding.bos_id, surplus))
        return pieces

    if kind == "document":
        return from_documents, encoding.bos_id, encoding.pad_id
    if kind != "chat":
        raise SourceError(f"Batches are of kind document or chat; found {kind!r}.")
    renderer = load_renderer(tokenizer_path)

    def from_both(records: Sequence[dict[str, Any]]) -> list[Piece]:
        asked = [r for r in records if "messages" in r]
        switches = [r.get("template_options", NO_SWITCHES) for r in asked]
        chats = iter(renderer.render_batch([r["messages"] for r in asked], switches))
        documents = iter(from_documents([r for r in records if "text" in r]))
        return [next(documents) if "text" in r else conversation_piece(*next(chats)) for r in records]

    return from_both, encoding.bos_id, encoding.pad_id
