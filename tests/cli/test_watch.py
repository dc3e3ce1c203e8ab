"""The live table: what it says of each stage, in units that fit, and that it fits its terminal."""

import io
import json
import re
import shutil
import time

import pytest
from rich.console import Console

from nanodag.cli import parameters
from nanodag.cli.live_table import LiveTable, fitting, make_console, print_markdown, stage_table
from nanodag.cli.plan import show_plan
from nanodag.cli.run import _Attended
from nanodag.cli.show import _print_run
from nanodag.run.progress import progress_of
from nanodag.store import Store
from tests.run_records import built, run_record, stage_record
from tests.store.making import KEY, publish


def progress(store, kind, *lines):
    """The progress of a stage of that kind which has written these lines a second apart."""
    began = time.time() - len(lines)
    folder = store.local / "work" / KEY
    folder.mkdir(parents=True)
    filled = [{"event": "step", "time": began + number + 0.5, **line} for number, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in filled))
    entry = stage_record(kind, state="running", key=KEY, started=began)
    return progress_of(store, run_record("r", stages={"s": entry}))[0]


STEPS = [{"step": n, "total": 1000, "loss": 4.0 / n, "tokens_per_second": 1234.5} for n in (1, 2)]
VALIDATION = {"event": "eval", "step": 2, "total": 1000, "validation_loss": 2.5}
READ = [{"event": "phase", "step": n * 10**6, "total": 8 * 10**6, "unit": "bytes"} for n in (1, 3)]
SCORE = {"event": "eval", "step": 1000, "benchmark": "add", "add": 0.25}
REQUESTS = {"event": "phase", "total": 2000, "phase": "sort", "unit": "requests", "of": 400}
ASKED = [{**REQUESTS, "step": 1000 + n, "done": n * 4 // 10} for n in (100, 300)]


@pytest.mark.parametrize(
    ("kind", "lines", "amount", "reached", "speed"),
    [
        ("sft", [], "loads its packages and data", "", ""),
        ("sft", [*STEPS, VALIDATION], "2/1,000 steps", "loss 2.000", "1,234 tok/s"),
        ("rl", [{"step": 3, "total": 24, "loss": 0.01, "reward": 0.4375}], "3/24 steps", "reward 0.438", ""),
        ("tokenizer", READ, "3.0/8.0 MB", "", "2.0 MB/s"),
        ("eval", [SCORE, *ASKED], "120/400 requests", "add 25.0 %", "80 requests/s"),  # of the benchmark under way
    ],
)
def test_each_kind_counts_in_its_own_unit_and_shows_what_it_has_reached(store, kind, lines, amount, reached, speed):
    found = progress(store, kind, *lines)
    assert (found.amount, found.reached, found.speed) == (amount, reached, speed)
    assert found.state == ("running" if lines else "starting")


def test_a_stage_that_has_published_and_is_not_yet_recorded_as_built_does_not_start_again(store):
    assert progress(store, "sft", *STEPS).state == "running"
    shutil.rmtree(store.local / "work")
    entry = stage_record("sft", state="running", key=KEY, started=time.time())
    (found,) = progress_of(store, run_record("r", stages={"s": entry}))
    assert (found.state, found.amount) == ("running", "")


def test_a_stage_that_waits_for_cores_is_queued_and_its_line_says_why(store):
    entry = stage_record("sft", reason="waits for 2 of 2 cores, held by rl of run a.", started=time.time())
    (found,) = progress_of(store, run_record("r", stages={"s": entry}))
    console = Console(file=io.StringIO(), width=200)
    with LiveTable(console, store) as watch:
        watch.show(run_record("r", stages={"s": entry}), {"name": "Running"})
    assert found.state == "queued" and "held by rl of run a" in console.file.getvalue()


def test_what_is_left_follows_from_the_speed_and_what_is_done_from_all_benchmarks(store, tmp_path):
    assert progress(store, "tokenizer", *READ).left_s == pytest.approx(2.5)
    assert progress(Store(tmp_path / "other"), "eval", SCORE, *ASKED).done == pytest.approx(0.65)


def test_a_finished_stage_shows_what_its_manifest_says(store, tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "x").write_text("x")
    config, metrics = {"benchmarks": [{"name": "sort"}, {"name": "add"}]}, {"add": 0.5, "sort": 0.415}
    artifact = publish(store, tmp_path / "made", kind="eval", config=config, metrics=metrics)
    (found,) = progress_of(store, run_record("r", stages={"s": built(artifact)}))
    assert (found.reached, found.done) == ("sort 41.5 %", 1.0)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_tables_of_runs_and_of_a_plan_fit_their_terminal(store, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("nanodag.cli.live_table.Console.is_terminal", True)
    _print_run(make_console(), run_record("r", stages={name: stage_record("eval") for name in ("eval_b", "s")}), "")
    show_plan([], preset="pocket", file="", on="cpu:2:avx2:64GiB", price_per_hour=1.0, as_json=False)
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert all(len(line) <= width for line in shown) and not any("…" in line for line in shown)
    assert any(line.split()[0] == "pretrain" and "min" in line for line in shown if line.strip())


@pytest.mark.parametrize("width", [70, 80, 120])
def test_the_table_fits_its_terminal_and_cuts_no_word(store, width):
    lines = [{"step": n, "total": 12_000, "loss": 4.0 / n, "tokens_per_second": 123456.0} for n in (1000, 2000)]
    found = progress(store, "pretrain", *lines)
    console = Console(file=io.StringIO(), width=width)
    console.print(stage_table([found], console))
    shown = console.file.getvalue()
    assert "…" not in shown and "2,000/12,000 steps" in shown and "loss 0.002" in shown
    assert all(len(line) <= width for line in shown.splitlines())
    assert ("123,456 tok/s" in shown, KEY[:12] in shown) == (width > 70, width == 120)


ROW = {"model": "a-model-of-a-long-name", "score": "33.8", "95 %": "29.2 to 38.5", "note": "worse than last night"}


@pytest.mark.parametrize(("width", "is_table"), [(80, True), (40, False)])
def test_a_row_wider_than_the_terminal_becomes_a_list_that_has_every_cell(width, is_table):
    console = Console(file=io.StringIO(), width=width)
    console.print(fitting(console, [ROW]))
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    pairs = [re.split(" {2,}", line.strip()) for line in lines if line.strip()]
    assert pairs == ([[*ROW], [*ROW.values()]] if is_table else [[*cell] for cell in ROW.items()])


def test_columns_of_a_group_are_left_out_together():
    console = Console(file=io.StringIO(), width=40)
    rows = [{"benchmark": "sort", "a": "1.0", "a 95 %": "(0.5 to 1.5)", "b": "2.0", "b 95 %": "(1.5 to 2.5)"}]
    console.print(fitting(console, rows, narrow=[["a 95 %", "b 95 %"]]))
    assert console.file.getvalue().split() == ["benchmark", "a", "b", "sort", "1.0", "2.0"]


def test_a_page_of_markdown_has_its_tables_cells_whole_in_a_narrow_terminal():
    console = Console(file=io.StringIO(), width=36)
    row = "| a\\|long\\_name\\_of\\_it | −1.0 (−2.0 to +0.5) |"
    print_markdown(console, f"# Tonight\n\n| model | − last night |\n| --- | ---: |\n{row}\n")
    shown = console.file.getvalue()
    assert "Tonight" in shown and re.search(r"model +a\|long_name_of_it *\n", shown)
    assert "− last night  −1.0 (−2.0 to +0.5)" in shown


@pytest.mark.parametrize(
    ("kinds", "commands"),
    [
        (["pretrain", "rl", "report"], ["report r", "chat r --web", "rollouts r"]),
        (["tokenizer", "sft"], ["chat r --web"]),
    ],
)
def test_the_end_of_a_run_says_what_is_next(store, monkeypatch, kinds, commands):
    monkeypatch.setattr(parameters, "_TYPED", [])  # what other tests have typed
    store.write_run(run_record("r", stages={kind: stage_record(kind) for kind in kinds}, flow_run="f"))
    console = Console(file=io.StringIO(), width=200)
    attended = _Attended(console, store, None, None, "r", "f")
    assert attended._tell_end({"type": "COMPLETED", "name": "Completed", "message": "all"}) == 0
    said = [line for line in console.file.getvalue().splitlines() if line.startswith("Next: ")]
    assert [line.partition("nanodag ")[2] for line in said] == commands
