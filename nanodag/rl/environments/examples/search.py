"""Questions over a corpus of texts that the policy may search.

The question is the prompt, and its `answer` the right one. The policy calls `search` as often as it likes, and then
answers. BM25 is the package bm25s (`pip install nanodag[search]`).
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanodag.errors import ConfigError, MissingTool
from nanodag.rl.environments.environment import Action, Observation, tool_named

TOOL = tool_named(
    "search",
    "Finds the passages of the corpus that fit some words best.",
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)


class Search:
    """corpus: a file of JSON lines, each with `text` and perhaps `title`. top: passages that a search finds.
    max_characters: of a passage that is shown. search_reward: for an answer after a search that found it."""

    def __init__(self, *, corpus: str, top: int = 3, max_characters: int = 400, search_reward: float = 0.0) -> None:
        try:
            import bm25s
        except ImportError:
            raise MissingTool("The search environment needs the package bm25s: pip install nanodag[search].") from None
        lines = Path(corpus).read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
        if not records:
            raise ConfigError(f'The corpus {corpus} is empty; give it lines such as {{"text": ...}}.')
        self._passages = [
            f"{record['title']}: {record['text']}" if "title" in record else record["text"] for record in records
        ]
        self._top, self._max_characters = min(top, len(records)), max_characters
        self._search_reward = search_reward
        self._bm25s, self._index = bm25s, bm25s.BM25()
        self._index.index(self._tokens(self._passages), show_progress=False)

    def tools(self) -> list[dict[str, Any]]:
        return [TOOL]

    def reset(self, *, seed: int, record: Mapping[str, Any]) -> Observation:
        self._answer, self._num_searches, self._is_found = _bare(record["answer"]), 0, False
        return None  # the prompt's own messages are the question

    def step(self, action: Action) -> tuple[Observation, float, bool, Mapping[str, Any]]:
        if action.calls:
            results = [self.found(str(call.arguments.get("query", ""))) for call in action.calls]
            self._num_searches += len(results)
            self._is_found = self._is_found or any(self._answer in _bare(text) for text in results)
            return results, 0.0, False, {}
        is_right = self._answer == _bare(action.text)
        searched = self._search_reward * self._is_found
        return "", is_right + searched, True, {"components": {"right": float(is_right), "searched": searched}}

    def metrics(self) -> dict[str, float]:
        return {"searches": self._num_searches, "found": float(self._is_found)}

    def found(self, query: str) -> str:
        """The passages that fit a query best, one a line; those alone that have a word of it."""
        places, scores = self._index.retrieve(self._tokens([query]), k=self._top, show_progress=False)
        pairs = zip(places[0].tolist(), scores[0].tolist(), strict=True)
        passages = [self._passages[place][: self._max_characters] for place, score in pairs if score > 0]
        return "\n".join(passages) or "nothing found"

    def _tokens(self, texts: list[str]) -> Any:
        return self._bm25s.tokenize(texts, stopwords="en", show_progress=False)


def _bare(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
