import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanodag.chat.conversation import Conversation
from nanodag.errors import BadRequest
from nanodag.tokenizer.chat import ChatRenderer


class OneTokenAWord(ChatRenderer):
    """A prompt is one token for each word and each message."""

    stop_ids = (1,)

    def render_batch(self, conversations, switches=None):
        raise NotImplementedError

    def prompt(self, messages, switches=None):
        return [2 for message in messages for _ in ["role", *message["content"].split()]]


def conversation(context: int = 12) -> Conversation:
    return Conversation(OneTokenAWord(), context, temperature=0.5, max_new_tokens=4)


def test_the_oldest_exchange_is_left_out_when_the_context_is_full():
    talk = conversation()
    talk.begin_again("brief")  # 2 tokens
    assert len(talk.ask("a b")) == 2 + 3
    talk.answer("c")  # 2
    assert len(talk.ask("d e f")) == 2 + 4  # with the first exchange it would be 11, and 4 of answer do not fit in 12
    assert [m["content"] for m in talk.messages] == ["brief", "d e f"]


def test_a_message_that_does_not_fit_alone_is_refused_and_forgotten():
    talk = conversation()
    with pytest.raises(BadRequest, match="exceed the model's 12"):
        talk.ask("one two three four five six seven eight")
    assert talk.messages == []
    assert len(talk.ask("one two three four five six seven")) == 8


def test_commands_change_the_conversation():
    talk = conversation()
    talk.ask("a")
    talk.answer("b")
    assert talk.command("/system be brief") == "The conversation begins again with this system message."
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    talk.ask("a")
    talk.command("/reset")
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    talk.command("/system")
    assert talk.messages == []
    assert talk.command("/temperature 0") == "temperature: 0"
    assert talk.temperature == 0
    assert talk.command("/tokens 7") == "tokens: 7"
    assert talk.max_new_tokens == 7
    assert talk.command("/temperature hot") == "/temperature takes a number; found 'hot'."
    assert "out of range" in (talk.command("/tokens 12") or "")
    assert "/quit" in (talk.command("/unknown") or "")
    assert talk.command("/quit") is None


def test_answers_on_standard_output_are_what_the_model_says_greedily(chat_model):
    lines = "/temperature 0\nthe cat\n/reset\nthe dog ran\n"
    done = subprocess.run(
        [sys.executable, "-m", "nanodag.chat", str(chat_model), "--max-new-tokens", "8", "--device", "cpu"],
        input=lines.encode(),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    expected = ""
    for question in ("the cat", "the dog ran"):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        said = []
        with torch.no_grad():
            for _ in range(8):
                said.append(int(model(torch.tensor([ids + said])).logits[0, -1].argmax()))
                if said[-1] == tokenizer.eos_token_id:
                    break
        expected += tokenizer.decode(said, skip_special_tokens=True) + "\n"
    assert done.stdout.decode() == expected


def test_a_folder_without_a_model_is_refused_with_a_reason(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "nanodag.chat", str(tmp_path)], input=b"", capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "no tokenizer.json" in done.stderr.decode()
