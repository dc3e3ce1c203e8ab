"""A mixture: records of several sources in one deterministic order, resumable, sharded, with a held-out part.

Which source comes next is not drawn but due: the one that is furthest behind its share. So the shares hold at every
point, not only on average, and depend on nothing but what was given out before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanodag.data.adapters import kind_of, open_adapter
from nanodag.data.config import SourceConfig, mixes_by_epochs
from nanodag.data.opening import Part, open_part
from nanodag.data.question_form import asking
from nanodag.data.records import Wanted, record_bytes
from nanodag.data.shuffle import RowOrder
from nanodag.errors import ConfigError, SourceError


@dataclass(frozen=True)
class Drawn:
    """One record. source: number in the mixture's list. epoch and index: the pass over that source, and its row.
    stretch: passes over all sources that ended before it, so it is higher than that of any record of an earlier pass
    over the same source. In a mixture by epochs, and of one source, stretches are the same on all ranks."""

    source: int
    epoch: int
    index: int
    record: dict[str, Any]
    stretch: int


class Mixture:
    """Iterator over records of one kind, or of `chat`: conversations, and documents of sources that have no others.

    With weights it is endless, and shares count UTF-8 bytes of text (rows for prompts). With epochs it ends when each
    source has had its passes num_epochs times, spread evenly over the whole; repeat=True begins again, in another
    order, without end. once=True ends it after one pass over each source: shares by weight hold until a source is
    through. part: rows with a held-out score (canonical.py) below a source's `held_out` fraction are the held-out part,
    or those of its last shard; all others are for training.

    Raises ConfigError for weights mixed with epochs. Raises SourceError when a pass over a weighted source has no
    record for this part and rank, and when lengths are needed and not known.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        *,
        kind: Wanted,
        seed: int,
        rank: int = 0,
        world: int = 1,
        part: Part = "train",
        once: bool = False,
        repeat: bool = False,
        num_epochs: float = 1.0,
        shuffle: bool = True,
        mirror: Path | None = None,
    ) -> None:
        self.sources = list(sources)
        self._kind = kind
        self._repeat = repeat and not once
        by_epochs = mixes_by_epochs(self.sources)
        self._signature: list[Any] = [seed, rank, world, part, once, repeat, num_epochs, shuffle]
        self._signature += [config.model_dump(mode="json") for config in self.sources]
        shares = {"rank": rank, "world": world, "shuffle": shuffle}
        self._streams = [
            _Stream(config, kind=kind, part=part, mirror=mirror, seed=seed * 1_000_003 + number, **shares)
            for number, config in enumerate(self.sources)
        ]
        self._weights = [] if by_epochs else [config.weight for config in self.sources if config.weight]
        passes = [1.0 if once else num_epochs * (config.epochs or 1.0) for config in self.sources]
        self._passes = passes if by_epochs or once else []
        self._rows_a_round = self._count_rows(needed=not once) if self._passes else []
        self._round = 1
        self._spent = [0] * len(self.sources)  # bytes, or rows of prompts
        self._records = [0] * len(self.sources)

    def __iter__(self) -> "Mixture":
        return self

    def __next__(self) -> Drawn:
        while (due := self._due()) is not None:
            share, number = due
            drawn = self._streams[number].next_record(endless=self._repeat or not self._passes)
            if drawn is None:
                continue
            epoch, index, record = drawn
            self._spent[number] += 1 if self._kind == "prompt" else record_bytes(record)
            self._records[number] += 1
            return Drawn(number, epoch, index, record, self._stretch(share, number, epoch))
        raise StopIteration

    @property
    def progress(self) -> float | None:
        """Share of this round's passes that is done, 0 to 1; None for an endless mixture of weights."""
        if not self._passes:
            return None
        done = [stream.order.passes() - (self._round - 1) * passes for stream, passes in self._with_passes()]
        rows = [min(1.0, d / p) * n for d, p, n in zip(done, self._passes, self._rows_a_round, strict=True)]
        return max(0.0, sum(rows) / max(1.0, sum(self._rows_a_round)))

    def stats(self) -> dict[str, dict[str, float]]:
        """By source URL: records given out by this rank, and passes over the source so far."""
        counted = zip(self.sources, self._streams, self._records, strict=True)
        return {config.url: {"records": n, "epochs": stream.order.passes()} for config, stream, n in counted}

    def state_dict(self) -> dict[str, Any]:
        """JSON values; a few numbers a source."""
        return {
            "signature": self._signature,
            "round": self._round,
            "spent": list(self._spent),
            "records": list(self._records),
            "streams": [stream.order.state_dict() for stream in self._streams],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was called. Raises ConfigError when it is another mixture's state."""
        if state["signature"] != self._signature:
            raise ConfigError(
                f"The saved position belongs to another mixture: {state['signature']}; this one is {self._signature} "
                "(seed, rank, ranks, part, once, repeat, num_epochs, shuffle, sources). Resume with the config it was "
                "saved with."
            )
        self._round = state["round"]
        self._spent = list(state["spent"])
        self._records = list(state["records"])
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.order.load_state_dict(saved)

    def _with_passes(self) -> list[tuple["_Stream", float]]:
        return list(zip(self._streams, self._passes, strict=True))

    def _count_rows(self, *, needed: bool) -> list[float]:
        """Rows that each source gives a round; a guess where its length is unknown and not needed."""
        rows = []
        for stream, passes in self._with_passes():
            length = stream.order.length
            parts_matter = needed and (len(self.sources) > 1 or passes != int(passes))
            if parts_matter and not stream.order.can_tell_passes:
                raise SourceError(
                    f"Source {stream.config.url} does not know its number of rows, which a mixture by epochs needs to "
                    "spread it evenly. Give every source of this mixture a weight instead."
                )
            rows.append(passes * (10_000 if length is None else length))
        return rows

    def _stretch(self, share: float, number: int, epoch: int) -> int:
        if not self._passes:
            return sum(stream.order.epoch for stream in self._streams)
        # From the share alone, not from what this rank was given: it is the same on all ranks.
        ended = [epoch if n == number else int(share * passes + 1e-9) for n, passes in enumerate(self._passes)]
        return sum(ended)

    def _due(self) -> tuple[float, int] | None:
        """The source furthest behind its share, as (how far it is, its number); None at the end."""
        while True:
            behind = [
                (self._spent[number] / self._weights[number] if self._weights else self._done(number), number)
                for number in range(len(self.sources))
                if not self._passes or not self._streams[number].order.reached(self._passes[number] * self._round)
            ]
            if behind:
                return min(behind)
            if not self._repeat or not any(self._rows_a_round):
                return None
            self._round += 1

    def _done(self, number: int) -> float:
        return self._streams[number].order.passes() / self._passes[number]


class _Stream:
    """Records of one source that belong to the wanted part."""

    def __init__(self, config: SourceConfig, *, kind: Wanted, part: Part, mirror: Path | None, **order: Any) -> None:
        self.config = config
        self._part = part
        source, self._belongs = open_part(config, part, mirror)
        self.order = RowOrder(source, **order)
        made = kind_of(config.adapter, config.url, kind)
        self._adapt = open_adapter(config.adapter, config.url, made, config.options, config.columns)
        self._ask = asking(config, made)
        self._kept_in_pass = True  # after a resume in the middle of a pass it is not known, so no complaint at its end

    def next_record(self, *, endless: bool) -> tuple[int, int, dict[str, Any]] | None:
        """(epoch, index, record) of the next row; None when it is not of this part, or at the end of a pass."""
        numbered_row = self.order.next_row()
        if numbered_row is None:
            if endless and not self._kept_in_pass:
                raise SourceError(
                    f"A whole pass over {self.config.url} gave this rank no record of the part {self._part!r} "
                    f"(held_out={self.config.held_out}). Use fewer ranks, another fraction, or drop the source."
                )
            self._kept_in_pass = False
            return None
        epoch, index, row = numbered_row
        record = self._adapt(index, row)
        if not self._belongs(record):
            return None
        self._kept_in_pass = True
        return epoch, index, self._ask(record)
