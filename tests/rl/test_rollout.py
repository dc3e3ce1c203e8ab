"""Rollouts, their JSON lines, and how they read turn by turn."""

import pytest

from nanodag.errors import SourceError
from nanodag.rl.rollouts.readable_rollout import calls_in, turns_of
from nanodag.rl.rollouts.rollout import (
    Rollout,
    Span,
    from_json,
    groups_of,
    prompt_span,
    read_rollouts,
    reward_spread,
    span_of,
    to_json,
    write_rollouts,
)
from tests.rl.fakes import completion
from tests.rl.rollouts import sampled_span


def rollout(group: str = "0:7", sample: int = 0, reward: float | None = 1.0) -> Rollout:
    return Rollout(
        group_id=group,
        prompt_id="7",
        sample_index=sample,
        spans=(
            prompt_span([5, 9]),
            sampled_span([7, 8], [-0.5, -0.25], version=3),
            Span(kind="tool", token_ids=(4,)),
            Span(kind="sampled", token_ids=(2,), mask=(0,), logprobs=(-0.125,), versions=(4,)),
        ),
        reward=reward,
        reward_components={"exact": 1.0},
        finish_reason="stop",
        metadata={"note": "é"},
    )


# Written by the first version of nanodag. It must be readable by every later one: never change this line.
FORMAT_1 = (
    '{"format":1,"group_id":"0:7","prompt_id":"7","sample_index":0,"spans":[{"kind":"prompt","token_ids":[5,9]},'
    '{"kind":"sampled","token_ids":[7,8],"logprobs":[-0.5,-0.25],"mask":[[1,2]],"versions":[[3,2]]},'
    '{"kind":"tool","token_ids":[4]},{"kind":"sampled","token_ids":[2],"logprobs":[-0.125],"mask":[[0,1]],'
    '"versions":[[4,1]]}],"reward":1.0,"reward_components":{"exact":1.0},"finish_reason":"stop",'
    '"metadata":{"note":"é"},"media":[]}'
)


def test_a_rollout_is_written_as_format_1_spells_it_and_read_back_equal():
    assert to_json(rollout()) == FORMAT_1
    assert from_json(FORMAT_1) == rollout()


def test_members_of_a_group_need_not_be_adjacent_and_one_without_reward_has_no_part_in_its_spread():
    groups = groups_of([rollout("b", 1), rollout("a", 0), rollout("b", 0), rollout("b", 2)])
    found = [(name, [member.sample_index for member in members]) for name, members in groups.items()]
    assert found == [("b", [0, 1, 2]), ("a", [0])]
    assert reward_spread([rollout(reward=1.0), rollout(reward=None), rollout(reward=0.25)]) == 0.75
    assert reward_spread([rollout(reward=1.0), rollout(reward=None)]) == 0.0


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        ("{", "line 2: not a rollout"),
        ("[1]", "a rollout is a JSON object, found list"),
        (FORMAT_1.replace('"format":1', '"format":9'), "format is 9; this version of nanodag reads format 1"),
        (FORMAT_1.replace('"prompt_id":"7",', ""), "the key 'prompt_id' is missing"),
        (FORMAT_1.replace("[-0.5,-0.25]", "[-0.5]"), "sampled span of 2 tokens has 1 logprobs, not 2"),
        (FORMAT_1.replace("-0.25", "0.25"), "logprobs hold 0.25"),
        (FORMAT_1.replace('"mask":[[1,2]]', '"mask":[[3,2]]'), r"mask holds \[3\]"),
        (FORMAT_1.replace("[5,9]", "[-5,9]"), "negative token id -5"),
        (FORMAT_1.replace('"kind":"tool"', '"kind":"tole"'), "span kind 'tole' is none of prompt, sampled, tool"),
        (FORMAT_1.replace('"stop"', '"done"'), "finish_reason 'done' is none of"),
        (FORMAT_1.replace('"token_ids":[5,9]', '"token_ids":[]'), "begins with a prompt span of at least one token"),
        (FORMAT_1.replace('"reward":1.0', '"reward":NaN'), "not a rollout: unexpected character"),
    ],
)
def test_a_spoiled_line_is_named_with_file_line_and_reason(tmp_path, spoiled, reason):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(FORMAT_1 + "\n" + spoiled + "\n", encoding="utf-8")
    with pytest.raises(SourceError, match=reason) as caught:
        list(read_rollouts(path))
    assert f"{path}, line 2" in str(caught.value)


def test_a_file_of_rollouts_is_read_back_equal_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "step-00000003.jsonl"
    rollouts = [rollout("0:7", index, reward=None if index else 0.5) for index in range(3)]
    write_rollouts(path, rollouts)
    assert list(read_rollouts(path)) == rollouts
    assert list(tmp_path.iterdir()) == [path]


def test_rounding_above_zero_in_a_logprob_is_taken_as_zero_and_what_is_no_log_probability_is_refused():
    assert span_of(completion([1], logprobs=[3e-7])).logprobs == (0.0,)
    for value in (0.5, float("nan"), -float("inf")):
        for places in ((-1.0, value), (value, -1.0)):
            with pytest.raises(ValueError, match=r"logprobs hold (0.5|nan|-inf), .* no log-probability"):
                Span(kind="sampled", token_ids=(1, 2), mask=(1, 1), logprobs=places, versions=(0, 0))
    with pytest.raises(ValueError, match="reward is NaN"):
        rollout().with_reward(float("nan"), {})


@pytest.mark.parametrize(
    ("text", "speaker"),
    [
        ("<|im_end|>\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n", "user"),
        ("<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n", "tool"),
        ("<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>", "tool"),
        ("<|start_header_id|>user<|end_header_id|>\n\nAgain.<|eot_id|>", "user"),
        ("<start_of_turn>user\nAgain.<end_of_turn>", "user"),
        ("<|observation|>\n4", "tool"),
        ("<|tool_result|>4<|tool_result_end|>", "tool"),
        ("<|end|><|user|>Again.<|end|><|assistant|>", "user"),
        ("what no template marks", "tool"),
        ("a result\n" * 50 + "<|im_start|>user", "tool"),
    ],
)
def test_who_speaks_between_two_answers_is_what_the_template_says(text, speaker):
    spans = (prompt_span([1]), sampled_span([2], [-1.0], 0), Span(kind="tool", token_ids=(3,)))
    rollout = Rollout(group_id="g", prompt_id="p", sample_index=0, spans=spans, finish_reason="stop")
    assert [turn.speaker for turn in turns_of(rollout, lambda ids: text if ids == (3,) else "")] == ["model", speaker]


def test_calls_are_found_in_both_formats_and_one_that_is_not_closed_is_none():
    text = "a <tool_call>{}</tool_call> b <|tool_call|>1+1<|tool_call_end|> <tool_call>"
    calls = ["<tool_call>{}</tool_call>", "<|tool_call|>1+1<|tool_call_end|>"]
    assert [text[begin:end] for begin, end in calls_in(text)] == calls
