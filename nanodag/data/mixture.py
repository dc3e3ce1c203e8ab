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
    through. part: rows with a held-out score (records.py) below a source's `held_out` fraction are the held-out part,
    or those of its last shard; all others are for training. ends: False for a mixture without end.

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
        self.kind, self.seed, self.world = kind, seed, world
        self._repeat = repeat and not once
        self._has_passes = mixes_by_epochs(self.sources) or once
        self.ends = self._has_passes and not self._repeat
        self._signature: list[Any] = [seed, rank, world, part, once, repeat, num_epochs, shuffle]
        self._signature += [config.model_dump(mode="json") for config in self.sources]
        shares = {"rank": rank, "world": world, "shuffle": shuffle}
        self._streams = [
            _Stream(config, kind=kind, part=part, mirror=mirror, seed=seed * 1_000_003 + number, **shares)
            for number, config in enumerate(self.sources)
        ]
        for stream in self._streams if self._has_passes else ():
            passes = 1.0 if once else num_epochs * (stream.config.epochs or 1.0)
            stream.set_passes(passes, is_spread=not once and (len(self.sources) > 1 or passes != int(passes)))
        self._round = 1

    def __iter__(self) -> "Mixture":
        return self

    def __next__(self) -> Drawn:
        while (due := self._due()) is not None:
            share, number = due
            stream = self._streams[number]
            drawn = stream.next_record(endless=self._repeat or not self._has_passes)
            if drawn is None:
                continue
            epoch, index, record = drawn
            stream.spent += 1 if self.kind == "prompt" else record_bytes(record)
            stream.num_records += 1
            return Drawn(number, epoch, index, record, self._stretch(share, number, epoch))
        raise StopIteration

    @property
    def progress(self) -> float | None:
        """Share of this round's passes that is done, 0 to 1; None for an endless mixture of weights."""
        if not self._has_passes:
            return None
        ended = self._round - 1
        rows = [min(1.0, (s.order.passes() - ended * s.passes) / s.passes) * s.rows_a_round for s in self._streams]
        return max(0.0, sum(rows) / max(1.0, sum(stream.rows_a_round for stream in self._streams)))

    def stats(self) -> dict[str, dict[str, float]]:
        """By source URL: records given out by this rank, and passes over the source so far."""
        return {s.config.url: {"records": s.num_records, "epochs": s.order.passes()} for s in self._streams}

    def state_dict(self) -> dict[str, Any]:
        """JSON values; a few numbers a source."""
        return {
            "signature": self._signature,
            "round": self._round,
            "spent": [stream.spent for stream in self._streams],
            "records": [stream.num_records for stream in self._streams],
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
        saved = zip(state["spent"], state["records"], state["streams"], strict=True)
        for stream, (spent, num_records, position) in zip(self._streams, saved, strict=True):
            stream.spent, stream.num_records = spent, num_records
            stream.order.load_state_dict(position)

    def _stretch(self, share: float, number: int, epoch: int) -> int:
        if not self._has_passes:
            return sum(stream.order.epoch for stream in self._streams)
        # From the share alone, not from what this rank was given: it is the same on all ranks.
        return sum(epoch if n == number else int(share * s.passes + 1e-9) for n, s in enumerate(self._streams))

    def _due(self) -> tuple[float, int] | None:
        """The source furthest behind its share, as (how far it is, its number); None at the end."""
        while True:
            behind = [
                (stream.share(), number)
                for number, stream in enumerate(self._streams)
                if not self._has_passes or not stream.order.reached(stream.passes * self._round)
            ]
            if behind:
                return min(behind)
            if not self._repeat or not any(stream.rows_a_round for stream in self._streams):
                return None
            self._round += 1


class _Stream:
    """Records of one source that belong to the wanted part.

    spent: bytes given out, or rows of prompts. passes, rows_a_round: of a round of the mixture, where it has passes.
    """

    def __init__(self, config: SourceConfig, *, kind: Wanted, part: Part, mirror: Path | None, **order: Any) -> None:
        self.config = config
        self._part = part
        source, self._belongs = open_part(config, part, mirror)
        self.order = RowOrder(source, **order)
        made = kind_of(config.adapter, config.url, kind)
        self._adapt = open_adapter(config.adapter, config.url, made, config.options, config.columns)
        self._ask = asking(config, made)
        self._kept_in_pass = True  # after a resume in the middle of a pass it is not known, so no complaint at its end
        self.spent = self.num_records = 0
        self.passes = self.rows_a_round = 0.0

    def set_passes(self, passes: float, *, is_spread: bool) -> None:
        """is_spread: parts of a pass are told; where the source's length is not needed and unknown, it is a guess."""
        if is_spread and not self.order.can_tell_passes:
            raise SourceError(
                f"Source {self.config.url} does not know its number of rows, which a mixture by epochs needs to "
                "spread it evenly. Give every source of this mixture a weight instead."
            )
        length = self.order.length
        self.passes, self.rows_a_round = passes, passes * (10_000 if length is None else length)

    def share(self) -> float:
        """Part of its share that was given out: by weight, else by passes."""
        return self.spent / self.config.weight if self.config.weight else self.order.passes() / self.passes

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
