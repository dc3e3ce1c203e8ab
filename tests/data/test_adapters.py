import json
import sys
import types

import pytest

from nanodag.data.adapters import kind_of, open_adapter
from nanodag.data.records import held_out_score, record_bytes
from nanodag.errors import SourceError

GSM8K = {"question": "How many?", "answer": "Half is 48/2 = <<48/2=24>>24.\nAll: 48+24 = <<48+24=72>>72.\n#### 1,072"}


def adapt(row, kind, name="auto", url="hub:some/data", **options):
    return open_adapter(name, url, kind, options)(3, row)


def chat(record):
    return [(message["role"], message["content"]) for message in record["messages"]]


def test_gsm8k_is_plain_text_unless_tools_are_asked_for():
    url = "hub:openai/gsm8k/main"
    plain = "Half is 48/2 = 24.\nAll: 48+24 = 72.\n#### 1,072"
    assert chat(adapt(GSM8K, "conversation", url=url)) == [("user", "How many?"), ("assistant", plain)]
    spoken = adapt(GSM8K, "conversation", url=url, tools=True)["messages"][1]["content"]
    assert [(part["type"], part["text"]) for part in spoken] == [
        ("text", "Half is 48/2 = "),
        ("tool_call", "48/2"),
        ("tool_result", "24"),
        ("text", "24.\nAll: 48+24 = "),
        ("tool_call", "48+24"),
        ("tool_result", "72"),
        ("text", "72.\n#### 1,072"),
    ]


def test_a_gsm8k_prompt_has_the_number_as_its_answer_and_an_id_of_its_own():
    prompt = adapt(GSM8K, "prompt", url="hub:openai/gsm8k/main:train")
    assert prompt == {
        "prompt_id": "hub:openai/gsm8k/main:train#3",
        "messages": [{"role": "user", "content": "How many?"}],
        "answer": "1072",
        "reward": "gsm8k",
        "metadata": {},
    }


def test_multiple_choice_lists_letters_and_answers_with_one():
    row = {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1, "subject": "arithmetic"}
    asked = "2 + 2?\nA. 3\nB. 4\nAnswer with one letter."
    assert chat(adapt(row, "conversation", "mmlu")) == [("user", asked), ("assistant", "B")]
    assert chat(adapt({"train": row}, "conversation", url="hub:cais/mmlu/auxiliary_train"))[1] == ("assistant", "B")
    prompt = adapt(row, "prompt", "mmlu")
    assert (prompt["answer"], prompt["reward"], prompt["metadata"]) == ("B", "multiple_choice", {"choices": ["3", "4"]})


@pytest.mark.parametrize(("name", "row", "asked", "answer"), [
    ("arc", {"question": "Q?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
     "Q?\nA. x\nB. y\n", "B"),
    ("arc", {"question_stem": "Q?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"},
     "Q?\nA. x\nB. y\n", "A"),
    ("piqa", {"goal": "G", "sol1": "s", "sol2": "t", "label": 1}, "G\nA. s\nB. t\n", "B"),
    ("winogrande", {"sentence": "_ ran.", "option1": "Al", "option2": "Bo", "answer": "2"},
     "Which fits the blank: _ ran.\nA. Al\nB. Bo\n", "B"),
    ("boolq", {"question": "is it", "answer": True, "passage": "It is."}, "It is.\n\nis it?\nA. no\nB. yes\n",
     "B"),
    ("hellaswag", {"ctx": "He", "endings": ["a", "b"], "label": "0"}, "How does this go on: He\nA. a\nB. b\n",
     "A"),
])  # fmt: skip
def test_every_choice_data_set_is_read_by_its_own_columns(name, row, asked, answer):
    turns = chat(adapt(row, "conversation", name))
    assert turns == [("user", asked + "Answer with one letter."), ("assistant", answer)]


def test_sciq_puts_its_choices_in_an_order_that_does_not_tell_the_answer():
    choices = {"correct_answer": "right", "distractor1": "a", "distractor2": "b", "distractor3": "c"}
    first, again = (
        [chat(adapt({"question": f"Q{i}?", **choices}, "conversation", "sciq"))[1][1] for i in range(40)]
        for _ in range(2)
    )
    assert set(first) == set("ABCD") and first == again


TURNS = {"conversations": [{"from": "human", "value": "Do"}, {"from": "gpt", "value": "Done"}]}
MESSAGES = {"messages": [{"role": "user", "content": "Do", "id": 7}, {"role": "assistant", "content": "Done"}]}


@pytest.mark.parametrize(("adapter", "url", "row", "asked"), [
    ("alpaca", "hub:some/data", {"instruction": "Do", "input": "", "output": "Done"}, "Do"),
    ("alpaca", "hub:some/data", {"instruction": "Do", "input": "it", "output": "Done"}, "Do\n\nit"),
    ("sharegpt", "hub:some/data", TURNS, "Do"),
    ("auto", "hub:HuggingFaceTB/smol-smoltalk", MESSAGES, "Do"),
])  # fmt: skip
def test_instructions_and_chats(adapter, url, row, asked):
    assert chat(adapt(row, "conversation", adapter, url)) == [("user", asked), ("assistant", "Done")]


def test_a_chat_keeps_calls_tools_and_which_messages_are_learned():
    function = {"name": "now", "arguments": {"zone": "UTC", "other": None}}  # as a table of rows with two tools has it
    declared = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}, "strict": None}}
    row = {"tools": json.dumps([declared]), "messages": [
        {"role": "user", "content": "When?", "weight": None},
        {"role": "assistant", "content": None, "weight": 0, "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
        {"role": "assistant", "content": "Noon.", "train": True},
    ]}  # fmt: skip
    record = adapt(row, "conversation", "messages")
    called = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    assert record["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [called], "train": False}
    assert record["messages"][2:] == [{**row["messages"][2]}, {"role": "assistant", "content": "Noon."}]
    assert record["tools"] == [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    assert "tools" not in adapt(row, "conversation", "messages", tools=False)
    assert adapt({**row, "tools": [declared]}, "conversation", "messages")["tools"] == record["tools"]
    with pytest.raises(SourceError, match=r"the weight 0\.5"):
        adapt({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "conversation", "messages")


def test_reasoning_gym_rows_keep_what_their_verifier_needs():
    row = {"question": "1+1?", "answer": "2", "metadata": {"source_dataset": "chain_sum", "answer_cot": "1+1=2 #### 2"}}
    url = "reasoning_gym:chain_sum"
    assert chat(adapt(row, "conversation", url=url))[1] == ("assistant", "2")
    assert chat(adapt(row, "conversation", url=url, answer_cot=True))[1] == ("assistant", "1+1=2 #### 2")
    assert adapt(row, "prompt", url=url)["metadata"] == {"entry": row}


def test_a_document_of_a_chat_source_is_its_texts():
    row = {"instruction": "Do", "output": "Done"}
    assert adapt(row, "document", "alpaca") == {"text": "Do\nDone"}
    assert adapt(GSM8K, "document", "gsm8k", tools=True)["text"].startswith("How many?\nHalf is 48/2 = 48/224")


def test_a_chat_stage_takes_documents_from_adapters_that_make_nothing_else():
    for name, url in (("text", "file:a.txt"), ("auto", "hub:HuggingFaceFW/fineweb-edu")):
        assert kind_of(name, url, "chat") == "document"
    for name in ("gsm8k", "messages", "module:function"):
        assert kind_of(name, "file:a.jsonl", "chat") == "conversation"
    assert kind_of("auto", "file:a.txt", "chat") == "conversation"
    assert kind_of("gsm8k", "file:a.jsonl", "document") == "document"


def own_adapter(row, kind, loud=False):
    return {"text": row["body"].upper() if loud else row["body"]}


def test_an_adapter_of_ones_own_is_named_by_import_path(monkeypatch):
    module = types.ModuleType("own_module")
    monkeypatch.setattr(own_adapter, "__module__", "own_module")
    module.own_adapter = own_adapter
    monkeypatch.setitem(sys.modules, "own_module", module)
    assert adapt({"body": "b"}, "document", "own_module:own_adapter", loud=True) == {"text": "B"}
    with pytest.raises(SourceError, match="cannot be imported"):
        adapt({"body": "b"}, "document", "own_module:nothing")


@pytest.mark.parametrize(("row", "kind", "name", "words"), [
    ({"body": "x"}, "document", "auto",
     r"'text' cannot make a document of row 3 of hub:some/data: no column 'text'.*columns are body"),
    ({"text": 7}, "document", "auto", "needs a string `text`; found 7"),
    ({"question": "Q", "answer": "no number"}, "prompt", "gsm8k", "ends in `#### number`"),
    ({"messages": []}, "conversation", "auto", "non-empty list"),
    ({"messages": [{"role": "bot", "content": ""}]}, "conversation", "auto", "the role 'bot'; roles are system"),
    ({"messages": [{"role": "user", "content": [1]}]}, "conversation", "auto", "user message must be a string"),
    ({"question": "Q", "choices": ["a"], "answer": 1}, "conversation", "mmlu", "number 1 of 1 choices"),
    ({"text": "x"}, "prompt", "text", "'text' makes no prompt .*it makes document"),
])  # fmt: skip
def test_a_row_that_does_not_fit_is_named(row, kind, name, words):
    with pytest.raises(SourceError, match=words):
        adapt(row, kind, name)


def test_bytes_of_a_record_are_those_of_its_texts():
    assert record_bytes({"text": "é"}) == 2
    assert record_bytes(adapt(GSM8K, "conversation", "gsm8k", tools=True)) == len("How many?") + len(
        "Half is 48/2 = 48/22424.\nAll: 48+24 = 48+247272.\n#### 1,072"
    )


def test_one_problem_is_held_out_in_supervised_data_and_prompts_alike():
    by_prompt = held_out_score(adapt(GSM8K, "conversation", "gsm8k", tools=True), "prompt")
    assert by_prompt == held_out_score(adapt(GSM8K, "prompt", "gsm8k"), "prompt")
    other = {**GSM8K, "answer": "#### 5"}
    assert by_prompt == held_out_score(adapt(other, "conversation", "gsm8k"), "prompt")
    by_content = [held_out_score(adapt(row, "conversation", "gsm8k"), "content") for row in (GSM8K, other)]
    assert by_content[0] != by_content[1]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(("row", "prompt", "chosen", "rejected"), [
    ({"prompt": "q", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
     [user("q")], [assistant("a")], [assistant("b")]),
    ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant:"},
     [user("q")], [assistant("a")], [assistant("")]),
    ({"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": "a", "rejected": "b"},
     [user("q")], [assistant("a")], [assistant("b")]),
    ({"chosen": "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: b",
      "rejected": "\n\nHuman: q\n\nAssistant: a\n\nHuman: s\n\nAssistant: c"},
     [user("q")], [assistant("a"), user("r"), assistant("b")], [assistant("a"), user("s"), assistant("c")]),
    ({"chosen": [user("q"), assistant("a")], "rejected": [user("q")]}, [user("q")], [assistant("a")], []),
    ({"prompt": "Write a talk.", "chosen": "Human: Hi!\n\nAssistant: Hello!", "rejected": "Assistant: no"},
     [user("Write a talk.")], [assistant("Human: Hi!\n\nAssistant: Hello!")], [assistant("Assistant: no")]),
], ids=["ultrafeedback", "hh", "prompt-transcript", "users-differ", "no-answer", "talk-in-answer"])  # fmt: skip
def test_a_preference_is_what_both_begin_with_and_two_answers_of_the_assistant(row, prompt, chosen, rejected):
    assert adapt(row, "preference") == {"messages": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(("label", "name"), [(True, "chosen"), (False, "rejected"), (1, "chosen")])
def test_an_answer_with_a_label_is_a_judgement_of_one(label, name):
    turns = {"prompt": [user("Hi")], "completion": [assistant("Hello!")]}
    for row in (turns, {"prompt": "Human: Hi\n\nAssistant:", "completion": "Hello!"}):
        assert adapt({**row, "label": label}, "judgement") == {"messages": turns["prompt"], name: turns["completion"]}
    pair = {"prompt": "Hi", "chosen": "Hello!", "rejected": "No"}
    assert adapt(pair, "judgement") == adapt(pair, "preference")


def test_the_best_and_the_worst_of_rated_answers_are_a_pair_and_equal_ratings_are_none():
    row = {"prompt": "q", "responses": ["so", "good", "bad"], "scores": [3, 4.5, 1]}
    pair = {"messages": [user("q")], "chosen": [assistant("good")], "rejected": [assistant("bad")], "margin": 3.5}
    assert adapt(row, "preference") == pair
    alike = adapt({**row, "scores": [2, 2, 2]}, "preference")
    assert alike["chosen"] == alike["rejected"]  # such a pair is counted as dropped
    assert adapt({**row, "scores": ["9", "10", None]}, "preference")["chosen"] == [assistant("good")]
    for scores in ([1, float("nan"), None], [1]):
        with pytest.raises(SourceError, match="row 3 of hub:some/data"):
            adapt({**row, "scores": scores}, "preference")


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}])
def test_answers_without_anything_asked_are_refused_in_words(prompt):
    with pytest.raises(
        SourceError, match="there is no `prompt`, and `chosen` and `rejected` do not begin with the same"
    ):
        adapt({"chosen": "a", "rejected": "b", **prompt}, "preference")


@pytest.mark.parametrize("label", ["good", None, 2])
def test_a_judgement_that_is_neither_true_nor_false_is_refused_with_its_row(label):
    with pytest.raises(SourceError, match=f"row 3 of hub:some/data: label is {label!r}, which is neither true"):
        adapt({"prompt": "q", "completion": "a", "label": label}, "judgement")


def test_the_margin_of_a_preference_is_the_difference_of_its_scores_where_it_has_both():
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 7.5}
    assert adapt({**row, "score_rejected": 5}, "preference")["margin"] == 2.5
    for missing in (None, float("nan")):
        assert "margin" not in adapt({**row, "score_rejected": missing}, "preference")


def test_steps_have_a_label_each_from_0_to_1_and_what_has_not_is_refused_with_its_row():
    row = {"prompt": "q", "completions": ["a", "b"], "labels": [True, 0.25]}
    made = {"messages": [user("q")], "steps": ["a", "b"], "labels": [1.0, 0.25]}
    assert adapt(row, "stepwise") == made == adapt(row, "stepwise", url="hub:trl-lib/math_shepherd")
    assert record_bytes(made) == 3
    for change in ({"labels": [True]}, {"labels": [True, 2]}, {"completions": ["a", " "]}, {"completions": []}):
        with pytest.raises(SourceError, match="row 3 of hub:some/data: An answer needs steps, none blank, and for"):
            adapt({**row, **change}, "stepwise")
