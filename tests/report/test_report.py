import html.parser
import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from nanodag.config.schema import ReportStage
from nanodag.report import words
from nanodag.report.contamination import contamination_table, training_urls
from nanodag.report.gather import columns_of, comparisons_of, stages_of
from nanodag.report.lineage import lineage_svg
from nanodag.report.page import build_report, to_html, to_markdown
from nanodag.report.plots import Panel, panels_svg, rl_panels, running_mean, supervised_panels
from nanodag.report.tables import config_table, examples_of, reached_table, scores_table, stages_table
from nanodag.worker import Job, write_job


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def report_of(run, **more):
    return build_report("r1", run, **{"price_per_hour": 0.0, "contamination": None, "missing": (), **more})


def test_models_are_columns_in_the_order_of_the_dag(run):
    columns = columns_of(stages_of(run))
    assert [column.label for column in columns] == ["BASE", "SFT", "CONTROL", "RL"]


def test_stages_come_after_their_inputs_whatever_order_the_job_lists_them_in(run):
    shuffled = {**run, "stages": dict(sorted(run["stages"].items()))}
    assert list(shuffled["stages"])[:3] == ["control", "eval_base", "eval_control"]
    expected = ["tokenizer", "pretrain", "sft", "eval_base", "control", "rl", "eval_sft", "eval_control", "eval_rl"]
    assert list(stages_of(shuffled)) == expected == list(stages_of(run))


def test_two_models_of_a_kind_are_named_by_their_stages(run):
    names = [c.label for c in columns_of(stages_of(run)) if c.stage.kind == "sft"]
    assert names == ["SFT", "CONTROL"]


def test_the_table_of_scores(run):
    table = scores_table(columns_of(stages_of(run)))
    assert table.headers == ["benchmark", "BASE", "SFT", "CONTROL", "RL"]
    assert texts(table)[0] == ["sort", "0.0 ± 10.0", "40.0 ± 10.0", "50.0 ± 10.0", "80.0 ± 10.0"]
    assert texts(table)[1] == ["bits_per_byte", "1.600 ± 0.050", "1.700 ± 0.050", "1.700 ± 0.050", "1.800 ± 0.050"]
    assert table.rows[0][4].detail == "60.0 to 100.0"
    assert table.rows[0][0].detail == "exact_match, %, 10 items"


def test_models_are_compared_with_the_one_they_come_from_and_with_each_other(run):
    stages = stages_of(run)
    found = comparisons_of(columns_of(stages), stages)
    pairs = [(c.after.label, c.before.label) for c in found if c.benchmark == "sort"]
    assert pairs == [("SFT", "BASE"), ("CONTROL", "SFT"), ("RL", "SFT"), ("RL", "CONTROL")]
    by_pair = {(c.benchmark, c.after.label, c.before.label): c for c in found}
    rl = by_pair["sort", "RL", "SFT"]
    assert (rl.found.difference, rl.found.num_higher, rl.found.num_lower) == (pytest.approx(0.4), 4, 0)
    assert (rl.verdict, rl.same_form) == ("better", True)
    assert not by_pair["sort", "SFT", "BASE"].same_form
    assert by_pair["sort", "CONTROL", "SFT"].verdict == "no clear difference"
    assert by_pair["bits_per_byte", "RL", "SFT"].verdict == "worse"  # more bits are worse


def test_items_that_turned_right_are_examples(run):
    stages = stages_of(run)
    rl = next(c for c in comparisons_of(columns_of(stages), stages) if (c.after.label, c.before.label) == ("RL", "SFT"))
    assert [example.prompt for example in examples_of(rl, turned="right")] == ["Sort 4 | x", "Sort 5 | x", "Sort 6 | x"]
    assert examples_of(rl, turned="wrong") == []


def test_time_tokens_and_cost_add_up(run):
    table = stages_table(stages_of(run), 2.0)
    rows = {row[0]: row for row in texts(table)}
    #                         2 ranks for an hour at 2.00 each
    assert rows["pretrain"] == ["pretrain", "1 h 0 min", "1 h 56 min", "1.5 M", "417", "2 T", "31.0 %", "", "4.00"]
    assert rows["all"][1:4] == ["1 h 1 min", "1 h 57 min", "1.5 M"]  # 3680 s; 7024 s
    assert rows["all"][8] == "4.04"  # and 80 s on one rank: .0444


def test_the_share_of_documents_stands_below_a_stages_tokens(run):
    run["stages"]["sft"]["metrics"]["document_share"] = 0.254
    details = {row[0].text: row[3].detail for row in stages_table(stages_of(run), 0.0).rows}
    assert (details["sft"], details["pretrain"]) == ("25 % documents", "")


def test_config_says_where_values_come_from_and_what_the_dial_would_have_said(run):
    table = config_table(stages_of(run)["sft"], run["origins"])
    first = table.rows[0]
    assert [cell.text for cell in first] == ["num_epochs", "3", "override"]
    assert first[2].detail == "said 1"
    assert [row[2].text for row in table.rows[1:]] == ["default", "default"]


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
    page = to_html(report_of(run))
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert all(target.startswith("#") for target in checker.loaded)
    assert {target[1:] for target in checker.loaded} <= set(checker.ids)
    assert len(set(checker.ids)) == len(checker.ids)
    assert "rl says &lt;b&gt;" in page and "rl says <b>" not in page
    assert "http://" not in page.replace("http://www.w3.org/", "")


def test_the_same_run_gives_the_same_bytes(run):
    assert to_html(report_of(run)) == to_html(report_of(run))
    assert to_markdown(report_of(run)) == to_markdown(report_of(run))


def test_markdown_tables_keep_their_columns(run):
    text = to_markdown(report_of(run))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = lines[: next(i for i, line in enumerate(lines[1:], 1) if line.count("|") != lines[0].count("|"))]
    assert len(table) == 4  # headers, rule, two benchmarks
    assert "| sort (exact\\_match, %, 10 items) | 0.0 ± 10.0 (0.0 to 20.0) | 40.0 ± 10.0" in text
    assert "rl says \\<b\\>" in text
    assert "asked: Sort 4 \\| x" in text


def test_a_report_of_a_run_that_got_nowhere_still_stands(run):
    run["stages"] = {"tokenizer": run["stages"]["tokenizer"]}
    report = report_of(run, missing=["rl", "eval_rl"])
    assert "without rl, eval_rl: no result" in report.subtitle
    assert [section.title for section in report.sections] == ["Time, tokens and cost", "Lineage", "Config"]
    to_html(report), to_markdown(report)


def test_the_picture_of_the_lineage_has_a_box_a_stage_and_an_arrow_an_input(run):
    stages = stages_of(run)
    picture = ElementTree.fromstring(lineage_svg(stages))
    count = {kind: len(picture.findall(f"{{http://www.w3.org/2000/svg}}{kind}")) for kind in ("rect", "path")}
    assert count == {"rect": 9, "path": 8}


def test_curves_show_what_was_recorded(run):
    stages = stages_of(run)
    (loss,) = supervised_panels(stages["pretrain"])
    assert loss.lines["loss"] == ([1.0, 2.0, 3.0], [2.0, 1.0, 0.0])
    (reward,) = rl_panels(stages["rl"])
    assert reward.lines["rollouts"][1] == pytest.approx([1 / 3, 2 / 3, 1])
    panel = Panel(title="a < b", x_label="step", lines={"x": (range(2000), range(2000))})
    ElementTree.fromstring(panels_svg([panel, panel], name="p"))


def test_what_a_stage_reached_is_said_in_one_line(run):
    run["stages"]["sft"]["metrics"] = {"loss": 1.23456, "stopped_early": True, "steps": 12_000, "mfu": None}
    run["stages"]["pretrain"]["cost"]["mfu"] = None
    stages = stages_of(run)
    assert texts(reached_table(stages)) == [["sft", "loss 1.2346 · stopped early yes · steps 12,000"]]
    assert {row[0]: row for row in texts(stages_table(stages, 0.0))}["pretrain"][6] == ""
    assert "stopped early yes" in to_markdown(report_of(run))


def test_a_running_mean_is_centred_and_shorter_at_the_ends():
    assert running_mean([1, 2, 6, 10], 3) == [1.5, 3, 6, 8]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (words.duration(0.44), "0.4 s"),
        (words.duration(59.6), "1 min 0 s"),
        (words.duration(3725), "1 h 2 min"),
        (words.count(1_640_000), "1.64 M"),
        (words.count(950), "950"),
        (words.count(3.3e21), "3.3e+03 E"),
        (words.num_bytes(1610612736), "1.5 GiB"),
        (words.signed(-0.021, "bits_per_byte"), "−0.021"),
        (words.signed(0.183, "acc"), "+18.3"),
        (words.probability(0.0004), "< 0.001"),
    ],
)
def test_numbers_in_words(said, expected):
    assert said == expected


def test_contamination_finds_an_item_that_stands_in_training_data(tmp_path):
    sentence = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    training, benchmark = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    training.write_text(json.dumps({"text": f"before {sentence} after"}) + "\n")
    lines = [{"q": sentence}, {"q": sentence.replace("seven", "7")}, {"q": "too short"}]
    benchmark.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stages = {
        "sft": {"kind": "sft", "config": {"data": [{"url": f"file:{training}"}]}},
        "e": {"kind": "eval", "config": {}},
    }
    config = ReportStage(kind="report", contamination=(f"file:{benchmark}",))
    table = contamination_table(stages, config.contamination, None)
    assert texts(table)[0][2:5] == ["1", "2", "50.0 %"]
    assert table.rows[0][3].detail == "1 shorter than 13 words"
    assert training_urls(stages) == [f"file:{training}"]
    assert contamination_table(stages, (), None) is None


def test_the_worker_writes_both_pages(run, tmp_path):
    config = ReportStage(kind="report", inputs={"rl": "rl", "lost": "lost"}, seed=0, tracking=())
    (tmp_path / "ws").mkdir()
    job = Job(name="report", run="r1", config=config, inputs={"rl": tmp_path}, workspace=tmp_path / "ws", context=run)
    done = subprocess.run(
        [sys.executable, "-m", "nanodag.report", str(write_job(job))], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert {path.name for path in job.output.iterdir()} == {"report.html", "report.md"}
    assert "without lost: no result" in (job.output / "report.md").read_text()
    assert json.loads((job.workspace / "result.json").read_text())["metrics"]["report_html_bytes"] > 10_000
