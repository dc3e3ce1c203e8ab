"""What `--help` says, read as by somebody who sees it for the first time."""

import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from nanodag.cli import app, main
from tests.doc_pages import MAKER

EVERY = {" ".join(path): command for path, command in MAKER.commands()}


@pytest.mark.parametrize("name", EVERY)
def test_every_option_is_explained_no_line_is_cut_or_too_wide_and_a_call_is_shown(name):
    for parameter in EVERY[name].params:
        assert getattr(parameter, "help", "") or parameter.name == "help", parameter.name
    text = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"}, prog_name="nanodag").output
    assert "..." not in text.replace("]...", "").replace("VALUE...", "").replace("KEY...", ""), "a summary is cut"
    assert all(len(line) <= 80 for line in text.splitlines())
    examples = text.partition("Usage:")[2].partition("\n")[2]
    assert f"nanodag {name}" in examples or hasattr(EVERY[name], "commands") or name == "server status"


def test_h_is_help_and_the_version_is_the_packages():
    for path in ((), ("run",), ("server", "stop")):
        assert CliRunner().invoke(app, [*path, "-h"], prog_name="nanodag").output.startswith("Usage: ")
    assert CliRunner().invoke(app, ["--version"]).output == f"nanodag {version('nanodag')}\n"


def test_an_error_is_said_once_on_stderr_and_without_a_class(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["nanodag", "config", "--file", f"{tmp_path}/none.yaml"])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr()
    assert said.err.startswith("error: There is no pipeline file ") and not said.out


def test_stopping_the_server_takes_the_overrides_that_a_run_takes(monkeypatch, tmp_path):
    monkeypatch.setattr("nanodag.server.local_server.LocalServer.stop", lambda server: server._config.port == 4321)
    done = CliRunner().invoke(app, ["server", "stop", "server.port=4321", f"store.url={tmp_path}/s"])
    assert done.output == "The Prefect server has ended.\n", done
