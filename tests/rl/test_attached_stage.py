"""A whole RL stage on servers that somebody else runs, by `nanodag sampler serve`, and kills, and starts again."""

import os
from contextlib import ExitStack

import pytest

from nanodag.errors import MissingTool
from nanodag.inference.engine_install import find_python
from tests.rl.operators import Operator
from tests.rl.stages import make_job, metrics, run, same_in_the_end, start, wait_for_step


def made(folder, **config):
    folder.mkdir()
    return make_job(folder, **config)


@pytest.mark.slow
def test_a_stage_whose_servers_are_killed_and_one_started_again_ends_on_the_bytes_of_one_with_samplers_of_its_own(
    tmp_path,
):
    config, sizes = {"num_steps": 5, "eval_every": 5}, {"context": 64, "max_batch": 16}
    quiet = made(tmp_path / "own", sampler={**sizes, "replicas": 2}, **config)
    run(quiet)
    with ExitStack() as stack:
        operator = stack.enter_context(Operator(tmp_path, quiet.inputs["model"], "--context-length=64"))
        first, second = operator.start(), operator.start()
        operator.wait()
        job = made(tmp_path / "attached", sampler={**sizes, "urls": operator.named(first, second)}, **config)
        assert job.config.sampler.replicas == 0 and job.config.sampler.deterministic is True
        process = start(job)
        wait_for_step(job, process, 1)
        operator.kill(first)
        operator.kill(second)
        operator.start(first)
        log = job.workspace / "worker.log"
        assert process.wait(timeout=400) == 0, log.read_text()[-6000:] + operator.log.read_text()[-3000:]
        assert log.read_text().count("takes part, with weights") == 3
        assert f"The sampler at {second} is left out" in log.read_text()
        assert operator.running[first].poll() is None  # never stopped by the stage
    same_in_the_end(job, quiet)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_stage_goes_on_when_its_sglang_server_is_killed_and_started_again(tmp_path):
    try:
        find_python("auto", "cpu")
    except MissingTool as error:
        if os.environ.get("NANODAG_CI"):
            raise
        pytest.skip(str(error))
    sampler = {"engine": "sglang", "context": 64, "max_batch": 16, "start_timeout_s": 1200}
    model = made(tmp_path / "model", sampler=sampler).inputs["model"]
    options = ("--engine=sglang", "--context-length=64", "-o", "max-total-tokens=4096", "-o", "mem-fraction-static=0.1")
    with Operator(tmp_path, model, *options, patience_s=1200) as operator:
        url = operator.start()
        operator.wait()
        sampler["urls"] = operator.named(url)
        job = made(tmp_path / "stage", sampler=sampler, num_steps=4, sync_check_every=1, eval_every=4)
        process = start(job)
        wait_for_step(job, process, 1)
        operator.kill(url)
        operator.start(url)
        log = job.workspace / "worker.log"
        assert process.wait(timeout=1500) == 0, log.read_text()[-6000:] + operator.log.read_text()[-3000:]
        assert log.read_text().count("takes part, with weights") == 2
        assert [line["step"] for line in metrics(job)] == [1, 2, 3, 4]
        assert all(line["mismatch_largest"] < 1e-3 for line in metrics(job))
