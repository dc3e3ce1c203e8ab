"""A trainer on two nodes, a sampler on a third, and a server of others on a fourth, with weights by broadcast: a node
loses its power, or the first one its link, at each of three moments. So does the server, where it is the only sampler.
The stage ends on the bytes of one node."""

import dataclasses
import os
import random
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.worker.job import write_job
from tests.cluster.namespaces import SSH_COMMAND, TWO
from tests.rl import stages
from tests.rl.models import save_tiny_model
from tests.rl.operators import Operator

pytestmark = pytest.mark.slow

CUT_S = 20.0
AWAY_S = 3.0
KILLED = 137  # the exit code of a stage that lost a process to SIGKILL, which its run starts again
CONFIG = {"num_steps": 4, "eval_every": 4, "eval_at_start": False, "zero_stage": 3}
CONFIG["max_staleness"] = 0  # so that no two moments meet


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The stage on one node."""
    folder = tmp_path_factory.mktemp("one")
    job = made(folder, resources=TWO)
    stages.run(job)
    return job


def made(folder, **config):
    """Its job. The model is deep enough for each moment to last some tenths of a second."""
    job = stages.make_job(folder, **CONFIG, **config)
    save_tokenizer(stages.BYTES, save_tiny_model(folder / "model", vocabulary=stages.VOCABULARY, num_layers=16))
    return job


def moment(job):
    """What the stage does, by what it has written; "start" before its first step is done."""
    log = (job.workspace / "worker.log").read_text()
    given = max((int(version) for version in re.findall(r" weights (\d+): (?:broadcast|loaded)", log)), default=-1)
    noted = max((line["step"] for line in stages.metrics(job)), default=0) if job.metrics_path.exists() else 0
    rollouts = job.records / "rollouts"
    generated = max((int(path.stem.partition("-")[2]) for path in rollouts.glob("step-????????.jsonl")), default=0)
    if not noted:
        return "start"
    if generated > noted:
        return "training"
    return "generation" if given >= noted else "weight sync"


class Stage:
    """One that runs on these nodes; begun again where a signal ended it, as the run does."""

    def __init__(self, nodes, job):
        self.nodes, self.job, self.log = nodes, job, job.workspace / "worker.log"
        self.num_starts = 0
        self.start()

    def start(self):
        command = self.nodes.on(self.nodes.here, [sys.executable, "-m", "nanodag.rl"])
        paths = {"PYTHONPATH": str(self.job.workspace.parent), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        command.append(str(self.job.workspace / "job.json"))
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=stream, env={**os.environ, **paths})
        self.num_starts += 1

    def wait_for(self, wanted):
        deadline = time.monotonic() + 240
        while moment(self.job) != wanted:
            assert self.process.poll() is None and time.monotonic() < deadline, self.told()
            time.sleep(0.002)

    def finish(self):
        while code := self.process.wait(timeout=300):
            assert code == KILLED and self.num_starts == 1, f"ended with {code}\n{self.told()}"
            self.start()

    def told(self):
        logs = sorted(self.job.workspace.glob("sampler-*.log"))
        return "\n".join(path.read_text()[-6000:] for path in (*logs, self.log))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["generation", "training", "weight sync"])
@pytest.mark.parametrize("what", ["a sampler's node", "a trainer's node", "the link", "the only server's link"])
def test_a_stage_ends_on_the_bytes_of_one_node_whatever_it_loses_and_whenever(nodes, one, tmp_path, what, when):
    with ExitStack() as stack:
        third, fourth = (stack.enter_context(nodes.one_more(number)) for number in (3, 4))
        operator = Operator(tmp_path, one.inputs["model"], "--context-length=64", host=fourth, on=nodes.on(fourth, []))
        url = stack.enter_context(operator).start()
        hostfile = tmp_path / "hostfile"
        hostfile.write_text("".join(f"{node} slots=1\n" for node in (nodes.there, nodes.here, third)))
        sampler = {"urls": operator.named(url), "context": 64, "max_batch": 16, "health_timeout_s": 5.0}
        if what != "the only server's link":
            sampler |= {"nodes": 1, "replicas": 1}
        job = made(
            tmp_path,
            resources={**TWO, "nodes": 2},
            placement="separate" if "nodes" in sampler else "beside",
            sampler=sampler,
            sync="distributed",
            sync_timeout_s=8.0,
            sync_bucket_bytes=1000,
        )
        stages.slow_rewards(tmp_path)
        cluster = {"hostfile": str(hostfile), "ssh_command": SSH_COMMAND}
        write_job(dataclasses.replace(job, context={"cluster": cluster}))
        stage = Stage(nodes, job)
        stack.callback(stage.process.kill)
        stage.wait_for(when)
        time.sleep(0.1 * random.Random(os.getpid()).random())
        if "link" in what:
            with nodes.cut(nodes.here if what == "the link" else fourth):
                assert moment(job) == when
                time.sleep(CUT_S)
        else:
            node = third if what == "a sampler's node" else nodes.there
            assert nodes.kill(node) >= 2  # the watchdog, what it watches
            assert moment(job) == when
            assert subprocess.run(["ip", "netns", "del", node], check=False).returncode == 0
            powered = threading.Timer(AWAY_S, lambda: nodes.plug(node))
            powered.start()
            stack.callback(powered.join)
        stage.finish()
        assert stage.num_starts == 1 + (what == "a trainer's node")
    stages.same_in_the_end(job, one)
