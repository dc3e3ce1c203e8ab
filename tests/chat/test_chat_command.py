"""What `nanodag chat` starts."""

import os
import sys

import pytest
from typer.testing import CliRunner

from nanodag.cli import app
from nanodag.cli.serve import FoundModel
from nanodag.errors import ConfigError


@pytest.fixture
def started(monkeypatch):
    """started(arguments): the command that takes the place of `nanodag chat`."""

    class Started(Exception):
        pass

    def become(program, command, environment):
        raise Started(command)

    monkeypatch.setattr(os, "execve", become)

    def run(*arguments):
        with pytest.raises(Started) as caught:
            CliRunner().invoke(app, ["chat", *map(str, arguments)], catch_exceptions=False)
        return caught.value.args[0][1:]

    return run


def test_a_folder_is_talked_to_in_the_terminal(started, chat_model):
    assert started(chat_model, "--message", "hi") == ["-m", "nanodag.chat", str(chat_model), "--message", "hi"]


def test_what_the_model_was_trained_on_decides_how_the_terminal_asks_it(started, chat_model, monkeypatch):
    alone = {"has_turns": False, "has_calls": False, "prompts": ["Sort: 2 1", "b", "c"]}
    for facts, how in (({}, []), (alone, ["--alone", "--no-tools", "--example=Sort: 2 1", "--example=b"])):
        model = FoundModel("sft", chat_model, facts)
        monkeypatch.setattr(sys.modules["nanodag.cli.serve"], "found_model", lambda *_, model=model: model)
        assert started("RUN", "sft") == ["-m", "nanodag.chat", str(chat_model), *how]


def test_web_serves_the_page_with_every_model_and_opens_it(started, chat_model, tmp_path):
    other = tmp_path / "other"
    other.symlink_to(chat_model)
    command = started(chat_model, "--web", "--also", other)
    assert command[:3] == ["-m", "nanodag.chat.web", f"--model={chat_model.name}={chat_model}"]
    assert sum(part.startswith("--model=") for part in command) == 2 and command[-2:] == ["--port=8000", "--open"]
    assert started(chat_model, "--web", "--port", "9", "--no-open")[-1] == "--port=9"


@pytest.mark.parametrize("wrong", [["--also", "sft"], ["--web", "--message", "hi"]])
def test_options_that_would_do_nothing_are_refused(chat_model, wrong):
    with pytest.raises(ConfigError):
        CliRunner().invoke(app, ["chat", str(chat_model), *wrong], catch_exceptions=False)
