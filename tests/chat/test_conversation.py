import asyncio
import io
import os
import pty
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanodag.api.prompt_rendering import ChatPrompt, chat_prompt
from nanodag.api.refusals import Refused
from nanodag.api.tool_format import Call, Reader
from nanodag.chat.__main__ import Dialogue, Talk
from nanodag.chat.tools import MAX_ROUNDS
from nanodag.errors import BadRequest
from nanodag.tokenizer.encoding import Encoding
from tests.api.scripted import Scripted, model_of, spelled


def one_token_a_word(body) -> ChatPrompt:
    """A prompt is one token for each word and each message."""
    ids = [2 for message in body.messages for _ in ["role", *message.content.split()]]
    return ChatPrompt(ids=ids, stop_ids=(1,), reader=Reader)


def conversation(context: int = 12, render=one_token_a_word) -> Dialogue:
    return Dialogue(render, context, temperature=0.5, max_new_tokens=4)


def length_of_prompt(talk: Dialogue, question: str) -> int:
    talk.ask(question)
    return len(talk.prompt().ids)


def test_the_oldest_exchange_is_left_out_when_the_context_is_full():
    talk = conversation()
    talk.begin_again("brief")  # 2 tokens
    assert length_of_prompt(talk, "a b") == 2 + 3
    talk.answer("", [Call("calculator", "{}")], ["r"])  # 1 and 2
    talk.answer("c")  # 2
    # with the first exchange it would be 14, and 4 of answer do not fit in 12
    assert length_of_prompt(talk, "d e f") == 2 + 4
    assert [m["content"] for m in talk.messages] == ["brief", "d e f"]


def test_a_message_that_does_not_fit_alone_is_refused_and_forgotten():
    talk = conversation()
    with pytest.raises(BadRequest, match="exceed the model's 12"):
        length_of_prompt(talk, "one two three four five six seven eight")
    assert talk.messages == []
    assert length_of_prompt(talk, "one two three four five six seven") == 8


def test_a_model_of_single_questions_is_sent_each_message_without_those_before_it():
    talk = conversation()
    talk.is_alone = True
    talk.begin_again("brief")
    assert [length_of_prompt(talk, "a b"), length_of_prompt(talk, "c")] == [2 + 3, 2 + 2]
    assert talk.command("/history") == "Earlier messages are sent too."
    assert length_of_prompt(talk, "d") == 2 + 2 + 2


def test_a_model_that_cannot_be_offered_tools_is_asked_without_them():
    def render(body):
        if body.tools:
            raise Refused("it knows no tools", param="tools")
        return one_token_a_word(body)

    talk = conversation(render=render)
    assert length_of_prompt(talk, "a") == 2
    assert (talk.tools, talk.toolless) == ((), "it knows no tools")


def test_commands_change_the_conversation():
    talk = conversation()
    talk.ask("a")
    talk.answer("b")
    anew = "The conversation begins again"
    for command, said in {"/system be brief": f"{anew} with this system message.", "/reset": f"{anew}."}.items():
        assert talk.command(command) == said
        assert talk.messages == [{"role": "system", "content": "be brief"}]
        talk.ask("a")
    talk.command("/system")
    assert talk.messages == []
    for command, said in {
        "/temperature 0": "temperature: 0",
        "/temperature hot": "/temperature takes a number; found 'hot'.",
        "/tokens 7": "tokens: 7",
        "/tools python calculator": "The model may call: python, calculator.",
        "/tools shell": "There is no tool 'shell'; there are calculator, python.",
    }.items():
        assert talk.command(command) == said
    for command, said in {"/tokens 12": "out of range", "/unknown": "/quit"}.items():
        assert said in (talk.command(command) or ""), command
    assert (talk.temperature, talk.max_new_tokens, talk.tools) == (0, 7, ("python", "calculator"))
    assert talk.command("/tools") == "The model may call nothing."
    assert talk.tools == () and talk.command("/quit") is None


class Spoken(Scripted):
    """Says one text after another, and the last again and again."""

    def __init__(self, *texts):
        super().__init__([])
        self.texts = list(texts)

    def answer(self, request, *, stream):
        self.ids = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        return super().answer(request, stream=stream)


@pytest.fixture
def spoken(chat_model):
    return partial(spelled, Encoding(chat_model))


@pytest.fixture
def talk_with(chat_model):
    """A talk with a model that says these; what was printed for the reader is in its `printed`."""
    with asyncio.Runner() as runner:

        def made(*texts):
            backend = Spoken(*texts)
            model = model_of(chat_model, backend)
            heard = Dialogue(lambda body: chat_prompt(model, body), 200, temperature=0.0, max_new_tokens=40)
            printed = io.StringIO()
            return heard, backend, printed, Talk(heard, model, runner, Console(file=printed), is_terminal=False)

        yield made


def test_a_call_is_carried_out_and_the_answer_goes_on_behind_its_result(talk_with, spoken, capsys):
    call = spoken("the ", "<|tool_call|>", "12*34", "<|tool_call_end|>")
    heard, backend, printed, talk = talk_with(call, spoken("cat", "<|end|>"))
    assert talk.hears("how many")
    assert printed.getvalue() == "the cat\n"
    assert capsys.readouterr().err == "calculator: 12*34 = 408\n"
    result = spoken("<|tool_result|>", "408", "<|tool_result_end|>")
    first, second = (list(request.input_ids) for request in backend.asked)
    assert second == first + call + result
    assert [message["role"] for message in heard.messages] == ["user", "assistant", "tool", "assistant"]
    assert heard.messages[2]["tool_call_id"] == heard.messages[1]["tool_calls"][0]["id"]


def test_a_model_that_calls_without_end_is_ended(talk_with, spoken, capsys):
    heard, backend, _, talk = talk_with(spoken("<|tool_call|>", "1", "<|tool_call_end|>"))
    assert talk.hears("a")
    assert len(backend.asked) == MAX_ROUNDS + 1
    assert "called tools in more than 8 rounds" in capsys.readouterr().err
    assert heard.messages[-1] == {"role": "assistant", "content": ""}


def test_an_answer_that_is_ended_stays_as_far_as_it_was_said(talk_with, spoken):
    heard, backend, printed, talk = talk_with(spoken("the cat sat", "<|end|>"))
    answer = backend.answer

    async def interrupted(request, *, stream):
        async for completion in answer(request, stream=stream):
            yield completion
            if completion.output_ids == spoken("the cat"):
                raise KeyboardInterrupt

    backend.answer = interrupted
    assert talk.hears("a")
    assert heard.messages[-1] == {"role": "assistant", "content": "the cat"}
    assert printed.getvalue() == "the cat\n"


def test_lines_of_an_earlier_chat_come_back_with_the_arrow_key(tmp_path):
    """On a terminal of its own, as readline needs one."""
    program = (
        "from nanodag.chat.__main__ import typed_lines\n"
        "for line in typed_lines('you'):\n"
        "    print('heard', repr(line), flush=True)\n"
    )

    def typed(keys):
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.update(XDG_STATE_HOME=str(tmp_path), TERM="xterm")
            os.execv(sys.executable, [sys.executable, "-c", program])
        shown, deadline = b"", time.monotonic() + 30
        with suppress(OSError):  # the terminal's end
            while b"you" not in shown and time.monotonic() < deadline:
                shown += os.read(terminal, 4096)
            os.write(terminal, keys)
            while piece := os.read(terminal, 4096):
                shown += piece
        os.waitpid(pid, 0)
        os.close(terminal)
        return shown.decode()

    assert "heard 'the cat'" in typed(b"the cot\x1b[D\x7fa\r\x04")  # left, delete: `t` stays
    assert "heard 'the cat sat'" in typed(b"\x1b[A sat\r\x04")
    history = tmp_path / "nanodag" / "chat-history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.read_text().splitlines()[-2:] == ["the cat", "the cat sat"]


def chat_process(lines, *arguments):
    command = [sys.executable, "-m", "nanodag.chat", *map(str, arguments)]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120, check=False)


def test_answers_on_standard_output_are_what_the_model_says_greedily(chat_model):
    lines = "/temperature 0\nthe cat\n/reset\nthe dog ran\n"
    done = chat_process(lines, chat_model, "--max-new-tokens", "8", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    expected = ""
    for question in ("the cat", "the dog ran"):
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        said = []
        with torch.no_grad():
            for _ in range(8):
                said.append(int(model(torch.tensor([ids + said])).logits[0, -1].argmax()))
                if said[-1] in (tokenizer.eos_token_id, tokenizer.bos_token_id):  # a next document begins with bos
                    break
        expected += tokenizer.decode(said, skip_special_tokens=True) + "\n"
    assert done.stdout == expected


def test_a_folder_without_a_model_is_refused_with_a_reason(tmp_path):
    done = chat_process("", tmp_path)
    assert done.returncode == 1 and "no tokenizer.json" in done.stderr
