"""The live table: what it says of each stage, in units that fit, and that it fits its terminal."""

import io
import json
import time

import pytest
from rich.console import Console

from nanodag.cli.live_table import StageTable
from nanodag.run.progress import progress_of
from nanodag.store import Store

KEY = "a" * 40


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def progress(store, kind, *lines, state="running"):
    """The progress of a stage of that kind which has written these lines a second apart."""
    began = time.time() - len(lines)
    folder = store.local / "work" / KEY
    folder.mkdir(parents=True)
    filled = [{"event": "step", "time": began + number + 0.5, **line} for number, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in filled))
    entry = {"kind": kind, "state": state, "key": KEY, "started": began}
    return progress_of(store, {"order": ["s"], "stages": {"s": entry}})[0]


def test_a_stage_that_has_said_nothing_yet_is_starting(store):
    found = progress(store, "sft")
    assert (found.state, found.amount, found.reached) == ("starting", "", "")


def test_training_counts_steps_and_tokens_and_shows_its_loss(store):
    lines = [{"step": n, "total": 1000, "loss": 4.0 / n, "tokens_per_second": 1234.5} for n in (1, 2)]
    validation = {"event": "eval", "step": 2, "total": 1000, "validation_loss": 2.5}
    found = progress(store, "sft", *lines, validation)
    assert (found.state, found.amount, found.reached) == ("running", "2/1,000 steps", "loss 2.000")
    assert found.speed == "1,234 tok/s"


def test_rl_shows_its_reward(store):
    found = progress(store, "rl", {"step": 3, "total": 24, "loss": 0.01, "reward": 0.4375})
    assert (found.amount, found.reached) == ("3/24 steps", "reward 0.438")


def test_a_tokenizer_counts_bytes(store):
    read = [{"event": "phase", "step": n * 10**6, "total": 8 * 10**6, "unit": "bytes"} for n in (1, 3)]
    found = progress(store, "tokenizer", *read)
    assert (found.amount, found.speed) == ("3.0/8.0 MB", "2.0 MB/s")
    assert found.left_s == pytest.approx(2.5)


def test_an_evaluation_counts_requests_of_the_benchmark_under_way_and_shows_the_last_score(store):
    common = {"event": "phase", "total": 2000, "phase": "sort", "unit": "requests", "of": 400}
    lines = [{**common, "step": 1000 + n, "done": n * 4 // 10} for n in (100, 300)]
    found = progress(store, "eval", {"event": "eval", "step": 1000, "benchmark": "add", "add": 0.25}, *lines)
    assert (found.amount, found.reached, found.speed) == ("120/400 requests", "add 25.0 %", "80 requests/s")
    assert found.done == pytest.approx(0.65)


def test_a_finished_stage_shows_what_its_manifest_says(store, tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "x").write_text("x")
    about = {"stage": "eval_sft", "lineage": {}, "sources": {}, "cost": {}, "environment": {}}
    artifact = store.publish(
        KEY,
        tmp_path / "made",
        kind="eval",
        config={"benchmarks": [{"name": "sort"}, {"name": "add"}]},
        metrics={"add": 0.5, "sort": 0.415},
        **about,
    )
    entry = {"kind": "eval", "state": "built", "key": KEY, "attempt": artifact.attempt}
    (found,) = progress_of(store, {"order": ["s"], "stages": {"s": entry}})
    assert (found.reached, found.done) == ("sort 41.5 %", 1.0)


@pytest.mark.parametrize("width", [70, 80, 120])
def test_the_table_fits_its_terminal_and_cuts_no_word(store, width):
    lines = [{"step": n, "total": 12_000, "loss": 4.0 / n, "tokens_per_second": 123456.0} for n in (1000, 2000)]
    found = progress(store, "pretrain", *lines)
    console = Console(file=io.StringIO(), width=width)
    console.print(StageTable([found]))
    shown = console.file.getvalue()
    assert "…" not in shown and "2,000/12,000 steps" in shown and "loss 0.002" in shown
    assert all(len(line) <= width for line in shown.splitlines())
    assert ("123,456 tok/s" in shown, KEY[:12] in shown) == (width > 70, width == 120)
