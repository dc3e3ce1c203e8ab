import sys

import pytest

from nanodag.data.digests import folder_sha256
from nanodag.data.opening import open_source
from nanodag.errors import ConfigError, SourceError

CODE = """
def squares(count=3, offset=0):
    return [{"n": offset + i * i} for i in range(count)]

def stream(count=3):
    for i in range(count):
        yield {"n": i}

def numbers():
    return [1, 2]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "some_rows.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "some_rows.py"
    sys.modules.pop("some_rows", None)


def test_a_function_of_ones_own_gives_rows(module):
    source = open_source("python:some_rows:squares?count=4&offset=1")
    assert [row["n"] for _, row in source.rows()] == [1, 2, 5, 10]
    assert (source.length(), len(source.blocks())) == (4, 1)


def test_an_iterator_is_made_again_for_each_pass(module):
    source = open_source("python:some_rows:stream?count=5")
    assert source.blocks() is None
    assert [index for index, _ in source.rows(1, 1, 2)] == [1, 3]
    assert [index for index, _ in source.rows(1, 1, 2)] == [1, 3]


def test_identity_holds_the_code_and_imports_nothing(module):
    before = open_source("python:some_rows:squares").identity()
    assert "some_rows" not in sys.modules
    module.write_text(CODE + "\n# changed\n")
    assert open_source("python:some_rows:squares").identity() != before
    assert open_source("python:some_rows:squares?count=9").identity() != before


def test_what_is_missing_or_not_a_row_is_named(module):
    with pytest.raises(SourceError, match="has no function cubes"):
        open_source("python:some_rows:cubes").length()
    with pytest.raises(ConfigError, match="no module nowhere_to_be_found"):
        open_source("python:nowhere_to_be_found:f")
    with pytest.raises(SourceError, match="must give dicts; found 1"):
        list(open_source("python:some_rows:numbers").rows())


def test_reasoning_gym_rows_depend_on_name_parameters_seed_and_index_only():
    url = "reasoning_gym:chain_sum?size=6&seed=3&min_terms=2&max_terms=2"
    first = [row["question"] for _, row in open_source(url).rows()]
    assert [row["question"] for _, row in open_source(url).rows(start=4)] == first[4:]
    assert [row["question"] for _, row in open_source(url.replace("seed=3", "seed=4")).rows()] != first


def test_reasoning_gym_identity_states_everything():
    identity = open_source("reasoning_gym:chain_sum?size=5").identity()
    assert (identity["parameters"], identity["version"]) == ({"seed": 0, "size": 5}, "0.1.25")


def test_an_unknown_generator_or_parameter_is_named():
    with pytest.raises(SourceError, match="does not make 'chain_sums'"):
        open_source("reasoning_gym:chain_sums").length()
    with pytest.raises(SourceError, match="termss"):
        open_source("reasoning_gym:chain_sum?termss=2").length()


def test_a_folder_digest_leaves_out_compiled_files_and_named_folders_inside_and_never_what_lies_above(tmp_path):
    program = tmp_path / ".venv" / "agent"
    (program / ".git").mkdir(parents=True)
    (program / "agent.py").write_text("x = 1")
    (program / ".git" / "HEAD").write_text("a")
    before, whole = folder_sha256(program, without=(".git", ".venv")), folder_sha256(program)
    (program / "__pycache__").mkdir()
    (program / "__pycache__" / "a.pyc").write_bytes(b"1")
    assert folder_sha256(program) == whole
    (program / ".git" / "HEAD").write_text("b")
    assert folder_sha256(program) != whole
    assert folder_sha256(program, without=(".git", ".venv")) == before
    (program / "b.py").write_text("")
    changed = folder_sha256(program, without=(".git", ".venv"))
    assert changed != before
    (program / "agent.py").write_text("x = 2")
    assert folder_sha256(program, without=(".git", ".venv")) != changed
