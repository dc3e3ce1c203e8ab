"""The PYTHONPATH of whoever called a run, for its processes."""

import hashlib
import os
import stat
import sys
from pathlib import Path

from nanodag.host.folders import may_be_of_others
from nanodag.store.atomic import write_bytes, writing


def note_python_path(local: Path, run: str) -> None:
    """Keep this process's PYTHONPATH for the processes that are going to execute a run. In a file and not in what the
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
        path = _noted(local, run)
        if any(stat.S_ISLNK(s.st_mode) or may_be_of_others(s) for s in (path.lstat(), path.parent.lstat())):
            return  # whoever may write there would say where code comes from
        noted = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    replaced = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, noted.split(os.pathsep)), *(path for path in sys.path if path not in replaced)]
    os.environ["PYTHONPATH"] = noted


def _noted(local: Path, run: str) -> Path:
    name = hashlib.sha256(run.encode("utf-8", "surrogatepass")).hexdigest()[:32]  # a run's may be no file's
    return local / "prefect" / "python_path" / name
