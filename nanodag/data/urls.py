"""Source URLs, taken apart without opening anything.

    hub:owner/name[@revision][/config][:split]        default split: train
    file:path-or-glob[?by=line|paragraph|document]    .parquet .jsonl .json .txt, all but parquet also .gz or .zst
    package:distribution/path/inside[#view]           a file of an installed wheel, read as a file
    https://host/path.zip                             .jsonl files in an archive, also .gz or .zst; or http:
    reasoning_gym:name[?parameter=value&...]
    identity:path.yaml[?size=value&seed=value]        conversations in which a model says who it is
    python:module:function[?parameter=value&...]
    verifiers:module[?parameter=value&...]            the tasks of a taskset of the `verifiers` package
    input:label                                       what the stage of that input made, as kind `select` does

Each may end in a slice of rows, `[0:1000]`, `[1000:]` or `[:50]`; step and negative numbers are not offered.
"""

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from nanodag.errors import SourceError
from nanodag.errors.words import listed, nearest
from nanodag.registry import MODULE_NAME

WEB = ("https", "http")
KINDS = ("hub", *WEB, "file", "package", "reasoning_gym", "identity", "python", "verifiers", "input")

_SLICE = re.compile(r"\[(\d*):(\d*)\]$")
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<config>[^:]+))?(:(?P<split>.+))?$")
_ARCHIVE = re.compile(r"//\w[\w.:-]*(/\w[\w.~%-]*)+\.zip")  # no name in it is a way up, or hidden
_QUERY = re.compile(r"\?((?:[A-Za-z_]\w*=[^&]*)(?:&[A-Za-z_]\w*=[^&]*)*)$")


@dataclass(frozen=True)
class SourceURL:
    """One parsed URL.

    path: what stands between the kind and the options. parameters: of the query, JSON scalars and lists decoded.
    view: after `#`, empty without. start, stop: the slice; stop is None for "to the end".
    """

    text: str
    kind: str
    path: str
    parameters: dict[str, Any]
    view: str = ""
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class HubPath:
    """The path of a `hub:` URL. revision and config are empty when the URL leaves them out."""

    name: str
    revision: str
    config: str
    split: str


def parse_url(text: str) -> SourceURL:
    """The parts of a source URL. Raises SourceError naming the part that is wrong and the forms there are."""
    kind, colon, rest = text.partition(":")
    if not colon or kind not in KINDS:
        kinds = [f"{known_kind}:" for known_kind in KINDS]
        raise SourceError(f"Source {text!r} has no known kind; kinds are {listed(kinds)}.{nearest(f'{kind}:', kinds)}")
    start, view = 0, ""
    stop: int | None = None
    if bounds := _SLICE.search(rest):
        rest = rest[: bounds.start()]
        start, stop = int(bounds[1] or 0), int(bounds[2]) if bounds[2] else None
        if stop is not None and stop <= start:
            raise SourceError(f"Source {text!r} slices no rows: [{start}:{stop}] is empty; the second must be larger.")
    if kind in ("file", "package") and "#" in rest:
        rest, _, view = rest.rpartition("#")
    parameters: dict[str, Any] = {}
    if query := _QUERY.search(rest):  # in a file's glob a lone `?` is a wildcard, so only name=value counts as query
        parameters = dict(_parameter(pair) for pair in query.group(1).split("&"))
        rest = rest[: query.start()]
    if not rest:
        raise SourceError(f"Source {text!r} names nothing after {kind}:.")
    _check(url := SourceURL(text, kind, rest, parameters, view, start, stop))
    return url


def hub_path(url: SourceURL) -> HubPath:
    """Name, revision, config and split of a `hub:` URL."""
    match = _HUB.match(url.path)
    if match is None:
        raise SourceError(f"Source {url.text!r} is not of the form hub:owner/name[@revision][/config][:split].")
    parts = match.groupdict(default="")
    return HubPath(parts["name"], parts["revision"], parts["config"], parts["split"] or "train")


def _parameter(pair: str) -> tuple[str, Any]:
    name, _, value = pair.partition("=")
    value = unquote(value)
    try:
        return name, json.loads(value)
    except ValueError:  # a bare word is a string
        return name, value


def _check(url: SourceURL) -> None:
    if url.kind == "hub":
        hub_path(url)
    if url.kind in ("hub", "package", "input", *WEB) and url.parameters:
        raise SourceError(f"Source {url.text!r}: {url.kind}: takes no parameters; found {listed(url.parameters)}.")
    if url.kind in WEB and not _ARCHIVE.fullmatch(url.path):
        raise SourceError(f"Source {url.text!r} is not of the form {url.kind}://host/path.zip.")
    if url.kind == "package" and "/" not in url.path.strip("/"):
        raise SourceError(f"Source {url.text!r} is not of the form package:distribution/path/inside.")
    if url.kind == "identity" and not all(
        name in ("size", "seed") and type(value) is int and value >= (name == "size")
        for name, value in url.parameters.items()
    ):
        raise SourceError(f"Source {url.text!r}: identity: takes ?size=, 1 or more, and seed=, whole numbers.")
    if url.kind == "python" and url.path.count(":") != 1:
        raise SourceError(f"Source {url.text!r} is not of the form python:module:function[?parameter=value].")
    if url.kind == "verifiers" and not MODULE_NAME.fullmatch(url.path):
        raise SourceError(f"Source {url.text!r} is not of the form verifiers:module[?parameter=value].")
    if url.kind == "file":
        by = url.parameters.get("by", "document")
        if set(url.parameters) - {"by"} or by not in ("line", "paragraph", "document"):
            raise SourceError(f"Source {url.text!r}: file: takes only ?by=line, ?by=paragraph or ?by=document.")
