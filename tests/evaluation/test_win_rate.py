"""Win rates: who is preferred, whatever place it is shown in, and what a judge that minds the place looks like."""

import json
from contextlib import nullcontext
from typing import Any

import pytest
import yaml

from nanodag.config.kinds.evaluation import BenchmarkConfig, EvalStage
from nanodag.errors import ConfigError
from nanodag.evaluation.benchmark import open_benchmark
from nanodag.evaluation.results import Answer
from nanodag.evaluation.win_rate import win_rate
from nanodag.rewards.judge import read_judge
from nanodag.store.kept_lines import KeptLines
from tests.http_server import Quiet, serving

COMPARED = "Q: {question}\nA: {response}\nB: {other}\nEnd with a line 'Winner: A', 'Winner: B' or 'Winner: tie'."
QUESTIONS = ["one", "two", "three", "four"]


def judge_server(verdict):
    """verdict(question, shown as A, shown as B) -> the judge's reply. `asked` counts."""

    class Judge(Quiet):
        asked = 0

        def do_POST(self) -> None:
            type(self).asked += 1
            lines = self.content()["messages"][-1]["content"].splitlines()
            said = verdict(*(line.partition(": ")[2] for line in lines[:3]))
            if isinstance(said, int):
                return self.answer(status=said)
            self.answer({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]})

    return Judge


@pytest.fixture
def compared(tmp_path):
    def run(verdict, own, other, kept=None):
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(json.dumps({"question": q, "answer": "?"}) + "\n" for q in QUESTIONS))
        handler = judge_server(verdict)
        with serving(handler) as url:
            file = tmp_path / "judge.yaml"
            said = {"url": f"{url}/v1", "model": "m", "prompt": COMPARED, "label": "Winner:"}
            file.write_text(yaml.safe_dump(said))
            source = {"url": f"file:{rows}", "adapter": "problem"}
            config = BenchmarkConfig(name="q", form="problems", source=source, judge=str(file))

            def answered(answers):
                benchmark = open_benchmark(config, seed=1)
                by_question = dict(zip(QUESTIONS, answers, strict=True))
                return benchmark.result(
                    {item.id: [Answer(by_question[item.messages[-1]["content"]])] for item in benchmark.items}
                )

            (tmp_path / "samples").mkdir(exist_ok=True)
            if other is not None:
                answered(other).write_records(tmp_path / "samples" / "q.jsonl")
            how: dict[str, Any] = {"seed": 1, "mirror": "", "on_progress": lambda done, total: None}
            found = win_rate(tmp_path, answered(own), kept=kept, **how)
        return {name: score.value for name, score in found.scores.items()}, found, handler.asked

    return run


def by_letters(question, first, second):
    winner = "A" if len(first) > len(second) else "B" if len(second) > len(first) else "tie"
    return f"Longer is better.\nWinner: {winner}."


def test_a_judge_that_looks_at_answers_gives_wins_ties_and_losses_by_hand(compared):
    scores, found, asked = compared(by_letters, ["aa", "a", "aa", "aa"], ["a", "aa", "bb", "b"])
    assert scores == {"win_rate": (1 + 0 + 0.5 + 1) / 4, "agreed": 1.0, "first": 0.5}
    assert found.metric == "win_rate" and found.counts["unparsed"] == 0 and asked == 2 * len(QUESTIONS)
    details = {record["prompt"]: record["details"] for record in found.records}
    assert details["two"] == {"other": "aa", "shown_first": 0.0, "other_shown_first": 1.0}


def test_answers_with_odd_line_ends_and_half_a_pair_of_surrogates_are_compared_like_others(compared):
    odd = ["a\u2028b", "c\x85d", "e\x1cf", "\ud800"]
    _, found, _ = compared(lambda *shown: "Winner: tie", ["a"] * 4, odd)
    assert {record["prompt"]: record["details"]["other"] for record in found.records} == dict(zip(QUESTIONS, odd))


def test_a_judge_that_takes_whatever_stands_first_prefers_nobody_and_is_seen(compared):
    scores, _, _ = compared(lambda *shown: "Winner: A", ["aa"] * 4, ["b"] * 4)
    assert scores == {"win_rate": 0.5, "agreed": 0.0, "first": 1.0}


def test_a_reply_without_a_verdict_is_a_tie_and_counted(compared):
    def verdict(question, first, second):
        return "Both are fine." if question == "one" else by_letters(question, first, second)

    scores, found, _ = compared(verdict, ["aa"] * 4, ["b"] * 4)
    assert scores["win_rate"] == (0.5 + 3) / 4 and found.counts["unparsed"] == 1


def test_a_killed_comparison_asks_no_pair_twice(compared, tmp_path):
    with KeptLines(tmp_path / "kept") as kept:
        first = compared(by_letters, ["aa"] * 4, ["b"] * 4, kept)
    with KeptLines(tmp_path / "kept") as kept:
        again = compared(by_letters, ["aa"] * 4, ["b"] * 4, kept)
    assert (first[2], again[2]) == (8, 0) and first[1].records == again[1].records


@pytest.mark.parametrize(("status", "raised"), [(401, ConfigError), (400, None)])
def test_a_pair_that_is_refused_is_unparsed_and_a_wrong_key_is_no_busy_server(compared, status, raised):
    with nullcontext() if raised is None else pytest.raises(raised, match="the judge of"):
        scores, found, _ = compared(lambda *shown: status, ["aa"] * 4, ["b"] * 4)
        assert scores["win_rate"] == 0.5 and found.counts["unparsed"] == 4


def test_a_baseline_of_other_items_and_a_judge_of_one_answer_are_refused(compared, tmp_path):
    with pytest.raises(ConfigError, match="no single answer to 4 of 4 items"):
        compared(by_letters, ["a"] * 4, None)
    one = tmp_path / "one.yaml"
    one.write_text(yaml.safe_dump({"url": "http://x/v1", "model": "m", "prompt": "{response}"}))
    with pytest.raises(ConfigError, match=r"needs .other. in its prompt"):
        read_judge(str(one), compares=True)
    with pytest.raises(ConfigError, match=r"has .other. in its prompt"):
        one.write_text(yaml.safe_dump({"url": "http://x/v1", "model": "m", "prompt": "{response} {other}"}))
        read_judge(str(one))


@pytest.mark.parametrize(
    ("inputs", "judge", "why"),
    [
        ({"model": "m"}, {"judge": "/j.yaml"}, "go together"),
        ({"model": "m", "baseline": "e"}, {}, "go together"),
        ({"model": "m", "baseline": "e"}, {"judge": "j.yaml"}, "absolute path"),
        ({"model": "m", "baseline": "e"}, {"judge": "/j.yaml", "num_samples": 2, "temperature": 1.0}, "one answer"),
    ],
)
def test_a_judge_without_a_baseline_and_the_other_way_round_are_refused(inputs, judge, why):
    with pytest.raises(ValueError, match=why):
        EvalStage.of(
            kind="eval", inputs=inputs, benchmarks=[{"name": "q", "form": "problems", "source": "file:x", **judge}]
        ).check_inputs()
