"""Where a module of the user's own is found. Nothing is imported for it, not even the packages around it.

A worker looks where Python does: on the PYTHONPATH of whoever called `nanodag run`, among the installed packages, and
last in the pipeline file's folder, so that a file there hides no installed package.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from nanodag.store.files import write_bytes, writing


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
    found = Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
    return found if found is not None and found.is_file() else None


def note_python_path(local: Path, run: str) -> None:
    """Keep this process's PYTHONPATH for the processes that are going to carry out a run. In a file and not in what the
    flow run is told: whoever reaches Prefect's server could say where code comes from.

    local: the store's folder on this machine.
    """
    path = _noted(local, run)
    with writing(f"Writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, os.environ.get("PYTHONPATH", "").encode("utf-8", "surrogateescape"))


def take_python_path(local: Path, run: str) -> None:
    """Let this process, and those that it starts, find modules by what was noted for a run in the place of its own
    PYTHONPATH, which is that of whoever started the server. Nothing noted: it stays."""
    try:
        noted = _noted(local, run).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    replaced = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, noted.split(os.pathsep)), *(path for path in sys.path if path not in replaced)]
    os.environ["PYTHONPATH"] = noted


def _noted(local: Path, run: str) -> Path:
    name = hashlib.sha256(run.encode("utf-8", "surrogatepass")).hexdigest()[:32]  # a run's may be no file's
    return local / "prefect" / "python_path" / name


def _outermost(name: str, folders: Sequence[Path | str]) -> ModuleSpec | None:
    for finder in sys.meta_path:  # as `import` does; an editable install has a finder of its own
        if (find := getattr(finder, "find_spec", None)) and (spec := find(name, None)) is not None:
            return spec
    return PathFinder.find_spec(name, [str(folder) for folder in folders])
