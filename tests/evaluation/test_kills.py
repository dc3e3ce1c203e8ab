"""An eval stage any of whose processes is killed at random: it goes on at the item, and leaves no process behind."""

import json
import os
import random
import signal
import time
from collections import Counter
from functools import partial

import psutil
import pytest

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.worker.job import write_job
from tests.core_bundle import write_bundle
from tests.evaluation.jobs import bytes_of, evaluate
from tests.fault.processes import wait_until
from tests.forks import CPU_ONLY, start_module

KILLS = 20
ROLES = ("asker", "watchdog", "worker", "sampler")
GONE_WITHIN_S = 60.0  # the watchdog gives those that it ends 20 s


def processes(asker):
    """By role, those that live. A worker's children are its samplers."""
    found, parents = {}, [psutil.Process(asker.pid)]
    for role in ROLES:
        living = [one for one in parents if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if living:
            found[role] = living
        parents = [child for one in living for child in one.children()]
    return found


def are_gone(seen):
    return all(not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in seen)


def phase_of(job):
    """The benchmark that was under way last."""
    lines = job.metrics_path.read_bytes().splitlines() if job.metrics_path.exists() else []
    phases = [json.loads(line).get("phase") for line in lines if line.endswith(b"}")]
    return phases[-1] if phases else "start"


def kill_at_random(draw, killed, asker, job):
    """Kill one of a stage's processes, some time after its start or some finished items later, of the role that was
    killed least. Its role, None where all was over; and all processes that were seen."""
    finished = job.workspace / "finished"

    def num_bytes():
        return sum(path.stat().st_size for path in finished.glob("*") if path.is_file())

    first, more, until = num_bytes(), draw.choice([0, draw.randint(1, 100_000)]), time.monotonic() + draw.uniform(0, 3)
    seen = set()
    while asker.poll() is None:
        is_time = num_bytes() >= first + more if more else time.monotonic() > until
        try:
            found = processes(asker)
            seen |= {one for of_role in found.values() for one in of_role}
            if is_time:
                role = min(found, key=lambda role: (killed[role], draw.random()))
                draw.choice(found[role]).kill()
                return role, seen
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
        time.sleep(0.002)
    return None, seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_twenty_times_at_random_a_stage_ends_on_the_same_bytes_and_leaves_no_process(make_job, tmp_path):
    """CORE, likelihoods and the written answers of two samplers; undisturbed, one sampler wrote in this process."""
    written, *likelihoods = make_job("config").config.benchmarks
    benchmarks = (
        BenchmarkConfig(name="core", source=f"file:{write_bundle(tmp_path)}/*/*.jsonl", limit=11),
        *likelihoods,
        BenchmarkConfig(**written.model_dump() | {"num_samples": 64, "temperature": 1.0, "limit": 0}),
    )
    changes = {"benchmarks": benchmarks, "micro_batch_tokens": 128, "max_new_tokens": 64}
    whole = make_job("whole", **changes)
    evaluate(whole)
    sampler = whole.config.sampler.model_copy(update={"replicas": 2, "engine": "embedded"})
    draw, killed, at, stages = random.Random(14), Counter(), Counter(), 0
    while killed.total() < KILLS:
        job = make_job(f"killed-{stages}", **changes, sampler=sampler)
        path, stages = write_job(job), stages + 1
        while not (job.workspace / "result.json").exists():
            log = job.workspace / "asker.log"
            asker = start_module("tests.evaluation.ask", path, environment={**os.environ, **CPU_ONLY}, log=log)
            role, seen = kill_at_random(draw, killed, asker, job) if killed.total() < KILLS else (None, set())
            asker.wait(600)
            said = partial("processes live on after a {} was killed".format, role)
            wait_until(lambda seen=seen: are_gone(seen), GONE_WITHIN_S, said=said)
            if role is not None:
                killed[role] += 1
                at[phase_of(job)] += 1
            logs = [log, job.workspace / "worker.log"]  # a stage that is killed early has not begun its own
            text = "".join(path.read_text() for path in logs if path.exists())
            assert role is not None or asker.returncode == 0, text[-6000:]
            assert role != "asker" or asker.returncode == -signal.SIGKILL
        assert bytes_of(job) == bytes_of(whole)
        assert not list((job.workspace / "finished").glob("*.jsonl"))
    assert set(killed) == set(ROLES) and len(at) > 2, (killed, at)
    print(f"{killed.total()} kills {dict(killed)} at {dict(at)} of {stages} stages")
