"""`python -m nanodag.rl job.json`: the RL stage (nanodag.rl.control.controller)."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanodag.errors import NanodagError
from nanodag.host.process_memory import collect_rarely
from nanodag.rl.control.controller import Controller
from nanodag.rl.control.services import Services
from nanodag.rl.rollouts.prompts import with_num_steps
from nanodag.worker.job import Job, leave_when_stopped, load_job

log = logging.getLogger("nanodag.rl")


def main(job: Job | None = None, leave: Callable[[Job], dict[str, Any]] | None = None) -> None:
    """Run an RL stage. job: that named on the command line unless given. leave: makes the product of the records, in
    the place of the trainer's weights, and returns metrics."""
    job = job or load_job()
    job = replace(job, config=with_num_steps(job.config, job.mirror))
    collect_rarely()
    services = Services(job)
    leave_when_stopped(services.abandon)
    try:
        with services, asyncio.Runner() as runner:
            try:
                Controller(job, services, runner).run(leave)
            except NanodagError as error:
                raise services.children.cause_of(error) from error
            finally:
                runner.run(services.samplers.disconnect())
    except NanodagError as error:
        log.error("%s: %s", type(error).__name__, error)
        sys.stderr.flush()
        os._exit(services.children.exit_code)


if __name__ == "__main__":
    main()
