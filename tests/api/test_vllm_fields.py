"""Fields and routes as vLLM has them, and what is told of fields without effect."""

import pytest

from nanodag import __version__
from nanodag.api.command import _served_names
from nanodag.errors import ConfigError
from tests.api.scripted import CALCULATOR, Scripted, app_of, ask, chat, events, model_of, refusal, with_template

USER = {"role": "user", "content": "hi"}
BEGUN = [USER, {"role": "assistant", "content": "It is"}]
CONTINUED = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}{{ reasoning_effort or '' }}"
)


@pytest.fixture
def backend(ids_of):
    return Scripted(ids_of("a", "<|end|>"))


@pytest.fixture
def native(folder, backend):
    return app_of(model_of(folder, backend))


@pytest.fixture
def thinking(folder, tmp_path, backend):
    """An application whose model's chat template has switches."""
    return app_of(model_of(with_template(folder, tmp_path / "model", THINKING, eos_token="<|end|>"), backend))


def test_switches_of_the_chat_template_reach_it(thinking, backend, encoding):
    reply = chat(thinking, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="high").json()
    assert encoding.decode(backend.asked[0].input_ids) == "<|user|>hi<|end|><|assistant|>nohigh"
    assert "warnings" not in reply
    chat(thinking, chat_template_kwargs={"reasoning_effort": "low"}, reasoning_effort="high")
    assert encoding.decode(backend.asked[1].input_ids).endswith("<|assistant|>low")


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_effect_is_taken_and_told(native, stream):
    without = {"chat_template_kwargs": {"messages": "x"}, "reasoning_effort": "low", "logit_bias": {"5": -100}}
    reply = chat(native, **without, stream=stream)
    last = events(reply)[-1] if stream else reply.json()
    assert last["warnings"] == [
        "'reasoning_effort' has no effect: this model's chat template does not look at it",
        "'messages' has no effect: this model's chat template does not look at it",
        "logit_bias has no effect: the engine of tiny has none",
    ]
    if stream:
        assert not any("warnings" in part for part in events(reply)[:-1])
    assert "warnings" not in chat(native, logit_bias={"5": 0}).json()
    assert ask(native, "/v1/completions", {"prompt": "a", "logit_bias": {"5": 1}}).json()["warnings"]


def test_sglang_has_logit_bias(folder, backend):
    assert "warnings" not in chat(app_of(model_of(folder, backend, is_sglang=True)), logit_bias={"5": -1}).json()
    assert backend.asked[0].further == {"logit_bias": {"5": -1}}


def test_a_call_that_was_wanted_and_did_not_come_is_told(saying):
    app, _ = saying("12*34")
    named = {"type": "function", "function": {"name": "calculator"}}
    for choice in ("required", named):
        reply = chat(app, tools=[CALCULATOR], tool_choice=choice).json()
        assert reply["warnings"] == ["choice 0: tool_choice wants a call, and the answer has none"]
    assert "warnings" not in chat(app, tools=[CALCULATOR]).json()
    called, _ = saying("12*34", "<|tool_call_end|>")
    assert "warnings" not in chat(called, tools=[CALCULATOR], tool_choice="required").json()


def test_the_last_message_is_continued(native, thinking, backend, ids_of):
    for app in (native, thinking):
        assert ask(app, "/v1/chat/completions", CONTINUED).json()["choices"][0]["message"]["content"] == "a"
    opening = ids_of("<|user|>", "hi", "<|end|>", "<|assistant|>", "It is")
    assert [list(request.input_ids) for request in backend.asked] == [ids_of("<|bos|>") + opening, opening]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"add_generation_prompt": True}, "goes with add_generation_prompt: false"),
        ({"messages": [USER]}, "the last message is of the role 'user'"),
        ({"messages": [USER, BEGUN[1] | {"tool_calls": [{"function": {"name": "f"}}]}]}, "has tool_calls"),
    ],
)
def test_what_cannot_be_continued_is_refused(native, changed, said):
    assert said in refusal(ask(native, "/v1/chat/completions", CONTINUED | changed))["message"]


def test_a_template_that_leaves_the_last_message_out_cannot_continue_it(folder, tmp_path, backend):
    template = "{{ messages[0].content }}{% if messages[1] is none %}{{ message.content }}{% endif %}"
    app = app_of(model_of(with_template(folder, tmp_path / "model", template), backend))
    error = refusal(ask(app, "/v1/chat/completions", CONTINUED))
    assert "the final message does not appear in the chat" in error["message"] and len(error["message"]) < 800


def test_tokenize_gives_the_ids_that_a_request_would_have(native, backend, ids_of):
    reply = ask(native, "/tokenize", {"model": "tiny", "prompt": "The cat", "return_token_strs": True}).json()
    ids = ids_of("<|bos|>", "The cat")
    assert (reply["count"], reply["max_model_len"], reply["tokens"]) == (len(ids), 200, ids)
    assert "".join(reply["token_strs"]) == "<|bos|>The cat"
    assert ask(native, "/tokenize", {"prompt": "The cat", "add_special_tokens": False}).json()["tokens"] == ids[1:]
    for body in ({"messages": [USER]}, CONTINUED):
        ask(native, "/v1/chat/completions", body)
        assert ask(native, "/tokenize", body).json()["tokens"] == list(backend.asked[-1].input_ids)
    assert ask(native, "/detokenize", {"tokens": ids}).json() == {"prompt": "<|bos|>The cat"}
    assert len(ask(native, "/detokenize", {"tokens": ids * 10_000}).json()["prompt"]) == 10_000 * len("<|bos|>The cat")
    assert refusal(ask(native, "/tokenize", {"model": "other", "prompt": "a"}), 404)


def test_the_version_is_told(native):
    assert ask(native, "/version").json() == {"version": __version__}


def test_the_first_model_may_have_another_name(tmp_path):
    folders = {"rl": tmp_path, "sft": tmp_path}
    assert _served_names(folders, "gpt-x") == ["gpt-x", "sft"] and _served_names(folders, "") == ["rl", "sft"]
    with pytest.raises(ConfigError, match="'sft' is another model's name"):
        _served_names(folders, "sft")
