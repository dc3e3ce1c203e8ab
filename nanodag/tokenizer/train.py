"""Trains a tokenizer: `python -m nanodag.tokenizer.train job.json`.

Output: a folder with tokenizer.json and tokenizer_config.json, chat template included, which every later stage copies
into its model. The same config and data give the same bytes.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.host.beside import table_beside
from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
from nanodag.tokenizer.encoding import Encoding
from nanodag.worker.job import MetricsLog, finish, leave_stopped, load_job, stop_requested

log = logging.getLogger("nanodag.tokenizer")

_DOCUMENT_CHARACTERS = 10_000  # one long document must not outweigh many short ones
_MEASURED_BYTES = 1 << 20
SAMPLES: dict[str, str] = table_beside(__file__)


@dataclass
class TrainingText:
    """The texts a tokenizer learns from, in the order of the mixture; counted while they are read.

    Iterating ends after max_bytes of UTF-8, or when every source has been read once.
    """

    sources: Sequence[SourceConfig]
    seed: int
    max_bytes: int
    mirror: Path | None = None
    on_text: Callable[["TrainingText"], None] = lambda text: None
    num_documents: int = 0
    num_bytes: int = 0
    measured: list[str] = field(default_factory=list)  # the first texts, for bytes per token

    def __iter__(self) -> Iterator[str]:
        mixture = Mixture(self.sources, kind="document", seed=self.seed, once=True, mirror=self.mirror)
        for drawn in mixture:
            text = drawn.record["text"][:_DOCUMENT_CHARACTERS]
            if self.num_bytes < _MEASURED_BYTES:
                self.measured.append(text)
            self.num_documents += 1
            self.num_bytes += len(text.encode("utf-8", "surrogatepass"))
            self.on_text(self)
            yield text
            if self.num_bytes >= self.max_bytes:
                return


def train_tokenizer(text: TrainingText, vocabulary: int, folder: Path) -> dict[str, Any]:
    """Train on the text, write the tokenizer's folder, and return its metrics.

    Raises ConfigError when the text is too little for the vocabulary.
    """
    ranks = train_bpe(iter(text), vocabulary)
    save_tokenizer(ranks, folder)
    encoding = Encoding(folder)
    return {
        "vocabulary": encoding.size,
        "training_documents": text.num_documents,
        "training_bytes": text.num_bytes,
        "bytes_per_token": _bytes_per_token(encoding, text.measured),
        **{f"bytes_per_token_{kind}": _bytes_per_token(encoding, [sample]) for kind, sample in SAMPLES.items()},
    }


def _bytes_per_token(encoding: Encoding, texts: Sequence[str]) -> float:
    """UTF-8 bytes of the texts over their tokens."""
    num_tokens = sum(map(len, encoding.encode_batch(texts)))
    return round(sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) / max(1, num_tokens), 4)


def main() -> None:
    job = load_job()
    config, metrics_log = job.config, MetricsLog(job)
    started = time.monotonic()

    def watch(text: TrainingText) -> None:
        if stop_requested():
            leave_stopped()
        if text.num_documents % 10_000 == 1:
            metrics_log.write(text.num_bytes, total=config.max_bytes, event="phase", phase="reading", unit="bytes")

    text = TrainingText(config.data, config.seed, config.max_bytes, job.mirror, watch)
    metrics = train_tokenizer(text, config.vocabulary, job.output)
    log.info("Trained %d tokens on %d bytes: %s", config.vocabulary, text.num_bytes, metrics)
    metrics_log.write(text.num_bytes, total=text.num_bytes, unit="bytes", **metrics)
    metrics_log.close()
    finish(job, metrics=metrics, cost={"bytes": text.num_bytes, "work_seconds": round(time.monotonic() - started, 3)})


if __name__ == "__main__":
    main()
