"""A rollout turn by turn: who speaks by the marks of chat templates, and where calls of tools stand."""

import pytest

from nanodag.rl.rollouts.readable_rollout import calls_in, turns_of
from nanodag.rl.rollouts.rollout import Rollout, Span, prompt_span, sampled_span


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
    assert [text[begin:end] for begin, end in calls_in(text)] == [
        "<tool_call>{}</tool_call>", "<|tool_call|>1+1<|tool_call_end|>"
    ]  # fmt: skip
