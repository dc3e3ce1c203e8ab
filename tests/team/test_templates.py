"""The shipped templates of clusters ask for what a stage needs, and schedulers take what they ask for."""

import asyncio
import getpass
import json
import math
import os
import re
import shutil
import socket
import subprocess
import time
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect.client.schemas.objects import FlowRun
from prefect.workers.base import BaseJobConfiguration

from nanodag.config import resolve
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from nanodag.host.ports import free_port
from nanodag.plan.make import plan_of
from nanodag.run.resource_requests import Requests, requests_of
from tests.fake_stages import STAGES
from tests.team.postgres import missing

TEMPLATES = PROJECT / "docs" / "templates"
KUBERNETES_JOB = json.loads((TEMPLATES / "kubernetes-job.json").read_text())
GIB = 1 << 30
ON_GPUS = Requests(nodes=1, gpus=8, cpus=64, memory=int(100.5 * GIB))


class JobConfiguration(BaseJobConfiguration):
    """As much of a Kubernetes job's configuration as Prefect itself fills in."""

    job_manifest: dict[str, Any]


def filled_in(configuration: type[BaseJobConfiguration], requests: Requests) -> Any:
    values = {"image": "here/nanodag:1", **requests.job_variables(KUBERNETES_JOB)}
    nobody = SimpleNamespace(_loop=None)  # a server that nothing of the template is asked of
    made = asyncio.run(configuration.from_template_and_values(KUBERNETES_JOB, values, client=nobody))
    made.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="r-rl"))
    return made.job_manifest


@pytest.mark.parametrize(
    ("overrides", "machine", "wanted"),
    [
        (["pretrain.num_ranks=8"], "8xH100", (1, 8, 64)),
        (["pretrain.num_ranks=8", "pretrain.threads=3"], "8xH100", (1, 8, 24)),
        (["pretrain.resources={nodes: 2, gpus_per_node: 4}"], "4xH100", (2, 4, 32)),
        (["pretrain.num_ranks=2"], "cpu:6:avx2:16GiB", (1, 0, 6)),
    ],
)
def test_a_stage_needs_its_ranks_times_its_threads_on_each_node(tmp_path, overrides, machine, wanted):
    file = tmp_path / "pipeline.yaml"
    stages = {name: STAGES[name] for name in ("tokenizer", "pretrain")}
    file.write_text(yaml.safe_dump({"cluster": {"hostfile": "hosts"}, "presets": {"p": {"stages": stages}}}))
    resolved = resolve(file, "p", overrides, machine=machine_of(machine))
    found = requests_of(resolved.pipeline, "pretrain", resolved.machine)
    assert (found.nodes, found.gpus, found.cpus) == wanted
    (plan,) = plan_of(resolved.pipeline, resolved.machine, stages=["pretrain"]).stages
    assert found.memory == math.ceil(1.5 * plan.host_bytes) > GIB


def test_sbatch_is_asked_for_what_each_node_needs():
    said = "--nodes=1 --ntasks-per-node=1 --cpus-per-task=64 --gpus-per-node=8 --mem=102912M"
    assert ON_GPUS.sbatch_options() == said.split()
    on_cpus = Requests(nodes=2, gpus=0, cpus=6, memory=0)
    assert on_cpus.sbatch_options() == ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=6"]


def test_a_pool_is_given_the_variables_that_it_has():
    process = {"variables": {"properties": {"env": {"type": "object"}, "command": {"type": "string"}}}}
    other = {"variables": {"properties": {"memory": {"type": "integer"}, "cpus": {"type": "integer"}}}}
    assert ON_GPUS.job_variables(KUBERNETES_JOB) == {"gpus": 8, "cpus": 64, "memory": "102912Mi"}
    assert ON_GPUS.job_variables(process) == ON_GPUS.job_variables({}) == {}
    assert ON_GPUS.job_variables(other) == {"cpus": 64}  # mebibytes are said as text


def test_the_command_names_the_stages_there_are(capsys):
    from nanodag.cli.show import show_sbatch_options

    about = {"preset": "speedrun", "file": str(PROJECT / "pipeline.yaml"), "on": "8xH100"}
    show_sbatch_options("pretrain", [], **about)
    assert "--gpus-per-node=8" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"no stage 'pretrian'; it has tokenizer, .* Did you mean 'pretrain'\?"):
        show_sbatch_options("pretrian", [], **about)


def test_the_kubernetes_job_asks_for_its_own_variables_only():
    asked = set(re.findall(r"{{ (\w+) }}", (TEMPLATES / "kubernetes-job.json").read_text()))
    assert asked == set(KUBERNETES_JOB["variables"]["properties"])


def test_a_stages_needs_arrive_in_its_kubernetes_job():
    (container,) = filled_in(JobConfiguration, ON_GPUS)["spec"]["template"]["spec"]["containers"]
    limits = {"nvidia.com/gpu": 8, "memory": "102912Mi"}
    assert container["resources"] == {"requests": {"cpu": 64, "memory": "102912Mi"}, "limits": limits}
    unknown = filled_in(JobConfiguration, Requests(nodes=1, gpus=0, cpus=6, memory=0))
    (container,) = unknown["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 0, "memory": "64Gi"}


def test_the_kubernetes_worker_serves_one_pool_with_rights_of_its_own():
    documents = {one["kind"]: one for one in yaml.safe_load_all((TEMPLATES / "kubernetes.yaml").read_text())}
    assert set(documents) == {"ServiceAccount", "Role", "RoleBinding", "Deployment"}
    account = documents["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert account == documents["ServiceAccount"]["metadata"]["name"]
    assert documents["RoleBinding"]["subjects"][0]["name"] == account


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of packages that this project does not use
def test_the_kubernetes_api_takes_the_worker_and_its_jobs():
    validate, worker = (_import(name) for name in ("kubernetes_validate", "prefect_kubernetes.worker"))
    job = filled_in(worker.KubernetesWorkerJobConfiguration, ON_GPUS)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8 and container["args"]
    assert "PREFECT__FLOW_RUN_ID" in {variable["name"] for variable in container["env"]}
    documents = [*yaml.safe_load_all((TEMPLATES / "kubernetes.yaml").read_text()), job]
    for version in ("1.28", validate.latest_version()):
        for document in documents:
            validate.validate(document, version, strict=True)
    job["spec"]["template"]["spec"]["containers"][0]["resorces"] = {}
    with pytest.raises(validate.ValidationError, match="resorces"):
        validate.validate(job, version, strict=True)


def _import(name: str) -> Any:
    try:
        return __import__(name, fromlist=["x"])
    except ImportError as error:
        missing(f"{error}: pip install kubernetes-validate prefect-kubernetes")


def test_the_slurm_job_is_a_script_that_names_what_it_lacks():
    path = TEMPLATES / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=False, env={"PATH": "/bin"})
    assert done.returncode != 0 and "SERVER: the address of the Prefect server" in done.stderr


SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log
{plugins}
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
DebugFlags=Gres
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=-1
PrivateData=cloud
NodeName=node[1-2] CPUs=128 RealMemory=1000000 State=CLOUD
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def sbatch(tmp_path):
    """`sbatch --test-only` of a controller for two nodes that are never started. They have no GPUs: that takes their
    own daemons."""
    controller = shutil.which("slurmctld")
    if not (controller and shutil.which("sbatch")):
        missing("no slurmctld and sbatch here: apt install slurmctld slurm-client")
    (tmp_path / "state").mkdir()
    plugins = f"PluginDir={os.environ['NANODAG_SLURM_PLUGINS']}" if "NANODAG_SLURM_PLUGINS" in os.environ else ""
    about = {"host": socket.gethostname(), "port": free_port(), "user": getpass.getuser(), "folder": tmp_path}
    conf = tmp_path / "slurm.conf"
    conf.write_text(SLURM_CONF.format(**about, plugins=plugins))
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    process = subprocess.Popen(
        [controller, "-D", "-c", "-f", str(conf)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )

    def ask(*options: str) -> str:
        command = ["sbatch", "--test-only", *options, str(TEMPLATES / "slurm.sh"), "POOL"]
        deadline = time.monotonic() + 60
        while True:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
            is_up = "Unable to contact slurm controller" not in done.stderr
            if is_up or time.monotonic() > deadline:
                return done.stderr
            time.sleep(0.1)

    ask.log = tmp_path / "log"
    yield ask
    process.terminate()
    process.wait(30)


@pytest.mark.slow
def test_slurm_takes_the_script_with_what_a_stage_needs(sbatch):
    asked = Requests(nodes=2, gpus=0, cpus=64, memory=int(100.5 * GIB))
    assert re.search(r"to start at .* using 128 processors on nodes node\[1-2\] ", sbatch(*asked.sbatch_options()))
    too_much = Requests(nodes=1, gpus=0, cpus=64, memory=1000 * GIB)
    assert "Requested node configuration is not available" in sbatch(*too_much.sbatch_options())
    assert "Requested node configuration is not available" in sbatch(*ON_GPUS.sbatch_options())
    assert "gres_per_node:8 node_cnt:0" in sbatch.log.read_text()  # it has understood which
    assert "unrecognized option" in sbatch("--gpus-a-node=8")
