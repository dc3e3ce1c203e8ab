import html.parser
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nanodag.config.kinds.small_stages import ReportStage
from nanodag.errors.words import counted, duration, size
from nanodag.report import tables, words
from nanodag.report.__main__ import contamination_table, training_urls
from nanodag.report.gather import columns_of, comparisons_of, stages_of
from nanodag.report.lineage import lineage_svg
from nanodag.report.page import build_report, to_html, to_markdown
from nanodag.report.plots import overlaid, panels_of
from nanodag.worker.job import Job, write_job
from tests.report.finished_run import finished_run, markup_of, write_lines


@pytest.fixture
def run(tmp_path):
    return finished_run(tmp_path)


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def change_results(run, name, *, samples=(), **benchmarks):
    """Have an eval's results say more of a benchmark: a copy of `sort` where it has another name."""
    path = Path(run["stages"][name]["files"]) / "results.json"
    results = json.loads(path.read_text())
    for benchmark, more in benchmarks.items():
        results["benchmarks"][benchmark] = results["benchmarks"]["sort"] | more
    path.write_text(json.dumps(results | ({"samples": samples} if samples else {})))


def samples_of(run, name, benchmark="sort"):
    return Path(run["stages"][name]["files"]) / "samples" / f"{benchmark}.jsonl"


def report_of(run, **more):
    return build_report("r1", run, **{"price_per_hour": 0.0, "contamination": None, "missing": (), **more})


def test_stages_come_after_their_inputs_whatever_order_the_job_lists_them_in(run):
    shuffled = {**run, "stages": dict(sorted(run["stages"].items()))}
    assert list(shuffled["stages"])[:3] == ["control", "eval_base", "eval_control"]
    expected = ["tokenizer", "pretrain", "sft", "eval_base", "control", "rl", "eval_sft", "eval_control", "eval_rl"]
    assert list(stages_of(shuffled)) == expected == list(stages_of(run))


def test_scores_have_models_as_columns_in_the_order_of_the_dag_two_of_a_kind_named_by_their_stages(run):
    table = tables.scores_table(columns_of(stages_of(run)))
    assert table.headers == ["benchmark", "BASE", "SFT", "CONTROL", "RL"]
    assert texts(table)[0] == ["sort", "0.0 ± 10.0", "40.0 ± 10.0", "50.0 ± 10.0", "80.0 ± 10.0"]
    assert texts(table)[1] == ["bits_per_byte", "1.600 ± 0.050", "1.700 ± 0.050", "1.700 ± 0.050", "1.800 ± 0.050"]
    assert table.rows[0][4].detail == "60.0 to 100.0"
    assert table.rows[0][0].detail == "exact_match, %, 10 items"


def test_models_are_compared_with_the_one_they_come_from_and_with_each_other_with_examples(run):
    stages = stages_of(run)
    found = comparisons_of(columns_of(stages), stages)
    pairs = [(c.after.label, c.before.label) for c in found if c.benchmark == "sort"]
    assert pairs == [("SFT", "BASE"), ("CONTROL", "SFT"), ("RL", "SFT"), ("RL", "CONTROL")]
    by_pair = {(c.benchmark, c.after.label, c.before.label): c for c in found}
    rl = by_pair["sort", "RL", "SFT"]
    assert (rl.found.difference, rl.found.num_higher, rl.found.num_lower) == (pytest.approx(0.4), 4, 0)
    assert (rl.found.p_value, rl.verdict, rl.same_form) == (0.125, "no clear difference", True)
    assert not by_pair["sort", "SFT", "BASE"].same_form
    assert by_pair["sort", "CONTROL", "SFT"].verdict == "no clear difference"
    assert by_pair["bits_per_byte", "RL", "SFT"].verdict == "worse"  # more bits are worse
    assert [example["prompt"] for example in tables.examples_of(rl, turned="right")] == [
        f"Sort {n} | x" for n in (4, 5, 6)
    ]
    assert tables.examples_of(rl, turned="wrong") == []


def test_programs_that_passed_and_failed_are_shown_and_none_of_their_text_is_markup(run):
    path = samples_of(run, "eval_rl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        verdict, error = ("passed", "") if number < 4 else ("failed", "NameError: <script> (line 2 of the program)")
        line["details"] = {"program": f"def f():\n    return '<script>```{number}'", "verdict": verdict, "error": error}
    write_lines(path, lines)
    report = report_of(run)
    page, markdown = markup_of(to_html(report)), to_markdown(report)
    assert "sort: programs of RL that passed" in page and "sort: programs of RL that failed" in page
    assert page.count("return &#39;&lt;script&gt;```") == 4  # two of each
    assert "all tests passed" in page and "NameError: &lt;script&gt; (line 2 of the program)" in page
    assert "<script>" not in page
    assert "  ````\n  def f():\n      return '<script>```0'\n  ````\n" in markdown


def test_means_over_many_tasks_stand_first(run):
    for stage in ("eval_rl", "eval_sft"):
        change_results(run, stage, chat_core={"metric": "chat_core"})
        samples = samples_of(run, stage).read_text().replace("exact_match", "chat_core")
        samples_of(run, stage, "chat_core").write_text(samples)
    stages = stages_of(run)
    assert [row[0] for row in texts(tables.scores_table(columns_of(stages)))] == ["chat_core", "sort", "bits_per_byte"]
    assert "chat_core" in {c.benchmark for c in comparisons_of(columns_of(stages), stages)}


def test_time_tokens_and_cost_add_up(run):
    table = tables.stages_table(stages_of(run), 2.0)
    rows = {row[0]: row for row in texts(table)}
    #                         2 ranks for an hour at 2.00 each
    assert rows["pretrain"] == ["pretrain", "1 h 0 min", "1 h 56 min", "1.5 M", "", "417", "2 T", "31.0 %", "", "4.00"]
    assert rows["all"][1:4] == ["1 h 1 min", "1 h 57 min", "1.5 M"]  # 3680 s; 7024 s
    assert rows["all"][9] == "4.04"  # and 80 s on one rank: .0444


def test_the_report_says_how_many_rows_were_trained_and_how_often(run):
    counts = [("a", 540, 10_800), ("b", 200, 300), ("c", 7, 7)]
    trained = [{"url": url, "rows": rows, "trained": total} for url, rows, total in counts]
    run["stages"]["sft"]["metrics"]["rows_trained"] = trained
    assert texts(tables.rows_table(stages_of(run))) == [
        ["sft", "a", "540", "20 times"],
        ["sft", "b", "200", "once, 100 of them once more"],
        ["sft", "c", "7", "once"],
    ]
    assert tables.reached_table(stages_of(run)) is None


def test_config_says_where_values_come_from_and_what_the_dial_would_have_said(run):
    table = tables.config_table(stages_of(run)["sft"], run["origins"])
    assert texts(table)[0] == ["num_epochs", "3", "override"] and table.rows[0][2].detail == "said 1"
    assert [row[2].text for row in table.rows[1:]] == ["default", "default"]


def answer(run, **right):
    """Let evals answer 60 sorting problems, of which so many are right."""
    for name, count in right.items():
        lines = ({"id": f"s{n}", "scores": {"exact_match": float(n < count)}} for n in range(60))
        write_lines(samples_of(run, f"eval_{name}"), lines)


def comparison_table(run):
    """(after, before) on `sort` -> p and verdict, as the page shows them."""
    shown = [part.table for part in report_of(run).sections[1].parts[2:] if part.table]
    rows = [row for table in shown for row in table.rows if row[0].text == "sort"]
    return {row[1].text: (row[4].text, row[2].verdict) for row in rows}


def test_the_p_that_is_shown_decides_and_not_the_interval(run):
    answer(run, base=0, sft=20, control=20, rl=15)
    stages = stages_of(run)
    found = next(c for c in comparisons_of(columns_of(stages), stages) if c.after.label == "RL" and c.is_parent)
    assert found.found.p_value == 0.0625 and found.found.high < 0, "the interval alone would call it worse"
    shown = comparison_table(run)
    assert shown["RL − SFT"] == ("0.250", "no clear difference")  # 4 of 8 are no smaller: 4 x 0.0625
    assert shown["SFT − BASE"] == ("< 0.001", "better")


def test_one_of_many_comparisons_is_not_called_worse_by_chance(run):
    answer(run, base=20, sft=20, control=20, rl=13)  # 7 lost, none won: p = 2/128, which alone would do
    assert comparison_table(run)["RL − SFT"] == ("0.078", "no clear difference")  # 5 of 8 are no smaller: 5 x 0.0156
    answer(run, rl=10)
    assert comparison_table(run)["RL − SFT"] == ("0.010", "worse")  # 5 x 2/1024


def test_what_is_worse_stands_first_with_its_verdict_below_and_what_is_unclear_is_folded(run):
    answer(run, base=20, sft=20, control=40, rl=20)
    report = report_of(run)
    _, _, clear, unclear = report.sections[1].parts
    verdicts = [row[2].verdict for row in clear.table.rows]
    assert verdicts[-1] == "better" and set(verdicts[:-1]) == {"worse"}
    assert (clear.folded, unclear.folded) == (False, True) and unclear.heading.startswith("no clear difference: ")
    page = to_html(report)
    assert page.index('<span class="verdict bad">worse</span>') < page.index('<span class="verdict good">better</span>')
    assert page.index("<summary>no clear difference") < page.index('<span class="verdict ">no clear diff')
    assert '<table class=" many">' in page and 'data-column="difference">' in page, "a narrow screen reads downwards"


def test_the_first_tiles_are_the_last_models_scores_then_the_largest_gain_and_loss_in_one_form(run):
    answer(run, base=30, sft=5, control=5, rl=50)
    score, bits, gain, loss = report_of(run).cards[:4]
    assert (score.text, score.detail) == ("80.0 %", "sort of RL, 60.0 to 100.0")
    assert (bits.text, bits.detail) == ("1.800", "bits_per_byte of RL, 1.700 to 1.900")
    assert (gain.text, gain.detail) == ("+75.0 points", "largest gain: sort, RL over SFT")
    assert loss.text == "no loss", "BASE was asked in another form, so the 41.7 points that SFT is behind it are none"
    change_results(run, "eval_base", sort={"form": "problems_chat"})
    assert [c.detail for c in report_of(run).cards[2:4]][1] == "largest loss: sort, SFT over BASE"


def test_a_stages_row_tells_tokens_trained_and_read_its_tries_and_its_share_of_documents(run):
    run["stages"]["rl"]["cost"] = {"seconds": 10.0, "tokens": 3000, "forward_tokens": 2000, "flops": 1e6}
    run["stages"]["eval_rl"]["cost"] = {"seconds": 5.0, "forward_tokens": 500, "flops": 1e3}
    run["stages"]["control"]["cost"] = {"seconds": 100.0, "earlier_seconds": 62.0, "num_attempts": 3}
    run["stages"]["sft"]["metrics"]["document_share"] = 0.254
    table = tables.stages_table(stages_of(run), 0.0)
    rows = {row[0]: row for row in texts(table)}
    assert table.headers[3:6] == ["trained", "read", "trained/s"]
    assert (rows["rl"][3:6], rows["eval_rl"][3:6]) == (["3 k", "2 k", "300"], ["", "500", ""])
    assert rows["all"][3:5] == ["1.5 M", "2.5 k"]
    details = {row[0].text: (row[1].detail, row[3].detail) for row in table.rows}
    assert details["control"] == ("3 tries, the last 38 s", "") and rows["control"][1] == "1 min 40 s"
    assert (details["sft"], details["pretrain"]) == (("", "25 % documents"), ("", ""))


def test_what_is_stale_rl_that_learned_nothing_and_prompts_that_were_too_long_are_said_first(run):
    run["stages"]["rl"]["metrics"] = {"version": 0, "eval_too_long": 2}
    run["stale"] = {"eval_rl": "rl was built since"}
    change_results(run, "eval_rl", sort={"too_long": 3})
    report = report_of(run)
    assert sorted(report.warnings) == [
        "eval_rl is stale: rl was built since.",
        "eval_rl sort: the prompts of 3 of 10 items were too long for the model.",
        "rl learned nothing: no update of the weights was made.",
        "rl: 2 held-out prompts too long to be asked.",
    ]
    for page in (to_html(report), to_markdown(report)):
        assert page.index("rl learned nothing") < page.index("Scores")
    row = tables.scores_table(columns_of(stages_of(run))).rows[0]
    assert [cell.detail for cell in row[3:]] == ["30.0 to 70.0", "60.0 to 100.0, 3 too long"]


def test_metrics_over_samples_and_counts_stand_beside_the_score_and_the_best_answer_is_shown(run):
    over_two = {"metric": "pass@2", "base_metric": "exact_match", "sampling": "2 samples, temperature 1", "unparsed": 4}
    for stage, right in (("eval_sft", 0), ("eval_rl", 1)):
        change_results(run, stage, sort={**over_two, "truncated": right})
        records = [
            {"id": f"s{n}", "scores": {"pass@2": float(right and n == 3)}, "prompt": f"Sort {n}", "target": "1"}
            | {"samples": [{"output": f"{stage} {n} {k}", "scores": {"exact_match": right * k}} for k in (0, 1)]}
            for n in range(10)
        ]
        write_lines(samples_of(run, stage), records)
    stages = stages_of(run)
    columns = columns_of(stages)
    row = tables.scores_table(columns).rows[0]
    assert row[0].detail == "exact_match, %, 10 items"  # of the first model, which has it
    assert [cell.detail.partition(", ")[2] for cell in row[2:]] == ["4 unparsed", "", "4 unparsed, 1 truncated"]
    assert tables.scores_table(columns[1:2]).rows[0][0].detail == "pass@2 of exact_match, %, 10 items"
    (comparison,) = [c for c in comparisons_of(columns, stages) if c.metric == "pass@2"]
    assert (comparison.before.label, comparison.after.label, comparison.found.num_higher) == ("SFT", "RL", 1)
    (example,) = tables.examples_of(comparison, turned="right")
    assert (example["prompt"], example["before"], example["after"]) == ("Sort 3", "eval_sft 3 0", "eval_rl 3 1")


def test_evals_of_one_benchmark_that_asked_other_items_are_not_compared_and_no_report_is_lost(run):
    stages = stages_of(run)
    before = comparisons_of(columns_of(stages), stages)
    lost = next(c for c in before if c.is_parent)
    path = lost.after.samples_path(lost.benchmark)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    after = comparisons_of(columns_of(stages), stages)
    assert after and (lost.benchmark, lost.after.label) not in {(c.benchmark, c.after.label) for c in after}


HOSTILE = "<script>alert(1)</script>\n# not a title | [x](http://a) `c` *b* $x^{$ &lt; ~~y~~"


def test_nothing_that_a_user_names_becomes_markup(run):
    stages = run["stages"]
    run["description"], run["preset"] = HOSTILE, HOSTILE
    run["stale"] = {HOSTILE: HOSTILE}
    stages["sft"]["config"]["note"] = HOSTILE
    stages["rl"]["metrics"] = {HOSTILE: HOSTILE}
    stages["rl"]["environment"] = {HOSTILE: HOSTILE}
    benchmark = HOSTILE.replace("/", "")
    for stage in ("eval_rl", "eval_sft"):
        stages[stage]["config"]["benchmarks"] += [{"name": benchmark}]
        change_results(run, stage, samples=[{"prompt": HOSTILE, "completion": HOSTILE}], **{benchmark: {}})
        item = dict.fromkeys(("prompt", "target", "output"), HOSTILE)
        lines = [{"id": f"{n}", "scores": {"exact_match": float(stage == "eval_rl")}, **item} for n in range(3)]
        write_lines(samples_of(run, stage, benchmark), lines)
    run["stages"] = {HOSTILE if name == "control" else name: raw for name, raw in stages.items()}
    rows = [[tables.Cell(text=HOSTILE, detail=HOSTILE, code=True)]]
    found = tables.Table(headers=[HOSTILE], rows=rows)
    report = replace(report_of(run, missing=[HOSTILE], contamination=found), title=HOSTILE)
    page = markup_of(to_html(report))
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and "<script" not in page and "alert(1)" in page
    text = to_markdown(report)
    assert "alert(1)" in text
    for mark in ("<script", "[x]", "`c`", "*b*", "$x", "~~y", "&lt;"):
        assert not re.search(r"(?<!\\)" + re.escape(mark), text), mark
    assert not re.search(r"^# not a title", text, flags=re.MULTILINE)


class Checker(html.parser.HTMLParser):
    """Fails at tags that do not nest, and lists what a page would load."""

    def __init__(self):
        super().__init__()
        self.open, self.loaded, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.loaded += [attributes[name] for name in ("src", "href", "xlink:href") if name in attributes]
        if tag not in ("meta", "link", "br", "img", "use"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in ("use",):
            assert self.open.pop() == tag, (tag, self.open)


def test_the_page_is_well_formed_and_loads_nothing(run):
    page = markup_of(to_html(report_of(run)))
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert all(target.startswith(("#", "data:image/svg+xml,")) for target in checker.loaded)
    assert {target[1:] for target in checker.loaded if target.startswith("#")} <= set(checker.ids)
    assert len(set(checker.ids)) == len(checker.ids)
    assert "rl says &lt;b&gt;" in page and "rl says <b>" not in page
    assert "http://" not in page.replace("http://www.w3.org/", "")


def test_the_same_run_gives_the_same_bytes(run):
    one, again = report_of(run), report_of(run)
    assert (to_html(one), to_markdown(one)) == (to_html(again), to_markdown(again))


def test_markdown_tables_keep_their_columns(run):
    text = to_markdown(report_of(run))
    table = text[text.index("| benchmark") :].partition("\n\n")[0].splitlines()
    assert [line.count("|") for line in table] == [6] * 4  # headers, rule, two benchmarks
    assert "| sort (exact\\_match, %, 10 items) | 0.0 ± 10.0 (0.0 to 20.0) | 40.0 ± 10.0" in text
    assert "rl says \\<b\\>" in text
    assert "asked: Sort 4 \\| x" in text


def test_a_report_of_a_run_that_got_nowhere_still_stands(run):
    run["stages"] = {"tokenizer": run["stages"]["tokenizer"]}
    report = report_of(run, missing=["rl", "eval_rl"])
    assert "without rl, eval_rl: no result" in report.subtitle
    assert [section.title for section in report.sections] == ["Stages", "Time, tokens and cost", "Lineage", "Config"]
    to_html(report), to_markdown(report)


def test_the_picture_of_the_lineage_has_a_box_a_stage_and_an_arrow_an_input(run):
    stages = stages_of(run)
    picture = ElementTree.fromstring(lineage_svg(stages))
    count = {kind: len(picture.findall(f"{{http://www.w3.org/2000/svg}}{kind}")) for kind in ("rect", "path")}
    assert count == {"rect": 9, "path": 8}


def test_curves_show_what_was_recorded(run):
    stages = stages_of(run)
    (loss,) = panels_of(stages["pretrain"])
    assert loss.lines["loss"] == ([1.0, 2.0, 3.0], [2.0, 1.0, 0.0])
    assert loss.levels == {}
    stages["pretrain"].lines.append({"event": "eval", "step": 3, "core": 0.2})
    _, core = panels_of(stages["pretrain"])
    assert (core.lines, core.levels) == ({"CORE": ([3.0], [0.2])}, {"GPT-2": 0.2565})
    (reward,) = panels_of(stages["rl"])
    assert reward.lines["rollouts"][1] == pytest.approx([1 / 3, 2 / 3, 1])
    stages["rl"].lines.append({"event": "eval", "step": 3, "benchmark": "sort", "benchmark_sort": 0.25})
    _, scores = panels_of(stages["rl"])
    assert (scores.title, scores.lines) == ("Benchmarks", {"sort": ([3.0], [0.25])})
    stages["rl"].lines.append({"event": "step", "step": 4, "turns": 2.5, "sequences": 1.5})
    turns = next(panel for panel in panels_of(stages["rl"]) if panel.title == "Turns of a sample")
    assert turns.lines == {"turns": ([4], [2.5]), "sequences": ([4], [1.5])}
    waits = {"seconds_step": 4.0, "seconds_samplers_wait": 1.0, "trainer_peak_bytes": 2_000_000_000}
    stages["rl"].lines.append({"event": "step", "step": 5, **waits})
    *_, busy, memory = panels_of(stages["rl"])
    assert (busy.lines, memory.lines) == ({"samplers": ((5,), (0.75,))}, {"trainer": ([5], [2e9])})


def test_an_evaluation_under_way_says_its_benchmark_in_its_own_way_and_has_no_curves(run):
    stage = stages_of(run)["eval_rl"]
    stage.lines.append({"event": "eval", "step": 1, "benchmark": "sort", "sort": 0.5})
    assert panels_of(stage) == []


def test_stages_of_several_runs_are_drawn_over_each_other_a_line_and_a_colour_each(run):
    stages = stages_of(run)
    stages["control"].lines.append({"event": "eval", "step": 3, "validation_bits_per_byte": 2.0})
    loss, validation = overlaid({"a": stages["pretrain"], "b": stages["control"], "c": stages["pretrain"]})
    assert loss.title == "Training loss (nats)" and loss.lines == {
        "a": ([1.0, 2.0, 3.0], [2.0, 1.0, 0.0]),
        "b": ((), ()),
        "c": ([1.0, 2.0, 3.0], [2.0, 1.0, 0.0]),
    }
    assert (validation.lines["b"], validation.marked, validation.smooth) == (([3.0], [2.0]), ["a", "b", "c"], [])
    rl = overlaid({"a": stages["rl"]})
    assert [panel.title for panel in rl] == ["Reward: rollouts"]


def test_a_policys_own_evaluations_are_a_table_of_start_best_and_last(run):
    stage = stages_of(run)["rl"]
    assert tables.policy_table(stage) is None
    for step, right, loss in ((0, 0.25, 2.0), (10, 0.75, 1.0), (20, 0.5, 1.5)):
        asked = {"event": "eval", "step": step, "low": right - 0.125, "high": right + 0.125}
        stage.lines.append({**asked, "eval_reward": right})
        if step:
            stage.lines.append({**asked, "benchmark": "sort", "metric": "exact_match", "benchmark_sort": right})
        bits = {"metric": "bits_per_byte", "higher_is_better": False, "benchmark_bits": loss}
        stage.lines.append({"event": "eval", "step": step, "benchmark": "bits", **bits})
    table = tables.policy_table(stage)
    assert texts(table) == [
        ["held-out prompts", "0.250", "0.750", "0.500"],
        ["bits", "2.000", "1.000", "1.500"],
        ["sort", "", "75.0", "50.0"],
    ]
    assert " | ".join(cell.detail for cell in table.rows[2][2:]) == "62.5 to 87.5, step 10 | 37.5 to 62.5, step 20"
    assert [cell.detail for cell in table.rows[2][:2]] == ["exact_match", ""]
    assert table.rows[1][2].detail == "step 10"


def test_what_a_stage_reached_is_said_in_one_line(run):
    run["stages"]["sft"]["metrics"] = {"loss": 1.23456, "stopped_early": True, "steps": 12_000, "mfu": None}
    run["stages"]["pretrain"]["cost"]["mfu"] = None
    stages = stages_of(run)
    assert texts(tables.reached_table(stages)) == [["sft", "loss 1.2346 · stopped early yes · steps 12,000"]]
    assert {row[0]: row for row in texts(tables.stages_table(stages, 0.0))}["pretrain"][7] == ""
    assert "stopped early yes" in to_markdown(report_of(run))


def test_numbers_in_words():
    assert [duration(seconds) for seconds in (0.44, 59.6, 3725, -1.0)] == ["0.4 s", "1 min 0 s", "1 h 2 min", ""]
    assert [words.count(number) for number in (1_640_000, 3.3e21)] == ["1.64 M", "3.3e+03 E"]
    assert [words.signed(-0.021, "bits_per_byte"), words.signed(0.183, "acc")] == ["−0.021", "+18.3"]
    assert [words.probability(p) for p in (0.0004, 0.0496, 0.0156)] == ["< 0.001", "0.04960", "0.016"]
    assert (size(1610612736), counted(2000, "entry", "entries")) == ("1.6 GB", "2,000 entries")


def test_contamination_finds_an_item_that_stands_in_training_data(tmp_path):
    sentence = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    training, benchmark = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    write_lines(training, [{"text": f"before {sentence} after"}])
    write_lines(benchmark, [{"q": text} for text in (sentence, sentence.replace("seven", "7"), "too short")])
    sft = {"kind": "sft", "config": {"data": [{"url": f"file:{training}"}]}}
    stages = {"sft": sft, "e": {"kind": "eval", "config": {}}}
    config = ReportStage(kind="report", contamination=(f"file:{benchmark}",))
    table = contamination_table(stages, config.contamination, None)
    assert texts(table)[0][2:5] == ["1", "2", "50.0 %"]
    assert table.rows[0][3].detail == "1 shorter than 13 words"
    assert training_urls(stages) == [f"file:{training}"]
    assert contamination_table(stages, (), None) is None


def test_a_source_that_could_not_be_looked_for_is_not_called_clean(tmp_path):
    texts = {"train": "some words", "empty": "", "short": "too short", "long": " ".join(f"w{n}" for n in range(20))}
    for name, text in texts.items():
        write_lines(tmp_path / f"{name}.jsonl", [{"text": text}])
    training, empty, short, long = (f"file:{tmp_path}/{name}.jsonl" for name in texts)
    stages = {"sft": {"kind": "sft", "config": {"data": [{"url": training}, {"url": empty}]}}}
    config = ReportStage(kind="report", contamination=(short, long))
    cells = [row[2] for row in contamination_table(stages, config.contamination, None).rows]
    assert [(cell.text, cell.detail, cell.tone) for cell in cells] == [
        ("not checked", "of 1 item none has 13 words", ""),
        ("0", "", "good"),
        ("not checked", "of 1 item none has 13 words", ""),
        ("not checked", "the training source has no text", ""),
    ]


def test_the_worker_writes_both_pages(run, tmp_path):
    config = ReportStage(kind="report", inputs={"rl": "rl", "lost": "lost"}, seed=0)
    (tmp_path / "ws").mkdir()
    job = Job(name="report", run="r1", config=config, inputs={"rl": tmp_path}, workspace=tmp_path / "ws", context=run)
    command = [sys.executable, "-m", "nanodag.report", str(write_job(job))]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert {path.name for path in job.output.iterdir()} == {"report.html", "report.md"}
    assert "without lost: no result" in (job.output / "report.md").read_text()
    assert json.loads((job.workspace / "result.json").read_text())["metrics"]["report_html_bytes"] > 10_000


def test_what_rl_does_not_train_on_is_drawn_beside_the_reward_and_said_when_it_falls(run):
    run["stages"]["rl"]["config"]["reward"] = [
        {"name": "model:/rm", "weight": 1.0},
        {"name": "model:/rm2", "weight": 0.0},
        {"name": "auto", "weight": 0.0},
    ]
    falls = [0.5, 0.6, 0.7, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    lines = [
        {"event": "step", "step": n, "reward": float(n), "reward_model": float(n), "reward_model_2": 0.1 * n}
        | {"reward_exact": value, "reward_failed": 0}
        for n, value in enumerate(falls, 1)
    ]
    write_lines(Path(run["stages"]["rl"]["records"]) / "metrics.jsonl", lines)
    rl = stages_of(run)["rl"]
    assert rl.watched == {"reward_model_2": "model_2", "reward_exact": "exact"}
    beside = next(panel for panel in panels_of(rl) if "does not see" in panel.title)
    assert list(beside.lines) == ["reward", "exact", "model_2"]
    assert beside.relative and beside.lines["exact"][1][3] == 0.8 and beside.lines["reward"][1][-1] == 12.0
    (said,) = build_report("r", run, price_per_hour=0, contamination=None, missing=()).warnings
    assert said.startswith(
        "rl went too far: from step 4 on the reward rose, 4 to 12, and exact, which it does not see, "
    )


def test_a_reward_models_last_validation_is_drawn_as_calibration_without_bins_that_are_empty(run):
    sure = {
        "validation_sure_55": 0.5,
        "validation_right_55": 0.6,
        "validation_sure_65": 0.0,
        "validation_right_65": 0.0,
    }
    lines = [{"step": 1, "validation_sure_55": 1.0, "validation_right_55": 0.0}, {"step": 2} | sure]
    write_lines(Path(run["stages"]["sft"]["records"]) / "metrics.jsonl", lines)
    panel = panels_of(stages_of(run)["sft"])[0]
    assert panel.lines == {"right": ([55], [60.0]), "as sure as it is right": ([55], [55])}


def test_a_benchmark_without_scores_has_no_plot_and_no_tile(tmp_path):
    context = finished_run(tmp_path)
    context["stages"]["eval_rl"]["config"]["benchmarks"].insert(0, {"name": "unasked"})
    report = build_report("r", context)
    drawn = [panel.title for section in report.sections for part in section.parts for panel in part.panels]
    assert "sort (%)" in drawn and not any(
        "unasked" in text for text in [*drawn, *(card.detail for card in report.cards)]
    )
