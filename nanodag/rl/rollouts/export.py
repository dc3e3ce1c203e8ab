"""Writes what an RL stage sampled into one file that other tools read. No torch here.

`.jsonl` holds a JSON object a line, `.parquet` the same as columns; a mapping of reward components is JSON text there.
"""

import glob
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nanodag.errors import ConfigError
from nanodag.host.images import images_in
from nanodag.rl.rollouts.rollout import Rollout, flatten_response
from nanodag.rl.rollouts.rollout_files import Read, Shelf, Wanted
from nanodag.store.atomic import is_leftover, temporary_name
from nanodag.tokenizer.encoding import Encoding

SUFFIXES = (".jsonl", ".parquet")
ANY = Wanted()


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Outcome of an export. rows: that were written. left_out: rollouts that were not, by the reason."""

    rows: int
    left_out: Mapping[str, int]


def export_rollouts(shelf: Shelf, path: Path, wanted: Wanted = ANY, *, step: int | None = None) -> Exported:
    """Write the rows of `rollout_rows`. Raises ConfigError for another suffix."""
    return Exported(rows=_write(path, rollout_rows(shelf, wanted, step=step)), left_out={})


def rollout_rows(shelf: Shelf, wanted: Wanted = ANY, *, step: int | None = None) -> Iterator[dict[str, Any]]:
    """Every sequence that was sampled for training, in the order of the steps: text, tokens, log-probabilities. wanted,
    step: what is left of them, here and in the exports.

    A row: step, fate (`trained`, a filter's reason, ...), prompt_id, group_id, sample_index, branch, role, messages,
    answer (the right one), response, turns (kind and text of each span), reward, reward_components, finish_reason,
    prompt_ids; and of the same length response_ids, mask, logprobs (nats, null where nobody knows them), versions, as
    nanodag.rl.rollouts.rollout has them. Raises ArtifactNotFound for a step that there is not.
    """
    encoding = Encoding(shelf.model)
    return (_row(number, read, encoding) for number, read in _reads(shelf, wanted, step))


def export_chats(
    shelf: Shelf, path: Path, wanted: Wanted = ANY, *, step: int | None = None, best: int, lowest: float
) -> Exported:
    """Conversations that an `sft` stage reads with `file:PATH`: of each prompt the `best` answers with a reward of
    `lowest` or more, as rejection sampling trains on.

    A row: messages with the answer, reward, prompt_id, step. The same answer to a prompt counts once. Answers that were
    cut, answers with text of a tool, further sequences of a sample, and prompts whose messages were not kept are left
    out. Raises ConfigError for another suffix.
    """
    encoding, left_out = Encoding(shelf.model), Counter[str]()
    by_prompt: dict[str, dict[str, dict[str, Any]]] = {}
    for number, read in _examples(_reads(shelf, wanted, step), lowest, left_out):
        text = text_of(read.rollout, encoding)
        row = {
            "messages": [*map(dict, read.messages), {"role": "assistant", "content": text}],
            "reward": read.rollout.reward,
            "prompt_id": read.rollout.prompt_id,
            "step": number,
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
    return Exported(rows=_write(path, chosen), left_out=+left_out)


def export_pairs(
    shelf: Shelf, path: Path, wanted: Wanted = ANY, *, step: int | None = None, lowest: float, takes_all: bool = False
) -> Exported:
    """Preference pairs, as DPO trainers take them: of each group the answer with the highest reward, `lowest` at least,
    and the one with the least; takes_all: every two answers of which the better one has `lowest` at least. A group
    whose rewards are equal has no pair.

    A row, as TRL's conversational preferences: prompt (messages), chosen and rejected (a message each, in a list), and
    score_chosen, score_rejected, prompt_id, step. What `export_chats` leaves out is left out. Raises ConfigError for
    another suffix.
    """
    encoding, left_out = Encoding(shelf.model), Counter[str]()
    groups: dict[tuple[int, str], list[Read]] = {}
    for number, read in _examples(_reads(shelf, wanted, step), -math.inf, left_out):
        groups.setdefault((number, read.rollout.group_id), []).append(read)
    rows = []
    for (number, _), reads in groups.items():
        ranked = sorted(reads, key=_reward, reverse=True)  # of equal rewards the earlier one first
        two = itertools.combinations(ranked, 2) if takes_all else [(ranked[0], ranked[-1])]
        pairs = [(better, worse) for better, worse in two if _reward(better) > _reward(worse)]
        pairs = [(better, worse) for better, worse in pairs if _reward(better) >= lowest]
        left_out["in a group without a pair" if not pairs else "neither best nor worst"] += len(reads) - len(
            {id(read) for pair in pairs for read in pair}
        )
        said = {tuple(text_of(read.rollout, encoding) for read in pair): pair for pair in pairs}  # each pair once
        for texts, pair in said.items():
            answers = dict(zip(("chosen", "rejected"), texts, strict=True))
            rows.append(
                {
                    "prompt": [dict(message) for message in pair[0].messages],
                    **{name: [{"role": "assistant", "content": text}] for name, text in answers.items()},
                    "score_chosen": _reward(pair[0]),
                    "score_rejected": _reward(pair[1]),
                    "prompt_id": pair[0].rollout.prompt_id,
                    "step": number,
                }
            )
    return Exported(rows=_write(path, rows), left_out=+left_out)


def _reward(read: Read) -> float:
    assert read.rollout.reward is not None
    return read.rollout.reward


def text_of(rollout: Rollout, encoding: Encoding) -> str:
    """The response's text, without the stop token."""
    return encoding.decode(rollout.without_stop(rollout.response_token_ids))


def _examples(reads: Iterable[tuple[int, Read]], lowest: float, left_out: Counter[str]) -> Iterator[tuple[int, Read]]:
    """The rollouts that may be examples; others are counted in left_out, by the reason."""
    for number, read in reads:
        if reason := _why_not(read, lowest):
            left_out[reason] += 1
        else:
            yield number, read


def _why_not(read: Read, lowest: float) -> str:
    """Why a rollout is no example; empty where it may be one."""
    rollout = read.rollout
    reasons = {
        "a further sequence of a sample": rollout.branch > 0,
        "no reward": rollout.reward is None,
        "reward too low": rollout.reward is not None and rollout.reward < lowest,
        "cut": rollout.finish_reason not in ("stop", "text"),
        "with text of a tool": any(span.kind == "tool" for span in rollout.spans),
        "messages not kept": not read.messages,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _reads(shelf: Shelf, wanted: Wanted, step: int | None) -> Iterator[tuple[int, Read]]:
    """Rollouts with the step of each. Raises ArtifactNotFound for a step that there is not."""
    for number in shelf.steps_with_rollouts() if step is None else (step,):
        for read in shelf.read(number):
            if wanted.is_met_by(read) and "replayed" not in read.rollout.metadata:  # by an earlier nanodag
                yield number, read


def _row(step: int, read: Read, encoding: Encoding) -> dict[str, Any]:
    rollout, response = read.rollout, flatten_response(read.rollout)
    return {
        "step": step,
        "fate": read.fate,
        **{name: getattr(rollout, name) for name in ("prompt_id", "group_id", "sample_index", "branch", "role")},
        "messages": [dict(message) for message in read.messages],
        "answer": read.answer,
        "response": text_of(rollout, encoding),
        "turns": [{"kind": span.kind, "text": encoding.decode(span.token_ids)} for span in rollout.spans[1:]],
        "reward": rollout.reward,
        "reward_components": dict(rollout.reward_components),
        "finish_reason": rollout.finish_reason,
        "prompt_ids": list(rollout.prompt_token_ids),
        "response_ids": list(response.token_ids),
        "mask": list(response.mask),
        "logprobs": [None if value != value else value for value in response.logprobs],
        "versions": list(response.versions),
    }


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows whole or not at all; returns how many. What exports that were killed have left of the same file is
    removed."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} must end in {' or '.join(SUFFIXES)}, which says how it is written.")
    begin = f".{path.name}"
    for other in path.parent.glob(f"{glob.escape(begin)}.*"):
        if is_leftover(other.name.removeprefix(begin)):
            other.unlink(missing_ok=True)
    partial = path.with_name(begin + temporary_name())
    count = 0
    try:
        if path.suffix == ".parquet":
            table = pa.Table.from_pylist(list(map(_as_columns, rows)))
            pq.write_table(table, partial)
            count = int(table.num_rows)
        else:
            with partial.open("w", encoding="utf-8", errors="surrogatepass") as file:
                for count, row in enumerate(rows, start=1):  # noqa: B007 - it is returned
                    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _as_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings whose names differ from row to row as JSON text."""
    columns = {k: json.dumps(v, sort_keys=True) if isinstance(v, Mapping) else v for k, v in row.items()}
    for name in {"messages", "prompt"} & row.keys():
        if next(images_in(row[name]), None) is not None:
            raise ConfigError("Rollouts with images are exported as JSON lines: name a file that ends in .jsonl.")
        contents = [c if isinstance(c := message["content"], str) else json.dumps(c) for message in row[name]]
        columns[name] = [{**message, "content": c} for message, c in zip(row[name], contents, strict=True)]
    return columns
