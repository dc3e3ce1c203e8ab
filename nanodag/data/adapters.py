"""Named adapters: one row of a source in, one canonical record out (nanodag.data.records).

An adapter has a name and, for each kind of record it can make, one function `(row, **options) -> record`: the same
source is a conversation in SFT and a prompt in RL. A user's own function is named by import path, `module:function`; it
gets the row and `kind`. The entries themselves are in adapter_entries.py.

Any adapter that makes conversations makes documents too: the texts of the messages, one below the other.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nanodag.data.adapter_entries import DEFAULTS, ENTRIES, Adapt
from nanodag.data.records import KINDS, Kind, Wanted, check_record, record_texts, refuse_images
from nanodag.data.urls import hub_path, parse_url
from nanodag.errors import SourceError
from nanodag.errors.words import listed, nearest
from nanodag.own_code.functions import function_at
from nanodag.own_code.user_frame import with_place

# Adapters that expect a kind's columns and are not called as it is.
_GENERIC: dict[Kind, str] = {"document": "text", "conversation": "messages", "judgement": "preference"}


def adapter_name(name: str, url: str, kind: Kind) -> str:
    """The adapter that `auto` stands for: by hub name, by generator, else the one that expects the kind's columns."""
    if name != "auto":
        return name
    parsed = parse_url(url)
    if parsed.kind == "hub" and (known := DEFAULTS.get(hub_path(parsed).name)):
        return known
    if parsed.kind in ("reasoning_gym", "verifiers"):
        return parsed.kind
    return _GENERIC.get(kind, kind)


def kind_of(name: str, url: str, wanted: Wanted) -> Kind:
    """Kind of record that a source gives: for `chat` documents if its adapter makes these alone, else conversations."""
    if wanted != "chat":
        return wanted
    resolved = adapter_name(name, url, "conversation")
    makes = {kind for entry, kind in ENTRIES if entry == resolved}
    return "document" if makes == {"document"} else "conversation"


def check_adapter(name: str, url: str, options: Mapping[str, Any]) -> None:
    """Raise SourceError for an unknown adapter name or an option that it does not take; imports nothing."""
    if ":" in name:
        return
    if name == "auto":
        candidates = {adapter_name(name, url, kind) for kind in KINDS}
    elif name in _names():
        candidates = {name}
    else:
        raise SourceError(
            f"Adapter {name!r} of {url} is not known; there are {listed(_names())}, and module:function."
            f"{nearest(name, _names())}"
        )
    taken = {option for (entry, _), adapt in ENTRIES.items() if entry in candidates for option in _options(adapt)}
    if unknown := sorted(set(options) - taken):
        raise SourceError(
            f"Adapter {name!r} of {url} has no option {unknown[0]!r}; it takes {listed(sorted(taken))}."
            f"{nearest(unknown[0], taken)}"
        )


def open_adapter(
    name: str, url: str, kind: Kind, options: Mapping[str, Any], columns: Mapping[str, str] | None = None
) -> Callable[[int, dict], dict]:
    """The function (index, row) -> record of that kind, checked record by record.

    columns: as SourceConfig's. A prompt without an id of its own gets `<url>#<index>`. Raises SourceError where the
    adapter cannot make this kind; the returned function raises SourceError naming url, row and columns when a row is
    not what the adapter expects, or has been given a name that the adapter does not read.
    """
    resolved = adapter_name(name, url, kind)
    if is_own := ":" in resolved:
        adapt, arguments, unread = _imported(resolved), {"kind": kind, **options}, set[str]()
    else:  # options of the same adapter's other kinds are left out: `tools` of gsm8k means nothing to its prompts
        adapt, unread = _entry(resolved, url, kind), set(columns or ())
        arguments = {option: value for option, value in options.items() if option in _options(adapt)}

    def record_of(index: int, row: dict) -> dict:
        try:
            input_row = renamed(row, columns) if columns else row
            if unread:
                watched = _Watched(input_row)
                record = adapt(watched, **arguments)
                unread.difference_update(watched.read)
                if unread:
                    read = listed(sorted(watched.read))
                    raise ValueError(f"`columns` names {min(unread)!r}, which it does not read; it reads {read}")
            else:
                record = adapt(input_row, **arguments)
            if kind == "prompt":
                record.setdefault("prompt_id", f"{url}#{index}")
            check_record(record, kind)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            detail = f"no column {error}" if isinstance(error, KeyError) else str(error)
            detail = with_place(error) if is_own else detail
            raise SourceError(
                f"Adapter {resolved!r} cannot make a {kind} of row {index} of {url}: {detail}. "
                f"The row's columns are {listed(sorted(row))}; choose another adapter or repair the row."
            ) from error
        return record

    return record_of


def renamed(row: dict, columns: Mapping[str, str]) -> dict:
    """The row, with columns also under the names that an adapter or a form reads. Raises KeyError for a missing one."""
    return {**row, **{name: _inner(row, path) for name, path in columns.items()}}


def _inner(row: Mapping[str, Any], path: str) -> Any:
    if path in row or "." not in path:
        return row[path]
    first, _, rest = path.partition(".")
    if not isinstance(row.get(first), Mapping):
        raise KeyError(path)
    return _inner(row[first], rest)


class _Watched(Mapping[str, Any]):
    """A row that notes which columns it was asked for, those that are not there too."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._row[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def _names() -> list[str]:
    return sorted({name for name, _ in ENTRIES})


def _entry(name: str, url: str, kind: Kind) -> Adapt:
    if (name, kind) in ENTRIES:
        return ENTRIES[name, kind]
    if kind == "document" and (name, "conversation") in ENTRIES:
        return _joined(ENTRIES[name, "conversation"])
    kinds = sorted(k for entry, k in ENTRIES if entry == name)
    raise SourceError(
        f"Adapter {name!r} makes no {kind} (of {url}); it makes {', '.join(kinds)}. Name another with `adapter:`."
    )


def _joined(adapt: Adapt) -> Adapt:
    """The document of an adapter that makes conversations."""

    @functools.wraps(adapt)  # its options are the same
    def as_document(row: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        record = adapt(row, **options)
        refuse_images(record["messages"])
        return {"text": "\n".join(record_texts(record))}

    return as_document


def _imported(path: str) -> Adapt:
    try:
        return function_at(path)
    except (ImportError, AttributeError) as error:
        why = with_place(error)
        raise SourceError(f"Adapter {path!r} cannot be imported: {why}. It must be module:function.") from error


@functools.cache
def _options(adapt: Adapt) -> list[str]:
    return list(inspect.signature(adapt).parameters)[1:]
