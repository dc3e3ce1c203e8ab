"""From sources to batches: draw, tokenise, pack, with an exact position after every batch."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from nanodag.data.canonical import record_bytes
from nanodag.data.config import SourceConfig, mixes_by_epochs
from nanodag.data.mixture import Mixture, Part
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
class _Position:
    """Everything after one batch, as it was then."""

    mixture: dict[str, Any]
    packer: PackerState
    counts: _Counts
    sources: dict[str, dict[str, float]]
    progress: float | None


class TokenBatches:
    """Iterator over batches of batch_rows x sequence_length for one data-parallel rank.

    kind: "document" fills every row (documents are cut where nothing fits, see cut); "chat" packs whole conversations,
    with loss on what the assistant says, and beside them the documents of those sources whose adapter makes nothing
    else, trained whole. too_long: a conversation above sequence_length is truncated, or dropped; either is counted, and
    one without anything left to learn is dropped. part, once, repeat, shuffle: as in Mixture. prefetch: make the next
    batch in a thread while this one is trained.

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
        prefetch: bool = False,
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
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="batches") if prefetch else None
        self._ahead: Future[tuple[Batch, _Position] | None] | None = None
        self._returned = self._position()
        self._beginning = self.state_dict()

    def __iter__(self) -> "TokenBatches":
        return self

    def __next__(self) -> Batch:
        made = self._make() if self._ahead is None else self._ahead.result()
        self._ahead = None
        if made is None:
            raise StopIteration
        batch, self._returned = made
        if self._executor is not None:
            self._ahead = self._executor.submit(self._make)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch returned last. JSON values; about 6 bytes a buffered token."""
        position = self._returned
        return {
            "mixture": position.mixture,
            "packer": packer_state_to_json(position.packer),
            "counts": dict(vars(position.counts)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that was returned last when `state_dict` was called."""
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None
        self._mixture.load_state_dict(state["mixture"])
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
        return {**counts, "progress": position.progress, "sources": position.sources}

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
        """End the prefetching thread."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

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
            records = [drawn.record for drawn in islice(self._mixture, _DRAWN_AT_ONCE)]
            self._exhausted = len(records) < _DRAWN_AT_ONCE
            self._add(records=len(records))
            for piece in self._pieces_of(records):
                if (fitting := self._fitting(piece)) is not None:
                    self._packer.add(fitting)

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
        mixture = self._mixture
        return _Position(mixture.state_dict(), self._packer.state(), self._counts, mixture.stats(), mixture.progress)


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
