"""Search for modules of the user's own. Nothing is imported for it, not even the packages around it.

A worker looks where Python does: on the PYTHONPATH of whoever called `nanodag run`, among the installed packages, and
last in the pipeline file's folder, so that a file there hides no installed package.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from nanodag.errors import ConfigError

OURS = ("nanodag", "flows", "tasks", "tests", "benchmarks")  # beside the pipeline file that comes with nanodag
FOLDER_VARIABLE = "NANODAG_CODE"  # the pipeline file's folder, for the processes that a process starts


_searched: list[str] = []  # folders that search_given has added to this process's path


def search_last(folder: Path | str) -> None:
    """Search that folder last and no other pipeline file's, here and in all processes that this one starts, once they
    call `search_given`."""
    folder = os.path.abspath(folder)  # a relative one would be another after a change of folder
    forget_others(folder)
    os.environ[FOLDER_VARIABLE] = folder
    search_given()


def search_given() -> None:
    """Search the folder last that the process which started this one has named."""
    if (folder := os.environ.get(FOLDER_VARIABLE)) and folder not in sys.path:
        sys.path.append(folder)
        _searched.append(folder)


def forget_others(folder: Path | str) -> None:
    """Take all other pipeline files' folders from the path, and forget what was imported from there: a module of
    another file may have the same name. folder: "" for none."""
    kept = os.path.abspath(folder) if folder else ""
    for other in [path for path in _searched if path != kept]:
        _searched.remove(other)
        sys.path[:] = [path for path in sys.path if path != other]
        tops = {name for name, module in list(sys.modules.items()) if name not in OURS and _lies_in(module, other)}
        for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
            del sys.modules[name]
        if os.environ.get(FOLDER_VARIABLE) == other:
            del os.environ[FOLDER_VARIABLE]


def _lies_in(module: ModuleType, folder: str) -> bool:
    """True for a module, or a package, that lies in that folder itself; one of Python's own may have no file."""
    if not (name := getattr(module, "__file__", None)):
        return False
    file = Path(name)
    return (file.parent.parent if file.name == "__init__.py" else file.parent) == Path(folder)


def required_file(module: str, where: str, folders: Sequence[Path | str] = ()) -> Path:
    """File of a module, as `file_of` finds it. where: what names the module. Raises ConfigError where there is none."""
    if (file := file_of(module, folders)) is None:
        raise ConfigError(
            f"{where}: there is no module {module} beside the pipeline file, on PYTHONPATH or among the installed "
            "packages."
        )
    return file


def file_of(module: str, folders: Sequence[Path | str] = ()) -> Path | None:
    """The file that `import module` would read; None where there is none, or where Python itself has the module.

    folders: searched after this process's own path.
    """
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    spec = _outermost(parts[0], folders)
    for part in parts[1:]:
        if spec is None:
            return None
        # By its last name: by the whole one, the finder of a folder without __init__.py asks for the imported package.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    # Built into Python or frozen: no file; a package without __init__.py has none either.
    file = Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
    return file if file is not None and file.is_file() else None


def _outermost(name: str, folders: Sequence[Path | str]) -> ModuleSpec | None:
    for finder in sys.meta_path:  # as `import` does; an editable install has a finder of its own
        if (find := getattr(finder, "find_spec", None)) and (spec := find(name, None)) is not None:
            return spec
    return PathFinder.find_spec(name, [str(folder) for folder in folders])
