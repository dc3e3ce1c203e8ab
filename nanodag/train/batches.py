"""Batches of tokens made of sources: draw, tokenise, pack, with an exact position after every batch.

Records are read in windows. A window is packed as a whole and its rows are shuffled, as packing puts long pieces first.
It never crosses a pass over a source, so no record is trained again before all others of its source were.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Drawn, Mixture
from nanodag.data.records import message_text, record_bytes, refuse_images
from nanodag.data.shuffle import permutation
from nanodag.errors import ConfigError
from nanodag.tokenizer.steps import joined, step_ids
from nanodag.train.packing import Batch, Packer, Piece, conversation_piece, document_piece, make_batch, pair_piece

if TYPE_CHECKING:
    from nanodag.tokenizer.chat import ChatRenderer
    from nanodag.tokenizer.encoding import Encoding

_DRAWN_AT_ONCE = 64  # records that are tokenised in one call
NO_STRETCH = 2**53  # behind the end of the data


_COUNTED = (
    *("batches", "tokens", "label_tokens", "padding", "document_tokens", "records", "truncated_records"),
    *("truncated_tokens", "dropped_records", "dropped_tokens", "cut_documents"),
)  # since the beginning, in the order in which a checkpoint keeps them


@dataclass(frozen=True)
class _Chunk:
    """Records of one stretch that are tokenised in one call. before: the mixture's state before the first; progress:
    its progress behind the last."""

    drawn: Sequence[Drawn]
    pieces: Callable[[], list[Piece]]
    before: dict[str, Any]
    progress: float | None


@dataclass(frozen=True)
class _Made:
    """A batch, and what `_position` was after it."""

    batch: Batch
    stretch: int
    position: dict[str, Any]
    progress: float | None


class TokenBatches:
    """Iterator over batches of batch_rows x sequence_length for one data-parallel rank.

    kind: "document" fills all rows but the last of a window (a document is cut, and its rest packed later); "chat"
    packs whole conversations, with loss on what the assistant says, and beside them the documents of those sources
    whose adapter makes nothing else, trained whole; "preference" packs pairs of answers behind their prompts
    (scores_ends: as in PairPiece), "judgement" single answers too; "stepwise" packs answers in steps, with
    step_separator between these. too_long: a conversation above sequence_length is truncated, or dropped; either is
    counted, and what has nothing to learn is dropped, as a pair whose answers are equal. mixing: kind and seed, and
    maybe rank, world, part, once, repeat, num_epochs, shuffle and mirror, as in Mixture. window_pieces, window_rows: so
    much, at least, is packed and shuffled together, within a pass. prefetch: batches that a thread makes ahead while
    others are trained. tokenising_threads: as many tokenise what that thread has read; with 0 it does so itself.
    Neither changes a batch.

    The position (`state_dict`) is that of the batch returned last, however far ahead reading is. Batches after
    restoring it are the same to the byte. Ranks may end at different batches; `take` lets them train side by side.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        *,
        tokenizer_path: Path,
        batch_rows: int,
        sequence_length: int,
        too_long: Literal["truncate", "drop"] = "truncate",
        scores_ends: bool = False,
        step_separator: str = "",
        window_pieces: int = 512,
        window_rows: int = 128,  # the last one of a window is half empty on average
        prefetch: int = 0,
        tokenising_threads: int = 0,
        **mixing: Any,
    ) -> None:
        self._rows, self._length = batch_rows, sequence_length
        self._too_long = too_long
        self._window_pieces, self._window_positions = window_pieces, window_rows * sequence_length
        self._mixture = Mixture(sources, **mixing)
        self._seed, self._is_alone = self._mixture.seed, self._mixture.world == 1
        self._pieces_of, encoding = _tokenising(self._mixture.kind, tokenizer_path, scores_ends, step_separator)
        self._pad_id = encoding.pad_id
        self._make_pieces: Callable[[Sequence[Drawn]], list[Piece]] = self._tokenised
        self._new_packer = partial(Packer, sequence_length, bos_id=encoding.bos_id)
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._trained = [(0, 0)] * len(sources)
        self._prefetch = prefetch
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: deque[Future[_Made | None]] = deque()
        self._num_chunks = tokenising_threads + 1
        self._tokenisers = ThreadPoolExecutor(tokenising_threads) if tokenising_threads else None
        self._open, self._idle = 0, 0  # the stretch that all ranks have reached; batches of padding given meanwhile
        self._begin(self._mixture.state_dict())
        self._returned, self._returned_progress = self._position(), self._progress
        self._beginning = self.state_dict()

    def __iter__(self) -> "TokenBatches":
        return self

    def __next__(self) -> Batch:
        made = self._upcoming()
        if made is None:
            raise StopIteration
        self._ahead.popleft()
        self._returned, self._returned_progress = made.position, made.progress
        while len(self._ahead) < self._prefetch:
            self._ahead.append(self._executor.submit(self._make))
        return made.batch

    def take(self, number: int) -> list[Batch]:
        """Take that many batches for one step. Among several ranks: of the open stretch, then padding."""
        batches: list[Batch] = []
        while len(batches) < number and self._has_batch():
            batches.append(next(self))
        self._idle += number - len(batches)
        empty = make_batch([], num_rows=self._rows, row_length=self._length, pad_id=self._pad_id)
        return batches + [empty] * (number - len(batches))

    @property
    def is_waiting(self) -> bool:
        """True when this rank's batches of the open stretch are through, and other ranks may have some."""
        return not self._is_alone and not self._has_batch()

    @property
    def next_stretch(self) -> int:
        """The stretch of the next batch; NO_STRETCH at the end."""
        made = self._upcoming()
        return NO_STRETCH if made is None else made.stretch

    def open(self, stretch: int) -> None:
        """Give batches up to that stretch from now on: no rank has one of an earlier stretch left."""
        self._open = stretch

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch returned last. JSON values; a few numbers a source."""
        return {**self._returned, "open": self._open, "idle": self._idle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that was returned last when `state_dict` was called."""
        wait(self._ahead)
        self._ahead.clear()
        self._begin(state["window"], number=state["number"])
        if state["given"] is not None:
            self._open_window()
            self._given = state["given"]
        self._counts = dict(state["counts"])
        self._trained = [(records, first) for records, first in state["trained"]]
        self._open, self._idle = state["open"], state["idle"]
        self._returned, self._returned_progress = self._position(), self._progress

    def stats(self) -> dict[str, Any]:
        """Totals of this rank up to the batch returned last.

        batches; tokens (inputs without padding); label_tokens (predictions that carry loss); document_tokens (inputs of
        documents); padding; records; cut_documents; truncated and dropped records and tokens; progress (0 to 1 of a
        mixture by epochs, else None); sources: by source, url, rows (different records trained) and trained (with their
        repetitions).
        """
        counts = dict(self._returned["counts"])
        counts["batches"] += self._idle
        counts["padding"] += self._idle * self._rows * self._length
        trained = zip(self._mixture.sources, self._returned["trained"], strict=True)
        sources = [{"url": config.url, "rows": first, "trained": records} for config, (records, first) in trained]
        return {**counts, "progress": self._returned_progress, "sources": sources}

    def count(self) -> list[int]:
        """Batches of this rank in each stretch, found by packing everything once; the position stays. A rank alone has
        one stretch, as it goes on with the next one in the same batch.

        Raises ConfigError when there is no end.
        """
        if not self._mixture.ends:
            raise ConfigError(
                "These batches have no end, so they cannot be counted: a mixture by weights, or a repeated one. "
                "State how many tokens to train on."
            )
        here = self.state_dict()
        self._make_pieces = partial(self._lengths, {})
        self.load_state_dict(self._beginning)
        rows: Counter[int] = Counter()
        while self._open_window():
            rows[0 if self._is_alone else self._stretch] += len(self._window)
            self._given = len(self._window)
        self._make_pieces = self._tokenised
        self.load_state_dict(here)
        return [-(-rows[stretch] // self._rows) for stretch in range(max(rows, default=-1) + 1)]

    def close(self) -> None:
        """End the threads."""
        for executor in (self._executor, self._tokenisers):
            if executor is not None:
                executor.shutdown(cancel_futures=True)

    def _has_batch(self) -> bool:
        upcoming = self._upcoming()
        return upcoming is not None and (self._is_alone or upcoming.stretch <= self._open)

    def _upcoming(self) -> _Made | None:
        if not self._ahead:
            self._ahead.append(self._executor.submit(self._make))
        return self._ahead[0].result()

    def _begin(self, window: dict[str, Any], number: int = 0) -> None:
        """Read on from a window's first record. number: of the windows before it."""
        self._mixture.load_state_dict(window)
        self._held_back: tuple[Drawn, dict[str, Any]] | None = None  # first of the next stretch; the state before it
        self._chunks: deque[_Chunk] = deque()  # drawn, and not yet in a window
        self._window_start, self._number, self._stretch = window, number, 0
        self._window: list[list[Piece]] = []  # rows
        self._given = 0  # rows of the window that are in batches
        self._progress = self._mixture.progress

    def _make(self) -> _Made | None:
        rows: list[list[Piece]] = []
        stretch = None
        while len(rows) < self._rows:
            if self._given == len(self._window) and not self._open_window():
                break
            if not self._is_alone and stretch not in (None, self._stretch):
                break
            stretch = self._stretch
            rows.append(self._window[self._given])
            self._given += 1
        if stretch is None:
            return None
        batch = make_batch(rows, num_rows=self._rows, row_length=self._length, pad_id=self._pad_id)
        tokens = batch.num_tokens
        pieces = [piece for row in rows for piece in row]
        self._add(
            batches=1,
            tokens=tokens,
            label_tokens=batch.num_labels,
            padding=batch.input_ids.size - tokens,
            document_tokens=sum(piece.num_positions for piece in pieces if piece.is_document),
        )
        for source, epoch in (piece.record for piece in pieces if piece.record is not None):
            records, first = self._trained[source]
            self._trained[source] = records + 1, first + (epoch == 0)
        return _Made(batch, stretch, self._position(), self._progress)

    def _open_window(self) -> bool:
        """Read, pack and shuffle the next window; False at the end of the data."""
        packer = self._new_packer()
        start, num_records, stretch = None, 0, None
        while len(packer) < self._window_pieces or packer.num_positions < self._window_positions:
            while len(self._chunks) < self._num_chunks and (chunk := self._draw()) is not None:
                self._chunks.append(chunk)
            if not self._chunks or (len(packer) and stretch != self._chunks[0].drawn[0].stretch):
                break
            chunk = self._chunks.popleft()
            start = chunk.before if start is None else start
            stretch, self._progress = chunk.drawn[0].stretch, chunk.progress
            num_records += len(chunk.drawn)
            for drawn, piece in zip(chunk.drawn, chunk.pieces(), strict=True):
                if (fitting := self._fitting(piece)) is not None:
                    packer.add(replace(fitting, record=(drawn.source, drawn.epoch)))
        rows = list(iter(packer.row, []))
        self._add(records=num_records, cut_documents=packer.num_cut)
        if not rows:
            return False
        assert start is not None and stretch is not None
        self._number += bool(self._window)
        order = permutation(len(rows), self._seed, self._number)
        self._window_start, self._stretch, self._given = start, stretch, 0
        self._window = [rows[int(place)] for place in order]
        return True

    def _draw(self) -> _Chunk | None:
        """The next records of one stretch, 64 at most; None at the end."""
        drawn: list[Drawn] = []
        before: dict[str, Any] = {}
        while len(drawn) < _DRAWN_AT_ONCE:
            if self._held_back is None:
                state = self._mixture.state_dict()
                record = next(self._mixture, None)
            else:
                record, state = self._held_back
            if record is None or (drawn and record.stretch != drawn[0].stretch):
                self._held_back = None if record is None else (record, state)
                break
            self._held_back = None
            before = before or state
            drawn.append(record)
        if not drawn:
            return None
        make = partial(self._make_pieces, drawn)
        pieces = make if self._tokenisers is None else self._tokenisers.submit(make).result
        return _Chunk(drawn, pieces, before, self._mixture.progress)

    def _tokenised(self, drawn: Sequence[Drawn]) -> list[Piece]:
        return self._pieces_of([record.record for record in drawn])

    def _lengths(self, known: dict[tuple[int, int], Piece], drawn: Sequence[Drawn]) -> list[Piece]:
        """Pieces as long as a record's own, without its tokens: a record is tokenised once, whatever the passes. known:
        those of records that were, by source and index."""
        new = [draw for draw in drawn if (draw.source, draw.index) not in known]
        for draw, piece in zip(new, self._tokenised(new), strict=True):
            # Of a conversation that is truncated, what is left may hold nothing to learn.
            is_long = not piece.is_document and piece.num_positions > self._length
            is_trained = bool((piece.shortened(self._length) if is_long else piece).trained.any())
            tokens = np.broadcast_to(np.int32(0), piece.num_positions + 1)
            blank = Piece(tokens, np.broadcast_to(is_trained, piece.num_positions), piece.is_document)
            known[draw.source, draw.index] = blank
        return [known[draw.source, draw.index] for draw in drawn]

    def _fitting(self, piece: Piece) -> Piece | None:
        """The piece as the packer may have it, or None for one that is dropped."""
        if not piece.is_document and piece.num_positions > self._length:
            if self._too_long == "drop":
                self._add(dropped_records=1, dropped_tokens=piece.num_positions)
                return None
            self._add(truncated_records=1, truncated_tokens=piece.num_positions - self._length)
            piece = piece.shortened(self._length)
        if not piece.trained.any():
            self._add(dropped_records=1, dropped_tokens=piece.num_positions)
            return None
        return piece

    def _add(self, **amounts: int) -> None:
        for name, amount in amounts.items():
            self._counts[name] += amount

    def _position(self) -> dict[str, Any]:
        """Where reading is, as a checkpoint keeps it. window: the mixture's state before the window's first record;
        number: windows before it; given: its rows that are in batches, None before the first window. trained: by
        source, records so far, and those of its first pass."""
        return {
            "window": self._window_start,
            "number": self._number,
            "given": self._given if self._window else None,
            "counts": dict(self._counts),
            "trained": [list(counts) for counts in self._trained],
        }


def tokenising_threads(device: str, *, cores: int, ranks: int) -> int:
    """Number of threads a rank may have beside a GPU: four at most, and two cores stay for training and packing. None
    on a CPU, where training needs the cores."""
    return 0 if device == "cpu" else max(0, min(4, cores // ranks - 2))


Tokenise = Callable[[Sequence[dict[str, Any]]], list[Piece]]


def _tokenising(kind: str, tokenizer_path: Path, scores_ends: bool, step_separator: str) -> tuple[Tokenise, "Encoding"]:
    """Records -> pieces, and the tokenizer whose ids begin documents and fill up."""
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
        return from_documents, encoding
    renderer = load_renderer(tokenizer_path)
    if kind in ("preference", "judgement"):
        return lambda records: [_pair_of(record, renderer, scores_ends) for record in records], encoding
    if kind == "stepwise":
        return lambda records: [_steps_of(record, renderer, encoding, step_separator) for record in records], encoding

    def from_both(records: Sequence[dict[str, Any]]) -> list[Piece]:
        chat_records = [r for r in records if "messages" in r]
        switches = [r.get("template_options", NO_SWITCHES) for r in chat_records]
        tools = [r.get("tools", ()) for r in chat_records]
        chats = iter(renderer.render_batch([r["messages"] for r in chat_records], switches, tools))
        documents = iter(from_documents([r for r in records if "text" in r]))
        return [next(documents) if "text" in r else conversation_piece(*next(chats)) for r in records]

    return from_both, encoding


def _pair_of(record: dict[str, Any], renderer: "ChatRenderer", scores_ends: bool) -> Piece:
    """The prompt up to where the assistant speaks, as far as both answers repeat it; and what each says from there on,
    up to its last token with loss."""
    refuse_images(record["messages"])
    switches = record.get("template_options", {})
    said = {name: record[name] for name in ("chosen", "rejected") if name in record}
    prompt = np.array(renderer.prompt(record["messages"], switches), dtype=np.int32)
    rendered = renderer.render_batch([[*record["messages"], *turns] for turns in said.values()], [switches] * len(said))
    shared = min(_num_common(prompt, ids) for ids, _ in rendered)
    answers = {}
    for (name, turns), (ids, mask) in zip(said.items(), rendered, strict=True):
        end = int(np.flatnonzero(mask)[-1:].sum()) + 1 if any(message_text(turn).strip() for turn in turns) else 0
        answers[name] = (ids[shared:end], mask[shared:end])
    pair = [answers.get(name) for name in ("chosen", "rejected")]
    return pair_piece(prompt[:shared], pair, scores_ends=scores_ends, margin=record.get("margin", 0.0))


def _steps_of(record: dict[str, Any], renderer: "ChatRenderer", encoding: "Encoding", separator: str) -> Piece:
    """The prompt and the steps of an answer, trained where a step ends."""
    refuse_images(record["messages"])
    prompt = renderer.prompt(record["messages"], record.get("template_options", {}))
    steps = encoding.encode_batch(joined(record["steps"], separator))
    ids, places = step_ids(prompt, steps, renderer.stop_ids[:1])
    is_end = np.isin(np.arange(len(ids)), places)
    return Piece(np.array([*ids, 0], dtype=np.int32), is_end, is_document=False, judged=tuple(record["labels"]))


def _num_common(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    return int(np.append(one[:size] != other[:size], True).argmax())
