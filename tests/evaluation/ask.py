"""Asks for an eval stage as a run does, `python -m tests.evaluation.ask JOB`: with a watchdog, and with two samplers,
however little they have to do. In a process that forks (tests/forks.py), so that what is set here holds there."""

import sys
from pathlib import Path

from nanodag.evaluation import writing
from nanodag.worker.job import read_job
from nanodag.worker.launch import run_worker

if __name__ == "__main__":
    writing.REPLICA_FLOPS = 1.0
    run_worker(read_job(Path(sys.argv[1])))
