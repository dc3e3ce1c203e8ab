"""Where a module of the user's own is found, without running any of it."""

import json

import pytest

from nanodag.own_code.find import file_of


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine_here.py").write_text("raise SystemExit('imported')")
    (tmp_path / "json.py").write_text("")
    (tmp_path / "sys.py").write_text("")
    package = tmp_path / "package_here" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "package_here" / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "leaf.py").write_text("")  # `inner` has no __init__.py: a namespace
    return tmp_path


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("mine_here", "mine_here.py"),
        ("package_here", "package_here/__init__.py"),
        ("package_here.inner.leaf", "package_here/inner/leaf.py"),
        ("package_here.inner", None),
        ("package_here.nothing", None),
        ("nothing_here", None),
        ("mine_here.leaf", None),
        ("sys", None),  # Python's own, whatever lies beside the pipeline file
        ("", None),
        ("../mine_here", None),
    ],
)
def test_a_module_is_found_and_neither_it_nor_its_package_is_run(folder, module, file):
    assert file_of(module, [folder]) == (None if file is None else folder / file)


def test_a_file_beside_the_pipeline_hides_no_installed_module(folder):
    assert str(file_of("json", [folder])) == json.__file__
