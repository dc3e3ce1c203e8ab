"""Rows of one source in shuffled order, pass after pass, one rank's share, resumable from two or three numbers.

With blocks: a pass permutes the blocks, puts them together in windows of about 64 MiB, and permutes the rows of each
window; a source below that size is shuffled as a whole. Without blocks: the rank's own rows are read from the front in
windows of 4,096, and each window is permuted. A position in this order is all there is to remember: unlike a shuffle
buffer, which would have to be saved with its rows, a window is read again from the source.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from nanodag.data.sources import Block, Row, Source

_WINDOW_BYTES = 64 << 20
_WINDOW_ROWS = 4096
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

    A source with blocks is shuffled as a whole, and rank r of `world` gets the positions p with p % world == r. Without
    blocks each rank shuffles its own rows. Ranks share no row and together have all. shuffle=False keeps the source's
    order. length: rows of the source, None where it does not know.
    """

    def __init__(self, source: Source, *, seed: int, rank: int = 0, world: int = 1, shuffle: bool = True) -> None:
        self._source = source
        self._seed = seed
        self._rank = rank
        self._world = world
        self._shuffle = shuffle
        self._epoch = 0
        self._taken = 0  # rows that this rank took in this pass
        self._window_start = 0  # without blocks: number of the first row of the window that is being given
        self._rows: Iterator[tuple[int, Row]] | None = None

    @cached_property
    def length(self) -> int | None:
        return self._source.length()

    def next_row(self) -> tuple[int, int, Row] | None:
        """(epoch, number, row), or None once at the end of each pass."""
        if self._rows is None:
            blocks = self._source.blocks()
            self._rows = self._from_front() if blocks is None else self._from_blocks(blocks)
        numbered_row = next(self._rows, None)
        if numbered_row is None:
            self._epoch, self._taken, self._window_start, self._rows = self._epoch + 1, 0, 0, None
            return None
        self._taken += 1
        return self._epoch, *numbered_row

    def passes(self) -> float:
        """Passes over the source that are done, over all ranks as if they went in step."""
        if not self.length:
            return float(self._epoch)
        return self._epoch + min(1.0, self._taken * self._world / self.length)

    def reached(self, passes: float) -> bool:
        """True when this rank has no row left below that many passes over the source."""
        if self.length is None:
            return self._epoch >= passes
        position = self._rank + self._taken * self._world
        if position >= self.length:  # this pass is over for this rank, though it has not been told yet
            return (self._epoch + 1) * self.length + self._rank >= round(passes * self.length)
        return self._epoch * self.length + position >= round(passes * self.length)

    def state_dict(self) -> dict[str, int]:
        """JSON values."""
        return {"epoch": self._epoch, "taken": self._taken, "window_start": self._window_start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was called."""
        self._epoch, self._taken, self._window_start = state["epoch"], state["taken"], state["window_start"]
        self._rows = None

    def _from_blocks(self, blocks: Sequence[Block]) -> Iterator[tuple[int, Row]]:
        first_rows = np.cumsum([0] + [block.num_rows for block in blocks])
        position = self._rank + self._taken * self._world
        window_start = 0
        for number, window in enumerate(self._windows(blocks)):
            num_rows = sum(blocks[block].num_rows for block in window)
            if position < window_start + num_rows:
                order = permutation(num_rows, self._seed, self._epoch, number) if self._shuffle else range(num_rows)
                starts = np.cumsum([0] + [blocks[block].num_rows for block in window])
                contents = [self._source.read(block) for block in window]
                while position < window_start + num_rows:
                    place = int(order[position - window_start])
                    which = bisect_right(starts, place) - 1
                    offset = place - int(starts[which])
                    position += self._world
                    yield int(first_rows[window[which]]) + offset, contents[which][offset]
            window_start += num_rows

    def _windows(self, blocks: Sequence[Block]) -> Iterator[list[int]]:
        """Block numbers, in the order of this pass, put together up to the window's size. Empty blocks are left out."""
        order = permutation(len(blocks), self._seed, self._epoch, -1) if self._shuffle else range(len(blocks))
        window: list[int] = []
        num_bytes = 0
        for block in map(int, order):
            if blocks[block].num_rows == 0:
                continue
            if window and (not self._shuffle or num_bytes + blocks[block].num_bytes > _WINDOW_BYTES):
                yield window
                window, num_bytes = [], 0
            window.append(block)
            num_bytes += blocks[block].num_bytes
        if window:
            yield window

    def _from_front(self) -> Iterator[tuple[int, Row]]:
        rows = self._source.rows(self._window_start, self._rank, self._world)
        size = _WINDOW_ROWS if self._shuffle else 1
        given = self._taken % size  # every window but a pass's last is full, so this is the place in the current one
        while window := list(islice(rows, size)):
            self._window_start = window[0][0]
            number = self._window_start // self._world
            order = permutation(len(window), self._seed, self._epoch, number) if self._shuffle else range(len(window))
            for place in range(given, len(window)):
                if place == len(window) - 1:  # a position saved after this row lies in the next window
                    self._window_start = window[-1][0] + 1
                yield window[int(order[place])]
            given = 0
