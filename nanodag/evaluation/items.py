"""Items of a benchmark out of our sources, read for lm-eval as its `custom_dataset`.

Each function here is named in a YAML file of benchmarks/ and called by lm-eval with the `dataset_kwargs` that
`item_options` makes. It returns a table of splits: `test`, and `fewshot` where worked examples were asked
for. An item has the columns that its YAML file names, and `item_id`, a hash of the row it was made from. A benchmark's
text form and chat form have the same ids, so a base and a chat model can be compared item by item.
"""

import hashlib
import heapq
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.data.adapters import open_adapter
from nanodag.data.config import SourceConfig
from nanodag.data.opening import open_part, open_source
from nanodag.data.question_form import asking, check_effect, with_names
from nanodag.data.records import Kind, message_text
from nanodag.data.sources import Row
from nanodag.errors import SourceError
from nanodag.registry import check_reward_of_data

if TYPE_CHECKING:
    from datasets import Dataset

Item = dict[str, Any]
NUM_CHOICES = 4
CONTEXT_WORDS = 32
PHRASE_WORDS = 8
_WORD = re.compile(r"\S+")


def rows(**options: Any) -> "dict[str, Dataset]":
    """Rows as the source has them: for benchmarks whose YAML speaks of the data set's own columns."""
    return _splits(_rows, options)


def problems(**options: Any) -> "dict[str, Dataset]":
    """Prompts as RL sees them, one user turn each: `question`, `system`, `answer`, `letters`, and `record`, the whole
    canonical prompt as JSON, for the reward that scores it."""
    return _splits(_problems, options)


def documents(**options: Any) -> "dict[str, Dataset]":
    """Documents: `text`."""
    return _splits(_documents, options)


def continuations(**options: Any) -> "dict[str, Dataset]":
    """`test`: `context`, `choices` (phrases of 8 words), `right` (number of the text's own), for lm-eval.

    The 32 words before are the context. The other phrases stand at the same place of other documents of the selection,
    so neither length nor place gives the answer away. Raises SourceError for fewer than 4 documents of 40 words.
    """
    from datasets import Dataset

    source = SourceConfig.model_validate(options["source"])
    mirror = Path(options["mirror"]) if options.get("mirror") else None
    chosen = select(_pieces(source, mirror), options["limit"], options["seed"])
    if len(chosen) < NUM_CHOICES:
        raise SourceError(
            f"Benchmark {options['benchmark']}: {source.url} has {len(chosen)} held-out documents of "
            f"{CONTEXT_WORDS + PHRASE_WORDS} words or more; it needs {NUM_CHOICES}. Raise held_out or the limit."
        )
    return {"test": Dataset.from_list([_with_choices(number, chosen) for number in range(len(chosen))])}


def item_options(config: BenchmarkConfig, *, seed: int, mirror: str) -> dict[str, Any]:
    """Arguments of the functions above. seed: of the draw. mirror: a folder, empty for the hub."""
    assert config.source is not None
    return {
        "benchmark": config.name,
        "source": config.source.model_dump(mode="json"),
        "fewshot": config.fewshot.model_dump(mode="json") if config.fewshot else None,
        "num_fewshot": config.num_fewshot,
        "limit": config.limit,
        "seed": seed,
        "mirror": mirror,
    }


def select(pairs: Iterable[tuple[Row, Item]], limit: int, seed: int) -> list[Item]:
    """`limit` items (0: all) drawn at random, in their own order, each with its `item_id`.

    pairs: a source's row and the item made of it. An item is in or out by a hash of seed and row alone: another order
    or process draws the same ones. Equal rows get ids of their own (`-1`, `-2` behind the hash).
    """
    seen: Counter[str] = Counter()

    def numbered() -> Iterator[tuple[bytes, int, Item]]:
        for number, (row, item) in enumerate(pairs):
            content = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
            name = hashlib.blake2b(content, digest_size=8).hexdigest()
            seen[name] += 1
            item_id = name if seen[name] == 1 else f"{name}-{seen[name] - 1}"
            yield hashlib.blake2b(f"{seed}:{item_id}".encode()).digest(), number, {**item, "item_id": item_id}

    drawn = heapq.nsmallest(limit, numbered(), key=lambda entry: entry[:2]) if limit else list(numbered())
    return [item for _, _, item in sorted(drawn, key=lambda entry: entry[1])]


def held_out_records(
    source: SourceConfig, kind: Kind, mirror: Path | None
) -> Iterator[tuple[int, Row, dict[str, Any]]]:
    """(number, row, canonical record); of a source with `held_out`, only what is kept from training."""
    is_by_content = source.held_out != "last_shard" and source.held_out_by == "content"
    if source.held_out and kind == "prompt" and is_by_content:
        raise SourceError(
            f"{source.url}: held_out_by: content splits problems by their answers too, so training and benchmark would "
            "be split differently. Set held_out_by: prompt on both."
        )
    record_of = open_adapter(source.adapter, source.url, kind, source.options, source.columns)
    ask = asking(source, kind)
    opened, belongs = open_part(source, "held_out" if source.held_out else "all", mirror)
    for index, row in opened.rows():
        record = record_of(index, row)
        if belongs(record):
            yield index, row, ask(record)


def _splits(read: Callable[[SourceConfig, Path | None], Iterator[tuple[Row, Item]]], options: Mapping[str, Any]) -> Any:
    from datasets import Dataset

    source = SourceConfig.model_validate(options["source"])
    mirror = Path(options["mirror"]) if options.get("mirror") else None
    splits = {"test": select(read(source, mirror), options["limit"], options["seed"])}
    if options.get("fewshot"):
        num_fewshot = options["num_fewshot"]
        examples = SourceConfig.model_validate(options["fewshot"])
        splits["fewshot"] = select(read(examples, mirror), num_fewshot, options["seed"])
        if len(splits["fewshot"]) < num_fewshot:
            raise SourceError(f"{examples.url} has {len(splits['fewshot'])} rows; num_fewshot asks for {num_fewshot}.")
    if not splits["test"]:
        raise SourceError(f"Benchmark {options['benchmark']}: {source.url} gave no items.")
    return {name: Dataset.from_list(items) for name, items in splits.items()}


def _rows(source: SourceConfig, mirror: Path | None) -> Iterator[tuple[Row, Item]]:
    if source.held_out:
        raise SourceError(f"{source.url}: held_out means nothing to a benchmark that reads rows as they are; remove it")
    check_effect(source, "row")
    for _, row in open_source(source.url, mirror).rows():
        yield row, with_names(row, source)


def _documents(source: SourceConfig, mirror: Path | None) -> Iterator[tuple[Row, Item]]:
    for _, row, record in held_out_records(source, "document", mirror):
        if record["text"].strip():
            yield row, {"text": record["text"]}


def _problems(source: SourceConfig, mirror: Path | None) -> Iterator[tuple[Row, Item]]:
    for index, row, record in held_out_records(source, "prompt", mirror):
        roles = [message["role"] for message in record["messages"]]
        if roles not in (["user"], ["system", "user"]):
            raise SourceError(
                f"{source.url}, row {index}: a benchmark's prompt is one user turn, maybe behind a system turn; "
                f"found {roles}."
            )
        check_reward_of_data(
            record["reward"], f"name one of these as the `reward` of {source.url} (its row {index} asks for another)"
        )
        choices = record["metadata"].get("choices", [])
        kept = {name: record[name] for name in ("messages", "answer", "reward", "metadata")}
        item = {
            "question": message_text(record["messages"][-1]),
            "system": message_text(record["messages"][0]) if len(roles) == 2 else "",
            "answer": record["answer"],
            "letters": [chr(ord("A") + number) for number in range(len(choices))],
            "record": json.dumps(kept, sort_keys=True, ensure_ascii=False, default=str),
        }
        yield row, item


def _pieces(source: SourceConfig, mirror: Path | None) -> Iterator[tuple[Row, Item]]:
    for _, row, record in held_out_records(source, "document", mirror):
        words = list(_WORD.finditer(record["text"]))
        if len(words) >= CONTEXT_WORDS + PHRASE_WORDS:
            cut, end = words[CONTEXT_WORDS - 1].end(), words[CONTEXT_WORDS + PHRASE_WORDS - 1].end()
            phrase = " ".join(record["text"][cut:end].split())  # its blank in front is lm-eval's target_delimiter
            yield row, {"context": record["text"][:cut], "phrase": phrase}


def _with_choices(number: int, chosen: list[Item]) -> Item:
    """The item with the phrases of the next three documents as wrong choices, in an order drawn from its id."""
    item = chosen[number]
    phrases = [chosen[(number + step) % len(chosen)]["phrase"] for step in range(NUM_CHOICES)]
    order = sorted(range(NUM_CHOICES), key=lambda k: hashlib.blake2b(f"{item['item_id']}:{k}".encode()).digest())
    return {
        "context": item["context"],
        "choices": [phrases[k] for k in order],
        "right": order.index(0),
        "item_id": item["item_id"],
    }
