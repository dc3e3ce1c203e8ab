"""Stages over two nodes, which are network namespaces: as on one node, and through the loss of one."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from nanodag.config.pipeline import read_stage
from nanodag.inference.engine_settings import EngineSettings
from nanodag.worker.job import Job, read_job, write_job
from tests.cluster.gives_weights import CUT_S
from tests.cluster.namespaces import SSH_COMMAND, TWO
from tests.fault.processes import wait_until
from tests.rl import stages as rl_stages
from tests.rl.broadcasts import expected
from tests.rl.models import save_tiny_model
from tests.train import stages

pytestmark = pytest.mark.slow

# As the task does: a stage that was interrupted is started again.
TWICE = """
import sys
from pathlib import Path
from nanodag.errors import StageInterrupted
from nanodag.worker.launch import run_worker
from nanodag.worker.job import read_job

job = read_job(Path(sys.argv[1]))
for attempt in (1, 2):
    try:
        run_worker(job)
        break
    except StageInterrupted as error:
        print(f"attempt {attempt}: {error}", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    stages.write_prose(folder / "prose.jsonl")
    stages.write_tokenizer(folder / "tokenizer")
    return folder


def cluster(folder, nodes):
    path = folder / "hostfile"
    path.write_text(f"# a comment\n{nodes.there} slots=1\n{nodes.here} slots=1\n")
    return {"cluster": {"hostfile": str(path), "ssh_command": SSH_COMMAND}}


def pretrain(folder, name, *, context=None, **changes):
    """A workspace with the job of 12 steps under ZeRO-3 on two ranks."""
    workspace = folder / name
    workspace.mkdir()
    resources = {**TWO, "nodes": 2 if context else 1}
    config = stages.pretrain(folder, resources=resources, zero_stage=3, **changes)
    stage = read_stage(config)
    inputs = {"tokenizer": folder / "tokenizer"}
    write_job(Job(name="pretrain", run="test", config=stage, inputs=inputs, workspace=workspace, context=context or {}))
    return workspace


def losses(workspace):
    return [line["loss"] for line in stages.metrics(workspace) if line["event"] == "step"]


def wait_for_step(workspace, process, step):
    deadline = time.monotonic() + 240
    while max((line["step"] for line in stages.metrics(workspace)), default=0) < step:
        assert process.poll() is None, (workspace / "worker.log").read_text()[-4000:]
        assert time.monotonic() < deadline, (workspace / "worker.log").read_text()[-4000:]
        time.sleep(0.01)


def test_zero_3_pretraining_on_two_nodes_is_that_of_two_ranks_on_one(nodes, folder):
    one = pretrain(folder, "one")
    stages.finish(one, num_ranks=2)
    two = pretrain(folder, "two", context=cluster(folder, nodes))
    command = nodes.on(nodes.here, [sys.executable, "-c", TWICE, str(two / "job.json")])
    done = subprocess.run(command, check=False, timeout=300, capture_output=True, text=True)
    assert (two / "result.json").exists(), done.stdout + done.stderr + (two / "worker.log").read_text()[-4000:]
    assert len(losses(two)) == 12 and losses(two) == losses(one)
    assert stages.content(two / "output") == stages.content(one / "output")
    usage = [json.loads((two / name).read_text()) for name in ("usage.jsonl", "usage-1.jsonl")]
    assert all(line["cpu_s"] > 1.0 for line in usage)  # each node carried its part


def test_a_node_that_loses_its_power_and_comes_back_ends_on_the_same_bytes(nodes, folder):
    one = folder / "one"
    workspace = pretrain(folder, "killed", context=cluster(folder, nodes))
    command = nodes.on(nodes.here, [sys.executable, "-c", TWICE, str(workspace / "job.json")])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_for_step(workspace, process, 5)
    assert nodes.kill(nodes.there) >= 3  # the watchdog, torchrun, a rank
    away = subprocess.run(["ip", "netns", "del", nodes.there], check=False)
    assert away.returncode == 0
    powered = threading.Timer(8.0, lambda: nodes.plug(nodes.there))
    powered.start()
    said = process.communicate(timeout=300)[0]
    powered.join()
    log = (workspace / "worker.log").read_text()
    assert "attempt 1:" in said and "lost a node: Node " in said, said + log[-4000:]
    assert "attempt 2:" not in said and "not reached" in log
    assert stages.content(workspace / "output") == stages.content(one / "output")
    steps = [line["step"] for line in stages.metrics(workspace) if line["event"] == "step"]
    assert steps == list(range(1, 13))


def test_killing_who_asked_ends_both_nodes_with_a_checkpoint(nodes, folder):
    changes = {"horizon_tokens": 512 * 2000, "checkpoint_every": 5000}
    workspace = pretrain(folder, "ended", context=cluster(folder, nodes), **changes)
    command = nodes.on(nodes.here, [sys.executable, "-c", TWICE, str(workspace / "job.json")])
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for_step(workspace, process, 2)
    process.kill()
    process.wait()
    wait_until(lambda: not [*nodes.pids(nodes.here), *nodes.pids(nodes.there)], 40, every_s=0.1)
    assert len(list((workspace / "checkpoints").glob("step-????????"))) == 1  # both agreed after which step


def test_rl_with_its_trainer_on_two_nodes_is_that_of_two_ranks_on_one(nodes, tmp_path_factory):
    found = {}
    for number in (1, 2):
        folder = tmp_path_factory.mktemp("rl")
        job = rl_stages.make_job(folder, resources={**TWO, "nodes": number}, num_steps=3, zero_stage=3)
        if number == 1:
            rl_stages.run(job)
        else:
            write_job(dataclasses.replace(job, context=cluster(folder, nodes)))
            log = job.workspace / "worker.log"
            command = nodes.on(nodes.here, [sys.executable, "-m", "nanodag.rl", str(job.workspace / "job.json")])
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "DS_ACCELERATOR": "cpu"}
            with log.open("ab") as stream:
                done = subprocess.run(command, check=False, timeout=300, stdout=stream, stderr=stream, env=environment)
            assert done.returncode == 0, log.read_text()[-6000:]
            assert read_job(job.workspace / "job.json").config.resources.nodes == 2
        found[number] = [line["loss"] for line in rl_stages.metrics(job)]
        assert (job.output / "model.safetensors").exists()
    assert len(found[1]) == 3 and found[2] == found[1]


def test_rl_whose_samplers_node_loses_its_power_ends_on_the_bytes_of_one_node(nodes, tmp_path_factory):
    jobs = []
    for count in (0, 1):
        folder = tmp_path_factory.mktemp("rl")
        sampler = {"replicas": 2, "nodes": count, "context": 64, "max_batch": 16}
        placement = "separate" if count else "beside"
        jobs.append(rl_stages.make_job(folder, sampler=sampler, placement=placement, num_steps=8))
        rl_stages.slow_rewards(folder)
    alone, job = jobs
    rl_stages.run(alone)
    job = dataclasses.replace(job, context=cluster(job.workspace.parent, nodes))
    write_job(job)
    environment = os.environ | {"PYTHONPATH": str(job.workspace.parent)}
    command = nodes.on(nodes.here, [sys.executable, "-m", "nanodag.rl", str(job.workspace / "job.json")])
    (job.workspace / rl_stages.STARTED).touch()
    with (job.workspace / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    rl_stages.wait_for_step(job, process, 2)
    assert nodes.kill(nodes.there) >= 4  # of each sampler the watchdog and the server
    assert subprocess.run(["ip", "netns", "del", nodes.there], check=False).returncode == 0
    powered = threading.Timer(5.0, lambda: nodes.plug(nodes.there))
    powered.start()
    code = process.wait(timeout=300)
    powered.join()
    said = (job.workspace / "worker.log").read_text()
    assert code == 0 and f"{nodes.there}: not reached" in said, said[-6000:]
    rl_stages.same_in_the_end(job, alone)
    assert not nodes.pids(nodes.there)


def test_a_sampler_on_another_node_has_the_trainers_weights_to_the_bit_though_the_link_is_cut_meanwhile(
    nodes, tmp_path
):
    models = [save_tiny_model(tmp_path / f"model-{seed}", seed=seed) for seed in range(3)]
    described = EngineSettings(model=models[0], host=nodes.there, port=30000, context_length=64).model_dump_json()
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        nodes.on(nodes.there, [sys.executable, "-m", "nanodag.sampler", described]), stdout=log, stderr=log
    )
    out = tmp_path / "found.json"
    try:
        wait = f"import httpx, time\nwhile True:\n    try:\n        httpx.get('http://{nodes.there}:30000/health')\n"
        wait += "        break\n    except httpx.TransportError:\n        time.sleep(0.2)\n"
        subprocess.run(nodes.on(nodes.here, [sys.executable, "-c", wait]), check=True, timeout=120)
        arguments = [*map(str, models), f"http://{nodes.there}:30000", str(out)]
        command = nodes.on(nodes.here, [sys.executable, "-m", "tests.cluster.gives_weights", *arguments])
        giving, listening = subprocess.Popen(command, stdout=log, stderr=log), set()
        while giving.poll() is None:
            seen = subprocess.run(nodes.on(nodes.there, ["ss", "-ltnH"]), check=True, capture_output=True, text=True)
            listening |= {line.split()[3] for line in seen.stdout.splitlines()}
            time.sleep(0.2)
        assert giving.returncode == 0, (tmp_path / "log").read_text()[-4000:]
    finally:
        server.kill()
        server.wait()
        log.close()
    found = json.loads(out.read_text())
    both, both_then = expected(models[1]), expected(models[2])
    assert found["both"] == both and found["folder"] == both_then[0] and found["kept"] == both[0]
    assert found["after"] == both_then and "export" not in found["asked"]
    assert found["took"] > CUT_S
    assert set(found["listening"]) <= {"127.0.0.1", nodes.here}
    assert {address.rpartition(":")[0] for address in listening} == {nodes.there}
    assert len(listening) > 1  # its own port, and that of the group
