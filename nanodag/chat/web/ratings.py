"""Ratings of answers, kept as rows that a stage of kind `preference` reads: pairs in one file, single answers, which
`loss: kto` alone takes, in another."""

import json
import re
from pathlib import Path
from typing import Any

from nanodag.api.refusals import Refused
from nanodag.data.adapters import open_adapter
from nanodag.errors import SourceError
from nanodag.store.atomic import locked, write_bytes

KINDS = ("pairs", "thumbs")
ID = re.compile(r"[\w-]{1,100}", re.ASCII)
MAX_BYTES = 32 << 20  # of a file; it is written anew for each rating
LOCK_S = 10.0


def keep_rating(body: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write a rating into PATH.pairs.jsonl or PATH.thumbs.jsonl, whose old or new content is there at any instant.
    Returns the file and how many rows it has. Raises Refused for what is no rating, and for a file that is full.

    body: id, of what is rated: a later rating of it replaces the earlier one; kind; row, as the adapter `preference`
    reads it, None to take the rating back.
    """
    rating_id, kind, row = (body.get(name) for name in ("id", "kind", "row"))
    if not (isinstance(rating_id, str) and ID.fullmatch(rating_id) and kind in KINDS):
        raise Refused(f"a rating has an id of up to 100 letters, and a kind of {' or '.join(KINDS)}", param="id")
    file, begin = path.with_name(f"{path.name}.{kind}.jsonl"), f'{{"id": "{rating_id}", '.encode()
    new = [] if row is None else [_line(rating_id, row, kind)]
    with locked(file.with_suffix(".lock"), timeout_s=LOCK_S):
        before = file.read_bytes().splitlines() if file.exists() else []
        lines = [*(line for line in before if not line.startswith(begin)), *new]
        content = b"".join(line + b"\n" for line in lines)
        if len(content) > MAX_BYTES:
            raise Refused(f"{file} is full: move it elsewhere, and rate on", status=507)
        write_bytes(file, content)
    return {"file": str(file), "count": len(lines)}


def _line(rating_id: str, row: Any, kind: str) -> bytes:
    """The row with its id, once the adapter has read it. Raises Refused for what it cannot read, or UTF-8 hold."""
    columns = ("chosen", "rejected") if kind == "pairs" else ("completion", "label")
    try:
        kept = {name: row[name] for name in ("prompt", *columns, "models")}
        open_adapter("preference", "rating", "preference" if kind == "pairs" else "judgement", {})(0, kept)
        line = json.dumps({"id": rating_id, **kept}, ensure_ascii=False).encode()
    except (SourceError, LookupError, TypeError, UnicodeError) as error:
        raise Refused(f"this is no row of {kind}: {error!s:.300}", param="row") from error
    return line
