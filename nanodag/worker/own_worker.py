"""`python -m nanodag.worker.own_worker job.json`: runs the worker of a user's kind that stands beside the pipeline
file, as `python -m MODULE job.json` would run one that is installed."""

import runpy
import sys
from pathlib import Path

from nanodag.config.kinds import find_kind
from nanodag.own_code.trusted_modules import is_beside
from nanodag.worker.job import read_job


def module_of(module: str, code: str) -> str:
    """What `python -m` runs for a kind's worker. code: the pipeline file's folder. It is on no path of Python's, as
    what else lies there must hide no installed package."""
    return "nanodag.worker.own_worker" if code and is_beside(module, Path(code)) else module


def main() -> None:
    job = read_job(Path(sys.argv[1]))  # its kind is imported from beside the pipeline file; so is the worker
    runpy.run_module(find_kind(job.config.kind).module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
