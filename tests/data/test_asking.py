"""Options of a source: columns, instruction, reward, switches of the chat template."""

import pytest
from pydantic import ValidationError

from nanodag.config.kinds.rl import RLStage
from nanodag.config.kinds.small_stages import ReportStage
from nanodag.data.adapters import open_adapter
from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.data.question_form import asking, check_effect
from nanodag.errors import SourceError
from tests.data.rows import write_rows

BOXED = "{question}\nPut it within \\boxed{}."


def record_of(row, kind, **source):
    """As a stage gets it from a source of one row."""
    config = SourceConfig(url="hub:some/data", **source)
    adapt = open_adapter(config.adapter, config.url, kind, config.options, config.columns)
    return asking(config, kind)(adapt(3, row))


def test_an_instruction_goes_around_the_question_and_its_braces_stay():
    asked = record_of({"question": "1 + {1}?", "answer": "2"}, "prompt", adapter="problem", instruction=f"Q: {BOXED}")
    assert asked["messages"] == [{"role": "user", "content": "Q: 1 + {1}?\nPut it within \\boxed{}."}]
    chat = record_of({"question": "1?", "answer": "2"}, "conversation", adapter="problem", instruction=BOXED)
    assert chat["messages"] == [
        {"role": "user", "content": "1?\nPut it within \\boxed{}."},
        {"role": "assistant", "content": "2"},
    ]


def test_a_source_names_the_verifier_and_the_switches_of_its_prompts():
    options = {"adapter": "problem", "reward": "boxed_math", "template_options": {"enable_thinking": False}}
    asked = record_of({"question": "1?", "answer": "2"}, "prompt", **options)
    assert (asked["reward"], asked["template_options"]) == ("boxed_math", {"enable_thinking": False})
    plain = record_of({"question": "1?", "answer": "2"}, "prompt", adapter="problem")
    assert plain["reward"] == "exact" and "template_options" not in plain


@pytest.mark.parametrize(("adapter", "row", "columns"), [
    ("prompt", {"messages": [{"role": "user", "content": "1?"}], "label": 2}, {"answer": "label"}),  # slime's
    (
        "prompt", {"prompt": [{"role": "user", "content": "1?"}], "reward_model": {"ground_truth": "2"}},  # verl's
        {"messages": "prompt", "answer": "reward_model.ground_truth"},
    ),
    ("prompt", {"problem": "1?", "a.b": "2"}, {"prompt": "problem", "answer": "a.b"}),
    ("aime", {"Problem": "1?", "label": 2}, {"answer": "label"}),  # it looks for several columns
    ("aime", {"question": "no", "text": "1?", "answer": 2}, {"problem": "text"}),
])  # fmt: skip
def test_foreign_columns_are_read_without_code(adapter, row, columns):
    found = record_of(row, "prompt", adapter=adapter, columns=columns)
    assert (found["messages"], found["answer"]) == ([{"role": "user", "content": "1?"}], "2")


@pytest.mark.parametrize(("columns", "said"), [
    ({"question": "problem"}, r"no column 'problem'\. The row's columns are answer, question"),
    ({"question": "answer.inner"}, r"no column 'answer\.inner'"),
    ({"solution": "answer"}, "`columns` names 'solution', which it does not read; it reads answer, images, question"),
])  # fmt: skip
def test_a_column_that_is_not_there_or_not_read_is_named(columns, said):
    with pytest.raises(SourceError, match=said):
        record_of({"question": "1?", "answer": "2"}, "conversation", adapter="problem", columns=columns)


@pytest.mark.parametrize(("kind", "option", "said"), [
    ("document", {"instruction": BOXED}, "instruction .* means nothing to documents, which nobody asks"),
    ("document", {"template_options": {"x": 1}}, "template_options .'x': 1. means nothing to documents"),
    ("conversation", {"reward": "math"}, "reward 'math' means nothing to conversations, whose answers are given"),
    ("row", {"reward": "math"}, "means nothing to rows as they are; a benchmark reads prompts with `form: prob"),
    ("text", {"columns": {"a": "b"}}, "columns .* means nothing to all text of a source"),
])  # fmt: skip
def test_an_option_without_effect_is_refused(kind, option, said):
    source = SourceConfig(url="hub:some/data", **option)
    with pytest.raises(SourceError, match=said):
        check_effect(source, kind)
    check_effect(SourceConfig(url="hub:some/data"), kind)


@pytest.mark.parametrize(("option", "said"), [
    ({"instruction": "Answer in a box."}, "must hold {question} once"),
    ({"instruction": "{question} {question}"}, "must hold {question} once"),
    ({"reward": "mth"}, "no reward 'mth' that data may ask for; choose auto or one of code, instruction_following"),
    ({"reward": "mine:judge"}, "or name it as the stage's `reward`"),
])  # fmt: skip
def test_an_option_that_cannot_be_is_refused_when_the_config_is_read(option, said):
    with pytest.raises(ValidationError, match=said):
        SourceConfig(url="hub:some/data", **option)


def test_an_instruction_of_a_conversation_with_two_questions_is_refused():
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(SourceError, match="around one question, and a record has 2 user turns"):
        record_of({"messages": turns}, "conversation", instruction=BOXED)


def test_stages_refuse_what_they_would_not_look_at():
    source = {"url": "file:x", "reward": "math"}
    with pytest.raises(ValueError, match=r"reward gsm8k judges every prompt, so the reward math of file:x means noth"):
        RLStage.of(kind="rl", data=[source], reward="gsm8k")
    assert RLStage.of(kind="rl", data=[source]).data[0].reward == "math"
    with pytest.raises(ValueError, match=r"instruction .* means nothing to all text"):
        ReportStage(kind="report", contamination=[{"url": "file:x", "instruction": BOXED}])


def test_an_instruction_moves_no_problem_between_training_and_held_out(tmp_path):
    url = write_rows(tmp_path / "p.jsonl", [{"question": f"{n}?", "answer": str(n)} for n in range(60)])

    def held_out(**more):
        source = SourceConfig(url=url, adapter="problem", held_out=0.3, held_out_by="prompt", **more)
        return {drawn.index for drawn in Mixture([source], kind="prompt", seed=0, part="held_out", once=True)}

    assert held_out() == held_out(instruction=BOXED) and 5 < len(held_out()) < 30
