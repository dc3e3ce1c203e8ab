"""A trainer on two nodes and a sampler on a third, by its URL: its link is cut, it is killed and started again."""

import dataclasses
import os
import subprocess
import sys
import time

import pytest

from nanodag.worker.job import write_job
from tests.cluster.test_two_nodes import TWO, cluster, nodes
from tests.rl import stages
from tests.rl.operators import Operator

__all__ = ["nodes"]  # a fixture
pytestmark = pytest.mark.slow

CUT_S = 20.0


@pytest.mark.timeout(1200)
def test_a_sampler_on_another_node_that_is_cut_off_and_killed_leaves_the_bytes_of_one_node(nodes, tmp_path):
    config = {"num_steps": 6, "zero_stage": 3, "eval_every": 6}
    (tmp_path / "one").mkdir()
    one = stages.make_job(tmp_path / "one", resources=TWO, **config)
    stages.run(one)
    (tmp_path / "three").mkdir()
    with nodes.one_more() as node:
        with Operator(
            tmp_path, one.inputs["model"], "--context-length=64", host=node, on=nodes.on(node, [])
        ) as operator:
            url = operator.start()
            job = stages.make_job(
                tmp_path / "three",
                resources={**TWO, "nodes": 2},
                sampler={"context": 64, "max_batch": 16, "urls": operator.named(url), "health_timeout_s": 2.0},
                **config,
            )
            write_job(dataclasses.replace(job, context=cluster(tmp_path, nodes)))
            log = job.workspace / "worker.log"
            command = nodes.on(nodes.here, [sys.executable, "-m", "nanodag.rl", str(job.workspace / "job.json")])
            paths = {"PYTHONPATH": str(tmp_path / "three"), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            (job.workspace / stages.STARTED).touch()
            with log.open("ab") as stream:
                process = subprocess.Popen(command, stdout=stream, stderr=stream, env={**os.environ, **paths})
            stages.wait_for_step(job, process, 1)
            with nodes.cut(node):
                time.sleep(CUT_S)
            stages.wait_for_step(job, process, 3)
            operator.kill(url)
            operator.start(url)
            assert process.wait(timeout=600) == 0, log.read_text()[-6000:] + operator.log.read_text()[-3000:]
            assert log.read_text().count("takes part, with weights") == 3
    stages.same_in_the_end(job, one)
