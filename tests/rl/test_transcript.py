"""Conversations that go on: which ids are asked, and which sequences are trained."""

import pytest

from nanodag.rl.environments.transcript import Transcript
from nanodag.rl.rollouts.rollout import prompt_span
from nanodag.tokenizer.encoding import Encoding
from tests.rl.fakes import completion
from tests.rl.templates import FORGETFUL, LLAMA3, QWEN3, QWEN25, renderer_of
from tests.rl.transcripts import QUESTION, base, num_continued, said
from tests.tokenizer.byte_ids import encode_bytes

TEMPLATES = {"ours": None, "qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "forgetful": FORGETFUL}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"sum": {"type": "string"}}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"sum": "1+1"}'}}
THANKS = {"role": "user", "content": "Thanks. And é?"}


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in TEMPLATES}
    return {name: (renderer_of(TEMPLATES[name], folder), Encoding(folder)) for name, folder in folders.items()}


def spelled(encoding, text):
    """Ids of a text, a token a byte: never what the tokenizer itself would give."""
    return [encode_bytes(encoding, bytes([value]))[0] for value in text.encode() if value < 128]


@pytest.mark.parametrize("name", ["ours", "qwen2.5", "llama3"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_answer_is_continued_by_its_own_ids_and_one_that_was_cut_off_gets_its_end(formats, name, is_cut):
    renderer, encoding = formats[name]
    transcript = Transcript(renderer, encoding)
    first = transcript.asked([QUESTION])
    end = renderer.stop_ids[0]
    sampled = [*spelled(encoding, "It is two"), *([] if is_cut else [end])]
    assert first.sequence is None and encoding.encode("It is two") != sampled[:9]
    transcript.answered(first, completion(sampled, "length" if is_cut else "stop"), said("It is two"))
    second = transcript.asked([QUESTION, said("It is two"), THANKS])
    assert second.sequence == 0 and second.ids[: len(first.ids) + len(sampled)] == (*first.ids, *sampled)
    assert encoding.decode(second.ids[len(first.ids) + len(sampled) :]).startswith(encoding.decode([end])) == is_cut
    # as the template renders it, but for how the answer is spelled
    assert encoding.decode(second.ids) == encoding.decode(renderer.opened([QUESTION, said("It is two"), THANKS]))
    transcript.answered(second, completion([7, end]), said("7"))
    sample = transcript.sample(base())
    assert [span.kind for span in sample.spans] == ["prompt", "sampled", "tool", "sampled"] and not sample.branches
    assert sample.token_ids == (*second.ids, 7, end)


WRITTEN = {  # how a model writes the call, in other words than the template: JSON's spelling and white space differ
    "ours": ("<|tool_call|>", "1+1", "<|tool_call_end|>"),
    "qwen2.5": ('<tool_call>\n{"arguments":{"sum":"1\\u002b1"}, "name":"add"}\n</tool_call>', "<|im_end|>"),
    "qwen3": ('<think>\nhm\n</think>\n\n<tool_call>{"name":"add","arguments":{"sum":"1+1"}}</tool_call>', "<|im_end|>"),
    "llama3": ('{"name":"add","parameters":{"sum":"1+1"}}', "<|eot_id|>"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_tool_s_result_stands_behind_the_call_as_it_was_sampled(formats, name):
    renderer, encoding = formats[name]
    transcript = Transcript(renderer, encoding)
    first = transcript.asked([QUESTION], TOOLS)
    sampled = []
    for piece in WRITTEN[name]:
        is_special = piece.startswith("<|")
        sampled += [encoding.token_id(piece)] if is_special else spelled(encoding, piece)
    answer = said("<think>\nhm\n</think>\n\n" if name == "qwen3" else "", [CALL])
    transcript.answered(first, completion(sampled), answer)
    # the client sends it back as clients do: with fields of their own, and identities anew
    echo = answer | {"tool_calls": [CALL | {"id": "x", "index": 0}], "refusal": None}
    second = transcript.asked([QUESTION, echo, {"role": "tool", "tool_call_id": "x", "content": "2"}], TOOLS)
    assert second.sequence == 0
    assert second.ids[len(first.ids) :][: len(sampled)] == tuple(sampled)
    result = encoding.decode(second.ids[len(first.ids) + len(sampled) :])
    whole = renderer.opened([QUESTION, answer, {"role": "tool", "content": "2"}], tools=TOOLS)
    assert encoding.decode(whole).endswith(encoding.decode(sampled[-1:]) + result) and "2" in result
    # with other tools, or other words before it, it is another conversation
    assert transcript.asked([QUESTION, echo, {"role": "tool", "content": "2"}]).sequence is None
    assert transcript.asked([THANKS, echo, {"role": "tool", "content": "2"}], TOOLS).sequence is None


@pytest.mark.parametrize("name", ["qwen3", "forgetful"])
def test_a_template_that_leaves_thinking_out_begins_a_further_sequence_with_the_prompt_as_it_renders_it(formats, name):
    renderer, encoding = formats[name]
    transcript, end = Transcript(renderer, encoding), renderer.stop_ids[0]
    first = transcript.asked([QUESTION])
    thought = "hm\n</think>\n\nTwo" if name == "forgetful" else "<think>\nhm\n</think>\n\nTwo"
    thinking = [*spelled(encoding, thought), end]
    transcript.answered(first, completion(thinking), said(thought))
    messages = [QUESTION, said(thought), THANKS]
    second = transcript.asked(messages)
    assert second.sequence is None and "hm" not in encoding.decode(second.ids)
    assert second.ids == tuple(renderer.opened(messages))
    transcript.answered(second, completion([8, end]), said("8"))
    sample = transcript.sample(base())
    (branch,) = sample.branches
    assert sample.spans[0].token_ids == second.ids and sample.last_turn == (8, end) and sample.answer is None
    assert branch.spans[0].token_ids == first.ids and branch.last_turn == tuple(thinking)
    # where the first call was the sample's own prompt, that is the main sequence; the reward sees the last answer
    other_way = transcript.sample(base(spans=(prompt_span(first.ids),)))
    assert other_way.spans == branch.spans and other_way.branches[0].spans == sample.spans
    assert other_way.answer == encoding.decode([8])


def test_an_empty_thought_that_the_template_takes_back_begins_a_further_sequence(formats):
    renderer, encoding = formats["qwen3"]
    transcript = Transcript(renderer, encoding, {"enable_thinking": False})
    first = transcript.asked([QUESTION])
    assert encoding.decode(first.ids).endswith("<think>\n\n</think>\n\n")
    transcript.answered(first, completion([*spelled(encoding, "Two"), renderer.stop_ids[0]]), said("Two"))
    second = transcript.asked([QUESTION, said("Two"), THANKS])
    assert second.sequence is None and encoding.decode(second.ids).count("<think>") == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_sampled_token_is_trained_once_behind_the_very_ids_that_it_was_sampled_from(formats, name):
    count = num_continued(*formats[name], num_seeds=12)
    assert count > 10 if name != "forgetful" else count == 0


def test_a_conversation_that_goes_on_twice_is_two_sequences_whoever_was_first(formats):
    renderer, encoding = formats["qwen2.5"]
    end, seeds, samples = renderer.stop_ids[0], [], []
    for order in ((0, 1), (1, 0)):
        transcript = Transcript(renderer, encoding)
        first = transcript.asked([QUESTION])
        told = [QUESTION, said(encoding.decode([7]))]
        transcript.answered(first, completion([7, end]), told[1])
        parts = {n: transcript.asked([*told, {"role": "user", "content": f"Part {n}"}]) for n in order}
        for n in order:
            transcript.answered(parts[n], completion([9 + n, end]), said(f"{n}"))
        final = transcript.asked([{"role": "user", "content": "The end"}])
        transcript.answered(final, completion([20, end]), said("20"))
        seeds.append({n: asked.seed(5) for n, asked in parts.items()})
        samples.append(transcript.sample(base(spans=(prompt_span(final.ids),))))
        assert transcript.asked([QUESTION]).seed(5) != first.seed(5)  # it is asked once more, and drawn anew
    earlier = transcript.sample(base(), last=0)  # an answer that was continued: the reward sees it all the same
    assert earlier.spans[1].token_ids == (7, end) and earlier.answer == encoding.decode([7])
    assert samples[0] == samples[1] and seeds[0] == seeds[1] and len({*seeds[0].values()}) == 2
    main, (one, other) = samples[0], samples[0].branches
    assert main.last_turn == (20, end)
    assert one.spans[1].token_ids == (7, end) and one.last_turn == (9, end)
    assert other.last_turn == (10, end) and other.num_sampled == 2  # what both begin with is the other one's prompt
    assert other.spans[0].token_ids[: len(first.ids) + 2] == (*first.ids, 7, end)
