"""Win rates: a judge compares a model's answers with those of another evaluation to the same items. No torch here.

Judges prefer an answer for its place (Zheng et al., arXiv:2306.05685), so each pair is shown in both orders.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from nanodag.errors import ConfigError, ServerBusy
from nanodag.evaluation.benchmark import open_benchmark
from nanodag.evaluation.paired import read_records
from nanodag.evaluation.results import BenchmarkResult, result_of
from nanodag.rewards.judge import ASKED_AT_ONCE, Judge
from nanodag.rewards.remote import may_pass
from nanodag.store.kept_lines import KeptLines, content_key


def win_rate(
    baseline: Path,
    result: BenchmarkResult,
    *,
    seed: int,
    mirror: str,
    kept: KeptLines | None,
    on_progress: Callable[[int, int], None],
) -> BenchmarkResult:
    """The benchmark by its judge: `win_rate`, a tie counts half; `agreed`, the share of items on which both orders
    agree; `first`, how often the answer that is shown first wins, 0.5 for a judge that does not mind. A reply without
    a verdict counts as a tie, and its item as unparsed.

    baseline: the other evaluation's folder. Raises ConfigError where it did not answer the same items, ServerBusy where
    the judge cannot be asked.
    """
    config = result.config
    answered = baseline / "samples" / f"{config.name}.jsonl"
    others = {record["id"]: record for record in (read_records(answered) if answered.is_file() else ())}
    if missing := [record["id"] for record in result.records if "output" not in others.get(record["id"], {})]:
        raise ConfigError(
            f"Benchmark {config.name!r}: the input `baseline` has no single answer to {len(missing)} of "
            f"{len(result.records)} items. Give it a benchmark of that name with the same source, limit and seed."
        )
    messages = {item.id: item.messages for item in open_benchmark(config, seed=seed, mirror=mirror).items}
    judge = Judge(config.judge, compares=True)

    def judged(record: Mapping[str, Any]) -> dict[str, Any]:
        prompt, own, other = {"messages": messages[record["id"]]}, record["output"], others[record["id"]]["output"]
        key = content_key("judge", prompt, own, other)
        verdicts = kept.get(key) if kept is not None else None
        if verdicts is None:
            verdicts = [judge.preference(prompt, own, other), judge.preference(prompt, other, own)]
            if kept is not None:
                kept.add({key: verdicts})  # one write, so that threads do not mix their lines
        first, second = (0.5 if verdict is None else verdict for verdict in verdicts)
        scores = {"win_rate": (first + 1 - second) / 2, "agreed": float(first == 1 - second)}
        details = {"other": other, "shown_first": verdicts[0], "other_shown_first": verdicts[1]}
        made = {**record, "scores": {**scores, "first": (first + second) / 2}, "details": details}
        return {**made, "unparsed": 1} if None in verdicts else {k: v for k, v in made.items() if k != "unparsed"}

    records: list[dict[str, Any]] = []
    try:
        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            for record in threads.map(judged, result.records):
                records.append(record)
                on_progress(len(records), len(result.records))
    except httpx.HTTPError as error:
        what = f"Benchmark {config.name!r}: the judge of {config.judge} cannot be asked: {error}"
        raise (ServerBusy if may_pass(error) else ConfigError)(what) from error
    how: dict[str, Any] = {"base_metric": "win_rate", "form": result.form, "is_chat": result.is_chat}
    return result_of(config, records=records, **how)
