"""The parts of a source: what trains, and what is held out from training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from nanodag.data.config import SourceConfig
from nanodag.data.records import held_out_score
from nanodag.data.sources import Source, open_source
from nanodag.errors import SourceError

Part = Literal["train", "held_out", "all"]


def open_part(config: SourceConfig, part: Part, mirror: Path | None) -> tuple[Source, Callable[[dict[str, Any]], bool]]:
    """A source with the rows of a part, and which of their records belong to it: a shard that is held out is never
    opened for training, nor any other for validation; a fraction of the rows is found by reading all.

    Raises SourceError for a last shard of a source that has one alone.
    """
    source = open_source(config.url, mirror)
    if part == "all":
        return source, _always
    if config.held_out == "last_shard":
        if (parts := source.apart()) is None:
            raise SourceError(
                f"{config.url}: held_out: last_shard needs several files, parquet ones on the hub, or one with several "
                "row groups, and there are no two. Give held_out as a fraction, e.g. 0.01."
            )
        rest, last = parts
        return (last if part == "held_out" else rest), _always
    share, by = config.held_out, config.held_out_by

    def belongs(record: dict[str, Any]) -> bool:
        return (share > 0 and held_out_score(record, by) < share) == (part == "held_out")

    return source, belongs


def _always(record: dict[str, Any]) -> bool:
    return True
