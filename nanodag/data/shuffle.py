"""Rows of one source in shuffled order, pass after pass, one rank's share, resumable from a few numbers.

With blocks: a pass permutes the blocks, puts them together in windows of about 64 MiB, and permutes the rows of each
window; a source below that size is shuffled as a whole. With shards: a pass permutes the shards, and each is shuffled
as a source with blocks is. Without either: the rank's own rows are read from the front in windows of 4,096, and each
window is permuted. A position in this order is all there is to remember: unlike a shuffle buffer, which would have to
be saved with its rows, a window is read again from the source.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from nanodag.data.shards import ROWS_OF_A_SHARD, RemoteFile
from nanodag.data.sources import Block, Row, Source
from nanodag.errors import CorruptArtifact

WINDOW_BYTES = 64 << 20  # of blocks that are shuffled together
_POSITION = ("epoch", "shard", "taken", "rows_of_shard", "window_start")  # attributes of RowOrder that are saved
_WINDOW_ROWS = 4096
_WINDOWS_A_RANK = 16  # so many, and a rank has windows of its own: it has a sixteenth more than another at most
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def permutation(length: int, *key: int) -> np.ndarray:
    """(length,) int64: the numbers 0 to length - 1 in an order that depends on the key alone.

    Sorts by SplitMix64 of key and index, so that it does not change with numpy's generators.
    """
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for part in key:
            state = _mix(state + np.uint64(part & (2**64 - 1)) + _GAMMA)
        return np.argsort(_mix(state + np.arange(length, dtype=np.uint64) * _GAMMA), kind="stable")


def _mix(value: Any) -> Any:
    """SplitMix64's finaliser. Source: Steele, Lea, Flood, doi:10.1145/2660193.2660195."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class RowOrder:
    """Gives (epoch, number, row), pass after pass, and None once at the end of each.

    Ranks share no row and together have all. Of shards, each rank has its own, where there are as many as ranks. Of
    blocks, each rank has its own windows where there are 16 for each; else rank r of `world` gets the positions p of
    the pass with p % world == r. Without either each rank shuffles its own rows. shuffle=False keeps the source's
    order. length: rows of the source, None where it does not know.
    """

    def __init__(self, source: Source, *, seed: int, rank: int = 0, world: int = 1, shuffle: bool = True) -> None:
        self._source = source
        self._seed = seed
        self._rank = rank
        self._world = world
        self._shuffle = shuffle
        self.epoch = 0
        self.shard = 0  # with shards: those of this rank's that are through in this pass
        self.taken = 0  # rows that this rank took: in this pass; with shards, of this one
        self.rows_of_shard = 0  # with shards: this rank's rows of the current one, 0 before it is opened
        self.window_start = 0  # from the front: number of the first row of the window that is being given
        self._rows: Iterator[tuple[int, Row]] | None = None
        self._shares: dict[int, _Share | None] = {}  # of this pass, once it is known

    @cached_property
    def length(self) -> int | None:
        blocks = self._source.blocks()
        return self._source.length() if blocks is None else sum(block.num_rows for block in blocks)

    @property
    def can_tell_passes(self) -> bool:
        """True when `passes` counts parts of one."""
        return bool(self._source.shards()) or self.length is not None

    def next_row(self) -> tuple[int, int, Row] | None:
        """(epoch, number, row), or None once at the end of each pass."""
        if self._rows is None and (shards := self._source.shards()):
            self._rows = self._from_shards(shards)
        elif self._rows is None:
            share = self._share()
            self._rows = self._from_front() if share is None else share.rows(self.taken)
        numbered_row = next(self._rows, None)
        if numbered_row is None:
            self.epoch, self.shard, self.taken, self.window_start, self._rows = self.epoch + 1, 0, 0, 0, None
            return None
        self.taken += 1
        return self.epoch, *numbered_row

    def passes(self) -> float:
        """Passes over the source that are done, over all ranks as if they went in step."""
        if shards := self._source.shards():
            num_own = len(shards) if len(shards) < self._world else len(range(self._rank, len(shards), self._world))
            inside = self.taken / self.rows_of_shard if self.rows_of_shard else 0.0
            return self.epoch + (self.shard + inside) / num_own
        share = self._share()
        if share is not None and share.has_own_windows:
            return self.epoch + self.taken / share.num_rows
        if not self.length:
            return float(self.epoch)
        return self.epoch + min(1.0, self.taken * self._world / self.length)

    def reached(self, passes: float) -> bool:
        """True when this rank has no row left below that many passes over the source."""
        share = None if self._source.shards() else self._share()
        if self._source.shards() or (share is not None and share.has_own_windows):
            return self.passes() >= passes
        if self.length is None:
            return self.epoch >= passes
        position = self._rank + self.taken * self._world
        if position >= self.length:  # this pass is over for this rank, though it has not been told yet
            return (self.epoch + 1) * self.length + self._rank >= round(passes * self.length)
        return self.epoch * self.length + position >= round(passes * self.length)

    def state_dict(self) -> dict[str, int]:
        """JSON values."""
        return {name: getattr(self, name) for name in _POSITION}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was called. Raises CorruptArtifact for a position that another version saved."""
        if set(state) != set(_POSITION):
            raise CorruptArtifact(
                f"The saved position in {self._source!r:.200} has {', '.join(sorted(state))}, and this nanodag knows "
                f"{', '.join(sorted(_POSITION))}: another version saved it. Remove the stage's checkpoints to begin it "
                "again."
            )
        for name, value in state.items():
            setattr(self, name, value)
        self._rows = None

    def _share(self) -> "_Share | None":
        """This rank's part of the blocks in this pass; None where there are none."""
        if self.epoch not in self._shares:
            key = (self._seed, self.epoch)
            has_blocks = self._source.blocks() is not None
            share = _Share(self._source, key, rank=self._rank, world=self._world, shuffle=self._shuffle)
            self._shares = {self.epoch: share if has_blocks else None}
        return self._shares[self.epoch]

    def _from_shards(self, shards: Sequence[RemoteFile]) -> Iterator[tuple[int, Row]]:
        order = permutation(len(shards), self._seed, self.epoch, -1) if self._shuffle else range(len(shards))
        is_shared = len(shards) < self._world  # each rank has all of them then, and its own rows of each
        own = list(map(int, order if is_shared else order[self._rank :: self._world]))
        rank, world = (self._rank, self._world) if is_shared else (0, 1)
        while self.shard < len(own):
            number = own[self.shard]
            if not self.rows_of_shard or self.taken < self.rows_of_shard:
                source = shards[number].open()
                if self.shard + 1 < len(own):
                    shards[own[self.shard + 1]].fetch_ahead()
                key = (self._seed, self.epoch, number)
                share = _Share(source, key, rank=rank, world=world, shuffle=self._shuffle)
                self.rows_of_shard = share.num_rows
                for place, row in share.rows(self.taken):
                    yield number * ROWS_OF_A_SHARD + place, row
            self.shard, self.taken, self.rows_of_shard = self.shard + 1, 0, 0

    def _from_front(self) -> Iterator[tuple[int, Row]]:
        rows = self._source.rows(self.window_start, self._rank, self._world)
        size = _WINDOW_ROWS if self._shuffle else 1
        start = self.taken % size  # every window but a pass's last is full, so this is the place in the current one
        while window := list(islice(rows, size)):
            self.window_start = window[0][0]
            number = self.window_start // self._world
            order = permutation(len(window), self._seed, self.epoch, number) if self._shuffle else range(len(window))
            for place in range(start, len(window)):
                if place == len(window) - 1:  # a position saved after this row lies in the next window
                    self.window_start = window[-1][0] + 1
                yield window[int(order[place])]
            start = 0


class _Share:
    """One rank's rows of a source with blocks, in the order that the key gives.

    has_own_windows: the rank has every n-th window, not every n-th row: it reads no other rank's blocks.
    """

    def __init__(self, source: Source, key: tuple[int, ...], *, rank: int, world: int, shuffle: bool) -> None:
        self._source, self._key, self._shuffle = source, key, shuffle
        self._rank, self._world = rank, world
        self._blocks: Sequence[Block] = source.blocks() or ()
        num_bytes = sum(block.num_bytes for block in self._blocks)
        self.has_own_windows = world > 1 and (
            min(len(self._blocks), num_bytes // WINDOW_BYTES) >= _WINDOWS_A_RANK * world
        )

    @cached_property
    def num_rows(self) -> int:
        return sum(len(places) for _, _, places in self._windows(0))

    def rows(self, taken: int) -> Iterator[tuple[int, Row]]:
        """(number, row) from the `taken`-th of the share on."""
        first_rows = np.cumsum([0] + [block.num_rows for block in self._blocks])
        for number, window, places in self._windows(taken):
            if not places:
                continue
            starts = np.cumsum([0] + [self._blocks[block].num_rows for block in window])
            num_rows = int(starts[-1])
            order = permutation(num_rows, *self._key, number) if self._shuffle else range(num_rows)
            contents = [self._source.read(block) for block in window]
            for position in places:
                place = int(order[position])
                which = bisect_right(starts, place) - 1
                offset = place - int(starts[which])
                yield int(first_rows[window[which]]) + offset, contents[which][offset]

    def _windows(self, taken: int) -> Iterator[tuple[int, list[int], range]]:
        """(number, its blocks, places in it) of each window: what this rank has there beyond its first rows."""
        position = self._rank + taken * self._world  # the next one, where ranks take every n-th
        start = 0
        for number, window in enumerate(self._joined()):
            num_rows = sum(self._blocks[block].num_rows for block in window)
            if not self.has_own_windows:
                low = max(position, start + (self._rank - start) % self._world)
                yield number, window, range(low - start, num_rows, self._world)
            elif number % self._world == self._rank:
                yield number, window, range(min(taken, num_rows), num_rows)
                taken -= min(taken, num_rows)
            start += num_rows

    def _joined(self) -> Iterator[list[int]]:
        """Block numbers, in the order of this pass, put together up to the window's size. Empty blocks are left out."""
        blocks = self._blocks
        order = permutation(len(blocks), *self._key, -1) if self._shuffle else range(len(blocks))
        window: list[int] = []
        num_bytes = 0
        for block in map(int, order):
            if blocks[block].num_rows == 0:
                continue
            if window and (not self._shuffle or num_bytes + blocks[block].num_bytes > WINDOW_BYTES):
                yield window
                window, num_bytes = [], 0
            window.append(block)
            num_bytes += blocks[block].num_bytes
        if window:
            yield window
