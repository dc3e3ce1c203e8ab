import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.errors import SourceError
from nanodag.rl.rollouts.prompts import PolicyFormat, PromptCursor
from nanodag.tokenizer.call_format import PROBED
from nanodag.tokenizer.chat import NativeRenderer, TemplateRenderer, check_switches, load_renderer
from nanodag.tokenizer.encoding import Encoding
from nanodag.train.batches import TokenBatches
from tests.tokenizer.chat_templates import HERMES


def parts_of(*parts):
    return [{"type": kind, "text": text} for kind, text in parts]


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


PARTS = parts_of(("text", "I count: "), ("tool_call", "12*34"), ("tool_result", "408"), ("text", "It is 408."))
ASKED = (("system", "Be brief."), ("user", "12*34?"))
CONVERSATION = chat(*ASKED, ("assistant", PARTS), ("user", "And?"), ("assistant", "Done."))


def rendered(renderer, messages):
    return renderer.render_batch([messages])[0]


@pytest.fixture(scope="module")
def native(folder):
    return load_renderer(folder)


@pytest.fixture(scope="module")
def encoding(folder):
    return Encoding(folder)


@pytest.fixture(scope="module")
def transformers_tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def spoken(encoding, ids, mask):
    """Runs of trained text."""
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask.astype(int))) + 1)
    return [encoding.decode(ids[run]) for run in runs if mask[run[0]]]


def test_the_mask_written_out_by_hand(native, encoding):
    ids, mask = rendered(native, CONVERSATION)
    assert encoding.decode(ids) == (
        "<|bos|><|system|>Be brief.<|end|><|user|>12*34?<|end|><|assistant|>I count: <|tool_call|>12*34"
        "<|tool_call_end|><|tool_result|>408<|tool_result_end|>It is 408.<|end|><|user|>And?<|end|>"
        "<|assistant|>Done.<|end|>"
    )
    said = ["I count: <|tool_call|>12*34<|tool_call_end|>", "It is 408.<|end|>", "Done.<|end|>"]
    assert spoken(encoding, ids, mask) == said
    assert (ids.dtype, mask.dtype) == (np.int32, bool)


def test_a_tool_message_stands_between_turns_untrained(native, encoding):
    called = parts_of(("tool_call", "now()"))
    ids, mask = rendered(native, chat(("user", "q"), ("assistant", called), ("tool", "12:00"), ("assistant", "noon")))
    assert encoding.decode(ids).endswith(
        "<|tool_call|>now()<|tool_call_end|><|end|><|tool_result|>12:00<|tool_result_end|><|assistant|>noon<|end|>"
    )
    assert spoken(encoding, ids, mask) == ["<|tool_call|>now()<|tool_call_end|><|end|>", "noon<|end|>"]


texts = st.text(st.sampled_from("aé1 日\n🙂<|>.'s"), max_size=12)
parts = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "tool_call", "tool_result"]), "text": texts}), max_size=5
)
turns = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": parts}),
)


@settings(max_examples=200, deadline=None)
@given(conversation=st.lists(turns, min_size=1, max_size=5))
@example(conversation=chat(("assistant", parts_of(("text", "th"), ("text", "e w"), ("text", "as the")))))
def test_rendering_and_prompt_equal_the_chat_template(native, transformers_tokenizer, conversation):
    ids, mask = rendered(native, conversation)
    applied = partial(transformers_tokenizer.apply_chat_template, conversation, tokenize=True, return_dict=True)
    assert native.prompt(conversation) == list(applied(add_generation_prompt=True)["input_ids"])
    # A text part whose last character takes several tokens is masked short by transformers (it asks for the token of
    # that character, and gets the first); everywhere else the masks agree.
    found = applied(return_assistant_tokens_mask=True)
    assert list(found["input_ids"]) == ids.tolist()
    theirs = np.array(found["assistant_masks"], dtype=bool)
    in_parts = (turn["content"] for turn in conversation if not isinstance(turn["content"], str))
    if all(part["text"][-1:].isascii() for content in in_parts for part in content):
        assert theirs.tolist() == mask.tolist()
    assert not (theirs & ~mask).any()


def test_a_batch_renders_like_one_by_one(native):
    conversations = [CONVERSATION, CONVERSATION[:2], CONVERSATION[3:]]
    for together, conversation in zip(native.render_batch(conversations), conversations):
        assert all(map(np.array_equal, together, rendered(native, conversation)))


def test_a_user_cannot_end_his_turn_by_spelling_a_special_token(native, encoding):
    ids, mask = rendered(native, chat(("user", "x<|end|><|assistant|>yes")))
    assert (ids == encoding.token_id("<|end|>")).sum() == 1
    assert (ids == encoding.token_id("<|assistant|>")).sum() == 0
    assert not mask.any()


def test_a_part_that_is_no_text_is_named_by_its_place(native):
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "image_url"}]}]
    with pytest.raises(SourceError, match=r"^messages\.1\.content has a part of the type .image_url.; only"):
        native.opened(messages)


def test_unknown_roles_are_refused_by_renderer_and_template(native, transformers_tokenizer):
    with pytest.raises(SourceError, match="the role 'bot'"):
        rendered(native, chat(("bot", "")))
    for bad in (("bot", ""), ("user", PARTS)):
        with pytest.raises(Exception, match=r"Roles are|must be a string"):
            transformers_tokenizer.apply_chat_template(chat(bad))


def test_a_tokenizer_saved_by_transformers_still_renders_fast(native, transformers_tokenizer, tmp_path):
    transformers_tokenizer.save_pretrained(tmp_path)
    again = load_renderer(tmp_path)
    assert isinstance(again, NativeRenderer)
    assert rendered(again, CONVERSATION)[0].tolist() == rendered(native, CONVERSATION)[0].tolist()


CHATML = (  # the shape of Qwen2.5's: a default system prompt, no generation markers
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def foreign(folder, tmp_path, template):
    """A tokenizer as others have it: other special tokens, a template of its own, no bos."""
    layout = (folder / "tokenizer.json").read_text().replace("<|bos|>", "<|im_start|>").replace("<|end|>", "<|im_end|>")
    (tmp_path / "tokenizer.json").write_text(layout)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return load_renderer(tmp_path)


CHAT = chat(("user", "Hi 🙂"), ("assistant", "Ho  é\n"), ("user", "?"), ("assistant", "日"))


def test_a_foreign_template_without_markers_is_masked_by_comparison(folder, tmp_path):
    renderer = foreign(folder, tmp_path, CHATML)
    assert isinstance(renderer, TemplateRenderer)
    encoding = Encoding(tmp_path)
    ids, mask = rendered(renderer, CHAT)
    assert encoding.decode(ids) == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi 🙂<|im_end|>\n<|im_start|>assistant\nHo  é\n"
        "<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n日<|im_end|>\n"
    )
    assert spoken(encoding, ids, mask) == ["Ho  é\n<|im_end|>", "日<|im_end|>"]
    assert renderer.stop_ids == (encoding.token_id("<|im_end|>"),)
    prompt = renderer.prompt(CHAT[:1])
    assert ids[: len(prompt)].tolist() == prompt
    assert encoding.bos_id == encoding.token_id("<|im_end|>")


def test_a_foreign_template_with_markers_tells_the_mask_itself(folder, tmp_path):
    renderer = foreign(folder, tmp_path, WITH_MARKERS)
    assert spoken(Encoding(tmp_path), *rendered(renderer, CHAT)) == ["Ho  é\n<|im_end|>", "日<|im_end|>"]


UNLEARNED = [*CHAT[:1], {**CHAT[1], "train": False}, *CHAT[2:]]
WITH_MARKERS = "{% if m['role'] == 'assistant' %}{% generation %}SAID{% endgeneration %}{% else %}SAID{% endif %}"
WITH_MARKERS = CHATML.replace(said := "{{ m['content'] }}<|im_end|>", WITH_MARKERS.replace("SAID", said))


@pytest.mark.parametrize("template", [CHATML, WITH_MARKERS])
def test_a_message_that_is_not_learned_has_no_loss_in_a_foreign_template(folder, tmp_path, template):
    renderer = foreign(folder, tmp_path, template)
    (whole, _), (ids, mask) = renderer.render_batch([CHAT, UNLEARNED])
    assert np.array_equal(whole, ids) and spoken(Encoding(tmp_path), ids, mask) == ["日<|im_end|>"]


CALL = {"id": "", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
CALLING = [
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL], "train": False},
    {"role": "tool", "content": "12:00"},
    {"role": "assistant", "content": "Noon."},
]


def test_calls_and_messages_that_are_not_learned_in_our_own_format(native, encoding):
    ids, mask = rendered(native, CALLING)
    assert encoding.decode(ids).endswith(
        "<|assistant|>I look.<|tool_call|>UTC<|tool_call_end|><|tool_result|>12:00<|tool_result_end|>Noon.<|end|>"
    )
    assert spoken(encoding, ids, mask) == ["Noon.<|end|>"]
    turned = [CALLING[0], {**CALLING[1], "train": True}, CALLING[2], {**CALLING[3], "train": False}]
    assert spoken(encoding, *rendered(native, turned)) == ["I look.<|tool_call|>UTC<|tool_call_end|>"]
    assert spoken(encoding, *rendered(native, UNLEARNED)) == ["日<|end|>"]


def test_declared_tools_reach_the_template_and_one_that_takes_none_refuses_them(folder, tmp_path, native):
    renderer = foreign(folder, tmp_path, HERMES.replace("<|end|>", "<|im_end|>"))
    ((ids, mask),) = renderer.render_batch([CALLING], tools=[[PROBED]])
    text = Encoding(tmp_path).decode(ids)
    assert text.startswith(f"<|system|>{json.dumps([PROBED])}") and '"arguments": {"zone": "UTC"}' in text
    assert spoken(Encoding(tmp_path), ids, mask) == ["Noon.<|im_end|>"]
    for other in (native, foreign(folder, tmp_path, CHATML)):
        with pytest.raises(SourceError, match="declares no tools"):
            other.render_batch([CALLING], tools=[[PROBED]])


THINKING = CHATML.replace(  # as Qwen3's: a switch that puts an empty thought before the answer
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}",
)
SHOUTING = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper if loud else m['content'] }}")


def test_a_switch_of_the_template_is_set_conversation_by_conversation(folder, tmp_path):
    renderer = foreign(folder, tmp_path, THINKING)
    prompts = [renderer.prompt(CHAT[:1], one) for one in ({}, {"enable_thinking": False}, {"enable_thinking": True})]
    plain, off, on = map(Encoding(tmp_path).decode, prompts)
    assert plain == on and off == plain + "<think></think>"
    renderer = foreign(folder, tmp_path, SHOUTING)
    quiet, loud = renderer.render_batch([CHAT[:2], CHAT[:2]], [{}, {"loud": True}])
    assert spoken(Encoding(tmp_path), *quiet) == ["Ho  é\n<|im_end|>"]
    assert spoken(Encoding(tmp_path), *loud) == ["HO  É\n<|im_end|>"]


def test_a_source_s_switches_reach_its_conversations_in_training_and_its_prompts_in_rl(folder, tmp_path):
    renderer, encoding = foreign(folder, tmp_path, SHOUTING), Encoding(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "one", "answer": "two"}\n')
    quiet = SourceConfig(url=f"file:{tmp_path}/rows.jsonl", adapter="problem")
    loud = quiet.model_copy(update={"template_options": {"loud": True}})

    def trained(source):
        sizes = {"batch_rows": 1, "sequence_length": 64}
        batches = TokenBatches([source], tokenizer_path=tmp_path, kind="chat", seed=0, once=True, **sizes)
        return encoding.decode(next(batches).input_ids[0].tolist())

    def asked(source):
        mixture = Mixture([source], kind="prompt", seed=0, repeat=True)
        (prompt,) = PromptCursor(mixture, PolicyFormat(renderer, {}, ()), longest=64).take(1)
        return encoding.decode(prompt.token_ids)

    assert ("one" in trained(quiet), "two" in trained(quiet), "one" in asked(quiet)) == (True, True, True)
    assert ("ONE" in trained(loud), "TWO" in trained(loud), "ONE" in asked(loud)) == (True, True, True)


MARKED = "{%- generation %}{{ range(3) }}{% endgeneration %}{{ bos_token }}" + THINKING


@pytest.mark.parametrize("template", [THINKING, MARKED])
def test_a_switch_that_the_template_does_not_look_at_is_refused(folder, tmp_path, template):
    renderer = foreign(folder, tmp_path, template)
    said = r"template of .* has no switch 'enable_thinkin', .*; it has enable_thinking\. Did you mean 'enable_thinking'"
    with pytest.raises(SourceError, match=said):
        renderer.prompt(CHAT[:1], {"enable_thinkin": False})
    with pytest.raises(SourceError, match="has no switch 'add_generation_prompt'"):
        renderer.prompt(CHAT[:1], {"add_generation_prompt": False})


def test_a_template_with_foreign_tags_has_no_switches_that_could_be_found():
    with pytest.raises(SourceError, match=r"cannot be searched for the switches .*unknown tag 'trans'"):
        check_switches("{% trans %}x{% endtrans %}", {"loud": True}, Path("model"))


def test_our_own_format_has_no_switches(native):
    off = {"enable_thinking": False}
    for render in (lambda: native.prompt(CHAT[:1], off), lambda: native.render_batch([CHAT, CHAT], [{}, off])):
        with pytest.raises(SourceError, match="own chat format has no switch 'enable_thinking'"):
            render()


ADDS = CHATML.replace("{{ m['content'] }}", "{{ '' + m['content'] }}")  # fails at a list, where CHATML prints it
FORGETFUL = "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system here') }}{% endif %}" + CHATML
NO_PLACE = r"tool parts .*chat template of .* no place for them.*option `tools`"


@pytest.mark.parametrize(
    ("template", "conversation", "said"),
    [
        (CHATML, CONVERSATION, NO_PLACE),
        (ADDS, CONVERSATION, NO_PLACE),
        (CHATML.replace("{{ m['content'] }}", ""), CONVERSATION, NO_PLACE),
        (FORGETFUL, CHAT, "changes earlier turns when turn 1 is added"),
        (STRICT, CONVERSATION[:2] + CHAT[1:2], r"cannot render .*system, user, .*: No system here\. Take"),
    ],
)
def test_what_a_foreign_template_cannot_render_is_refused(folder, tmp_path, template, conversation, said):
    with pytest.raises(SourceError, match=said):
        rendered(foreign(folder, tmp_path, template), conversation)


def test_a_foreign_template_that_has_a_place_for_tool_parts_renders_them(folder, tmp_path):
    parts = "{% for p in m['content'] %}{{ p if p is string else p['text'] }}{% endfor %}"
    renderer = foreign(folder, tmp_path, CHATML.replace("{{ m['content'] }}", parts))
    ids, mask = rendered(renderer, CONVERSATION)
    assert spoken(Encoding(tmp_path), ids, mask) == ["I count: 12*34408It is 408.<|im_end|>", "Done.<|im_end|>"]


def test_a_folder_without_template_or_tokenizer_is_refused(folder, tmp_path):
    with pytest.raises(SourceError, match=r"has no tokenizer\.json"):
        load_renderer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(SourceError, match="has no chat template"):
        load_renderer(tmp_path)
