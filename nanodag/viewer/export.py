"""Writes what an RL stage sampled into one file that other tools read. No torch here.

`.jsonl` holds a JSON object a line, `.parquet` the same as columns; a mapping of reward components is JSON text there.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nanodag.errors import ConfigError
from nanodag.rl.rollouts.rollout import Rollout, flatten_response
from nanodag.tokenizer.encoding import Encoding
from nanodag.viewer.shelf import Read, Shelf

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export came to. rows: that were written. left_out: rollouts that were not, by the reason."""

    rows: int
    left_out: Mapping[str, int]


def export_rollouts(shelf: Shelf, path: Path) -> Exported:
    """Every rollout that was sampled for training, in the order of the steps: text, tokens, log-probabilities.

    A row: step, fate (`trained`, a filter's reason, ...), prompt_id, group_id, sample_index, messages, answer (the
    right one), response, reward, reward_components, finish_reason, prompt_ids; and of the same length response_ids,
    mask, logprobs (nats), versions, as nanodag.rl.rollouts.rollout has them. Raises ConfigError for another suffix.
    """
    encoding = Encoding(shelf.model)
    count = _write(path, (_row(step, read, encoding) for step, read in _reads(shelf)))
    return Exported(rows=count, left_out={})


def export_chats(shelf: Shelf, path: Path, *, best: int, lowest: float) -> Exported:
    """Conversations that an `sft` stage reads with `file:PATH`: of each prompt the `best` answers with a reward of
    `lowest` or more, as rejection sampling trains on.

    A row: messages with the answer, reward, prompt_id, step. The same answer to a prompt counts once. Answers that were
    cut, answers with text of a tool, and prompts whose messages were not kept are left out. Raises ConfigError for
    another suffix.
    """
    encoding = Encoding(shelf.model)
    left_out: dict[str, int] = defaultdict(int)
    by_prompt: dict[str, dict[str, dict[str, Any]]] = {}
    for step, read in _reads(shelf):
        if reason := _why_not(read, lowest):
            left_out[reason] += 1
            continue
        text = text_of(read.rollout, encoding)
        answer = {"role": "assistant", "content": text}
        row = {
            "messages": [*map(dict, read.messages), answer],
            "reward": read.rollout.reward,
            "prompt_id": read.rollout.prompt_id,
            "step": step,
        }
        known = by_prompt.setdefault(read.rollout.prompt_id, {})
        if text in known:
            left_out["the same answer"] += 1
        if text not in known or known[text]["reward"] < row["reward"]:
            known[text] = row
    chosen: list[dict[str, Any]] = []
    for answers in by_prompt.values():
        ranked = sorted(answers.values(), key=lambda row: -row["reward"])  # of equal rewards the earlier one
        chosen += ranked[:best]
        left_out["not among the best"] += len(ranked[best:])
    return Exported(rows=_write(path, chosen), left_out={reason: n for reason, n in left_out.items() if n})


def text_of(rollout: Rollout, encoding: Encoding) -> str:
    """What follows the prompt, without the stop token."""
    return encoding.decode(rollout.without_stop(rollout.response_token_ids))


def _why_not(read: Read, lowest: float) -> str:
    """Why a rollout is no example; empty where it may be one."""
    rollout = read.rollout
    if rollout.reward is None:
        return "no reward"
    if rollout.reward < lowest:
        return "reward too low"
    if rollout.finish_reason != "stop":
        return "cut"
    if any(span.kind == "tool" for span in rollout.spans):
        return "with text of a tool"
    return "" if read.messages else "messages not kept"


def _reads(shelf: Shelf) -> Iterator[tuple[int, Read]]:
    for step in shelf.steps_with_rollouts():
        for read in shelf.read(step):
            yield step, read


def _row(step: int, read: Read, encoding: Encoding) -> dict[str, Any]:
    rollout, response = read.rollout, flatten_response(read.rollout)
    return {
        "step": step,
        "fate": read.fate,
        "prompt_id": rollout.prompt_id,
        "group_id": rollout.group_id,
        "sample_index": rollout.sample_index,
        "messages": [dict(message) for message in read.messages],
        "answer": read.answer,
        "response": text_of(rollout, encoding),
        "reward": rollout.reward,
        "reward_components": dict(rollout.reward_components),
        "finish_reason": rollout.finish_reason,
        "prompt_ids": list(rollout.prompt_token_ids),
        "response_ids": list(response.token_ids),
        "mask": list(response.mask),
        "logprobs": list(response.logprobs),
        "versions": list(response.versions),
    }


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows whole or not at all; returns how many."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} must end in {' or '.join(SUFFIXES)}, which says how it is written.")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        count = _write_lines(partial, rows) if path.suffix == ".jsonl" else _write_columns(partial, rows)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8", errors="surrogatepass") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count


def _write_columns(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    table = pa.Table.from_pylist([_as_columns(row) for row in rows])
    pq.write_table(table, path)
    return int(table.num_rows)


def _as_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings whose names differ from row to row as JSON text."""
    named = {k: json.dumps(v, sort_keys=True) if isinstance(v, Mapping) else v for k, v in row.items()}
    messages = [
        {**m, "content": m["content"] if isinstance(m["content"], str) else json.dumps(m["content"])}
        for m in row["messages"]
    ]
    return {**named, "messages": messages}
