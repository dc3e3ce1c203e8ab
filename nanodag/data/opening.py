"""Open a source by its URL (forms in nanodag.data.urls), whole or the part of it that is trained on or held out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from nanodag.data import archives, files, generators, hub
from nanodag.data.config import SourceConfig
from nanodag.data.records import held_out_score
from nanodag.data.sources import SlicedSource, Source
from nanodag.data.urls import WEB, SourceURL, parse_url
from nanodag.errors import SourceError

Part = Literal["train", "held_out", "all"]


def open_source(text: str, mirror: Path | None = None) -> Source:
    """The source that a URL names. mirror: a folder that is read from instead of the hub and the web.

    Raises SourceError when the URL or what it points to is not there; rows are read later.
    """
    url = parse_url(text)
    if url.kind == "input":
        raise SourceError(f"{text} is the product of another stage: only a stage that has it as an input can read it.")
    if url.kind == "hub":
        source = hub.open_hub(url, mirror)
    elif url.kind in WEB:
        source = files.open_file(parse_url(f"file:{archives.unpacked(url, mirror)}/**/*.jsonl*"))
    else:
        source = _OPENERS[url.kind](url)
    return source if url.start == 0 and url.stop is None else SlicedSource(source, url.start, url.stop)


_OPENERS: dict[str, Callable[[SourceURL], Source]] = {
    "file": files.open_file,
    "package": files.open_package_file,
    "reasoning_gym": generators.open_reasoning_gym,
    "identity": generators.open_identity,
    "verifiers": generators.open_verifiers,
    "python": generators.open_python,
}


def open_part(config: SourceConfig, part: Part, mirror: Path | None) -> tuple[Source, Callable[[dict[str, Any]], bool]]:
    """A source with the rows of a part, and which of their records belong to it: a shard that is held out is never
    opened for training, nor any other for validation; a fraction of the rows is found by reading all.

    Raises SourceError for a last shard of a source that has one alone.
    """
    source = open_source(config.url, mirror)
    if part == "all":
        return source, lambda record: True
    if config.held_out == "last_shard":
        if (parts := source.apart()) is None:
            raise SourceError(
                f"{config.url}: held_out: last_shard needs several files, parquet ones on the hub, or one with several "
                "row groups, and there are no two. Give held_out as a fraction, e.g. 0.01."
            )
        rest, last = parts
        return (last if part == "held_out" else rest), lambda record: True
    share, by = config.held_out, config.held_out_by

    def belongs(record: dict[str, Any]) -> bool:
        return (share > 0 and held_out_score(record, by) < share) == (part == "held_out")

    return source, belongs
