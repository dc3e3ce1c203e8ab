"""Which functions a pipeline may name: those beside its file, those its file trusts, and a list of ours."""

import json
import os
import sys
import textwrap

import pytest
import yaml

from nanodag.config import resolve
from nanodag.config.kinds import vouch_for
from nanodag.errors import ConfigError
from nanodag.inference.sglang_options import check_options
from nanodag.own_code.find import FOLDER_VARIABLE, file_of, forget_others, search_last
from nanodag.own_code.functions import function_at
from nanodag.own_code.trusted_modules import Voucher, check_owner, is_beside
from nanodag.run.python_path import note_python_path, take_python_path

TOKENIZER = {"kind": "tokenizer", "data": ["file:text.txt"], "vocabulary": 512}


@pytest.fixture
def pipeline(tmp_path):
    """Resolve a pipeline file in a folder that holds a module `mine` and a package `pack`."""
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "subprocess.py").write_text("")  # hidden by Python's own

    def of(*overrides, **fields):
        preset = {"stages": {"tokenizer": TOKENIZER}, **fields}
        (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump({"default": "tiny", "presets": {"tiny": preset}}))
        return resolve(tmp_path / "pipeline.yaml", "tiny", overrides).pipeline

    return of


@pytest.mark.parametrize("url", ["python:mine:rows?n=3", "python:pack.rows:rows", "python:nanodag.data.lists:sort?n=5"])
def test_a_module_beside_the_file_and_a_shipped_generator_may_be_named(pipeline, url):
    assert pipeline(f'tokenizer.data=["{url}"]').stages["tokenizer"].data[0].url == url


@pytest.mark.parametrize("url", [
    "python:subprocess:getoutput?cmd=id", "python:os:system?command=id", "python:yaml:unsafe_load",
    "python:nanodag.data.lists:is_of_test", "python:nanodag.worker.launch:run_worker",
    "python:nanodag.rewards.function_rewards:GroupReward?path=evil:f",
    "python:nanodag.rewards.text_rewards:exact", "python:nowhere:rows",
])  # fmt: skip
def test_any_other_module_is_refused_wherever_its_name_stands(pipeline, url):
    module = url.split(":")[1]
    reasons = f"names {module}, a module of Python|module {module} (neither stands )?beside"
    with pytest.raises(ConfigError, match=reasons):
        pipeline(f'tokenizer.data=["{url}"]')
    function = url.partition("?")[0].removeprefix("python:")
    with pytest.raises(ConfigError, match="adapter of file"):
        pipeline(f'tokenizer.data=[{{"url": "file:text.txt", "adapter": "{function}"}}]')


def rl(**fields):
    stage = {"kind": "rl", "inputs": {"model": "import"}, **fields}
    return {"import": {"kind": "import", "model": "file:m"}, "rl": stage}


@pytest.mark.parametrize("fields", [
    {"reward": "yaml:load"}, {"reward": {"group:yaml:load": 1.0}}, {"reward": "process:yaml:load"},
    {"advantage": "yaml:load"}, {"policy_loss": "yaml:load"}, {"filters": [{"name": "yaml:load", "options": {}}]},
    {"generate": {"name": "yaml:load"}},
    {"data": [{"url": "file:text.txt", "adapter": "yaml:load"}]},
])  # fmt: skip
def test_every_place_where_rl_names_a_function_is_looked_at(pipeline, fields):
    with pytest.raises(ConfigError, match="the module yaml neither stands beside"):
        pipeline(stages=rl(**{"data": ["file:text.txt"], **fields}))
    pipeline(stages=rl(**{"data": ["file:text.txt"], **fields}), trusted_modules=["yaml"])


def test_trust_covers_a_package_and_nothing_that_only_begins_alike_or_is_pythons_own(pipeline):
    pipeline('tokenizer.data=["python:yaml.loader:f"]', trusted_modules=["yaml"])
    with pytest.raises(ConfigError, match="a module of Python's own"):
        pipeline('tokenizer.data=["python:os.path:expandvars"]', trusted_modules=["os"])
    with pytest.raises(ConfigError, match="there is no module yamlish beside"):
        pipeline('tokenizer.data=["python:yamlish:f"]', trusted_modules=["yaml"])


def test_a_function_is_named_where_it_is_defined(tmp_path, monkeypatch):
    """Else a module of the user's own would lend its imports, `subprocess.getoutput` among them."""
    (tmp_path / "lending.py").write_text(
        textwrap.dedent("""
        import subprocess
        from functools import partial
        from os import system
        from subprocess import Popen, getoutput

        def own(): ...
        made = partial(own)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("getoutput", "Popen", "system", "subprocess"):
        with pytest.raises(ConfigError, match="only imported by lending"):
            function_at(f"lending:{name}")
    assert callable(function_at("lending:own")) and callable(function_at("lending:made"))


@pytest.mark.parametrize("override", [
    "trusted_modules=[subprocess]", "cluster.ssh_command=sh -c id {host}",
    'cluster={"ssh_command": "sh -c id {host}"}', "cluster.hostfile=/tmp/hosts", "rl.sampler.python=/tmp/own",
    'rl.sampler={"engine": "sglang", "python": "/tmp/own"}', 'rl.sampler.options={"forward_hooks": "x"}',
    'rl.sampler.urls=["http://elsewhere:1 /etc/passwd"]', "rl.sampler.urls_file=/tmp/urls",
])  # fmt: skip
def test_no_override_says_which_code_may_run_or_where_keys_are_sent(pipeline, override):
    stages = rl(data=["file:text.txt"], sampler={"engine": "sglang"})
    with pytest.raises(ConfigError, match="an override cannot set it"):
        pipeline(override, stages=stages)


@pytest.mark.parametrize("override", [
    'rl.generate={"name": "agent", "options": {"command": ["sh"]}}',
    'rl.rollout.generate.options={"command": ["mine"], "folder": "/root"}',
    "rl.generate.options.library=/tmp/own", "server.agents_of_file=false",
])  # fmt: skip
def test_a_server_can_refuse_agents_that_an_override_names(pipeline, override):
    generate = {"name": "agent", "options": {"command": ["mine"], "seconds": 5.0}}
    stages = rl(data=["file:text.txt"], rollout={"generate": generate})
    with pytest.raises(ConfigError, match=r"the pipeline file alone may|an override cannot set it"):
        pipeline(override, stages=stages, server={"agents_of_file": True})
    pipeline("rl.rollout.generate.options.seconds=9.0", stages=stages, server={"agents_of_file": True})
    if "generate" in override:
        pipeline(override, stages=stages)
    del stages["rl"]["data"]
    pipeline("rl.data=['file:text.txt']", stages=stages, server={"agents_of_file": True})  # which completes the file


def test_a_pipeline_file_that_everybody_may_write_is_not_run(tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text("presets: {one: {stages: {t: {kind: tokenizer, data: ['file:x']}}}}\ndefault: one\n")
    file.chmod(0o644)
    check_owner(file)
    file.chmod(0o666)
    for read in (check_owner, resolve):
        with pytest.raises(ConfigError, match=r"with mode -rw-rw-rw-; .* not writable by everybody"):
            read(file)


def test_an_abbreviated_option_of_the_samplers_own_is_refused():
    with pytest.raises(ValueError, match=r"sampler.options.hos follows from other fields"):
        check_options({"hos": "0.0.0.0"})


FORMS = ("/elsewhere/evil", "../../evil", "a/b", "store/artifacts/k/evil.yaml", "/x/e.yaml", "lm_eval:../../x.yaml")


@pytest.mark.parametrize("form", [*FORMS, "lm_eval:/x.yaml"])
def test_a_form_may_name_functions_so_it_is_shipped_or_lies_beside_the_file_and_not_in_the_store(pipeline, form):
    evaluated = {"kind": "eval", "inputs": {"model": "start"}, "benchmarks": [{"name": "x"}]}
    stages = {"start": {"kind": "import", "model": "file:start"}, "evaluated": evaluated}
    with pytest.raises(ConfigError, match="lies elsewhere, and a form may name functions"):
        pipeline(f'evaluated.benchmarks=[{{"name": "x", "form": "{form}"}}]', stages=stages)
    pipeline('evaluated.benchmarks=[{"name": "x", "form": "lm_eval:piqa/piqa.yaml"}]', stages=stages)


def test_a_folder_that_others_may_write_vouches_for_no_module(tmp_path):
    (tmp_path / "beside_others.py").write_text("def f(): ...")
    voucher = Voucher(file=tmp_path / "pipeline.yaml", trusted_modules=())
    voucher.check("here", "beside_others:f")
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="belongs to another user or is writable by everybody"):
        voucher.check("here", "beside_others:f")


def test_a_folder_without_init_is_no_package_beside_the_file(tmp_path):
    """The store lies there, too, and others write into it."""
    (tmp_path / "store" / "artifacts").mkdir(parents=True)
    (tmp_path / "store" / "artifacts" / "evil.py").write_text("1 / 0")
    assert not is_beside("store.artifacts.evil", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    assert is_beside("mine.inner", tmp_path) and not is_beside("mine.a-b", tmp_path)


def test_a_noted_python_path_of_another_user_is_not_taken(tmp_path, monkeypatch):
    note_python_path(tmp_path, "r")
    (note,) = (tmp_path / "prefect" / "python_path").iterdir()
    note.write_text("/evil")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "/mine")
    note.chmod(0o666)
    take_python_path(tmp_path, "r")
    assert os.environ["PYTHONPATH"] == "/mine" and "/evil" not in sys.path
    note.chmod(0o644)
    take_python_path(tmp_path, "r")
    assert os.environ["PYTHONPATH"] == "/evil"


def test_of_two_pipeline_files_each_has_its_own_module_of_one_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    for name in ("first", "second", "first"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "two_of_them.py").write_text(f"def who(): return {name!r}")
        (folder / "pipeline.yaml").write_text("")
        vouch_for(folder / "pipeline.yaml", [])
        Voucher(file=folder / "pipeline.yaml", trusted_modules=()).check("reward", "two_of_them:who")
        search_last(folder)
        assert function_at("two_of_them:who")() == name
    forget_others("")
    assert "two_of_them" not in sys.modules and FOLDER_VARIABLE not in os.environ


@pytest.fixture
def modules(tmp_path):
    (tmp_path / "mine_here.py").write_text("raise SystemExit('imported')")
    (tmp_path / "json.py").write_text("")
    (tmp_path / "sys.py").write_text("")
    package = tmp_path / "package_here" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "package_here" / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "leaf.py").write_text("")  # `inner` has no __init__.py: a namespace
    return tmp_path


@pytest.mark.parametrize(("module", "file"), [
    ("mine_here", "mine_here.py"), ("package_here", "package_here/__init__.py"),
    ("package_here.inner.leaf", "package_here/inner/leaf.py"),
    ("package_here.inner", None), ("package_here.nothing", None), ("nothing_here", None), ("mine_here.leaf", None),
    ("sys", None),  # Python's own, whatever lies beside the pipeline file
    ("", None), ("../mine_here", None),
    ("json", json.__file__),  # a file beside the pipeline hides no installed module
])  # fmt: skip
def test_a_module_is_found_and_neither_it_nor_its_package_is_run(modules, module, file):
    assert file_of(module, [modules]) == (None if file is None else modules / file)
