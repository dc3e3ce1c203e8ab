"""The shipped templates of clusters ask for what a stage needs, and schedulers take what they ask for."""

import asyncio
import contextlib
import getpass
import json
import math
import os
import re
import shutil
import signal
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
from nanodag.config.resolve import ENVIRONMENT
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.host.machine import NODES_VARIABLE, machine_of
from nanodag.host.ports import free_port
from nanodag.plan.make import plan_of
from nanodag.run.resource_requests import Requests, requests_of
from tests.fake_stages import STAGES
from tests.fault.processes import wait_until
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
    from nanodag.cli.slurm import sbatch

    about = {"preset": "speedrun", "file": str(PROJECT / "pipeline.yaml"), "on": "8xH100"}
    sbatch("pretrain", **about)
    assert "--gpus-per-node=8" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"no stage 'pretrian'; it has tokenizer, .* Did you mean 'pretrain'\?"):
        sbatch("pretrian", **about)


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


def documents_of(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((TEMPLATES / name).read_text().replace("RUN", "run").replace("KEY", "key")))


def jobs_of(jobset: dict[str, Any]) -> list[dict[str, Any]]:
    """The Jobs that a JobSet makes, one of each kind."""
    about = {"apiVersion": "batch/v1", "kind": "Job"}
    return [{**about, "metadata": {"name": j["name"]}, **j["template"]} for j in jobset["spec"]["replicatedJobs"]]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of packages that this project does not use
def test_the_kubernetes_api_takes_the_worker_and_its_jobs_runs_and_samplers():
    validate, worker = (_import(name) for name in ("kubernetes_validate", "prefect_kubernetes.worker"))
    job = filled_in(worker.KubernetesWorkerJobConfiguration, ON_GPUS)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8 and container["args"]
    assert "PREFECT__FLOW_RUN_ID" in {variable["name"] for variable in container["env"]}
    names = ("kubernetes.yaml", "kubernetes-run.yaml", "kubernetes-samplers.yaml")
    documents = [job, *(document for name in names for document in documents_of(name))]
    hosts, jobset = documents_of("kubernetes-jobset.yaml")
    documents += [hosts, *jobs_of(jobset)]
    for version in ("1.28", validate.latest_version()):
        for document in documents:
            validate.validate(document, version, strict=True)
    for wrong in (job, jobs_of(jobset)[1]):
        wrong["spec"]["template"]["spec"]["containers"][0]["resorces"] = {}
        with pytest.raises(validate.ValidationError, match="resorces"):
            validate.validate(wrong, version, strict=True)


# Fields of jobset.x-k8s.io/v1alpha2, from its API reference.
JOBSET = {"replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator"}
JOBSET |= {"managedBy", "ttlSecondsAfterFinished"}


def test_pods_of_a_run_reach_each_other_by_the_names_that_a_jobset_gives_them():
    hosts, jobset = documents_of("kubernetes-jobset.yaml")
    assert set(jobset["spec"]) <= JOBSET and jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    names = [job["name"] for job in jobset["spec"]["replicatedJobs"]]
    # JobSet's: <jobset>-<job>-<number of the job>-<number of the pod>, in a subdomain of the JobSet's name
    assert hosts["data"]["hosts"] == f"run-{names[0]}-0-0 slots=8\nrun-{names[1]}-0-0.run slots=8\n"
    first, others = (job["spec"]["template"]["spec"]["containers"][0] for job in jobs_of(jobset))
    environment = {variable["name"]: variable["value"] for variable in first["env"]}
    assert set(environment) <= {NODES_VARIABLE, *ENVIRONMENT.values()}
    paths = {mount["mountPath"] for mount in others["volumeMounts"]}
    assert environment["NANODAG_HOSTFILE"] == "/srv/hosts/hosts" and {"/srv/hosts", "/srv/key"} <= paths
    assert "-p 2222 -i /srv/key/key" in environment["NANODAG_SSH_COMMAND"] and "-p 2222" in others["args"][2]
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == names[:1]


@pytest.mark.parametrize("name", ["kubernetes-run.yaml", "kubernetes-jobset.yaml"])
def test_a_pod_that_takes_the_place_of_a_lost_one_resumes_the_run(name, monkeypatch):
    monkeypatch.setenv("NANODAG_HOSTFILE", "/srv/hosts/hosts")
    job = next(d for d in documents_of(name) if d["kind"] != "ConfigMap")
    args = (job if job["kind"] == "Job" else jobs_of(job)[0])["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[:4] == ["nanodag", "run", "--name", job["metadata"]["name"]]
    overrides = [text for text in args if "=" in text]
    resolved = resolve(PROJECT / "pipeline.yaml", args[5], overrides, machine=machine_of("2x8xH100"))
    assert resolved.pipeline.store.url == "/srv/nanodag/store"


def test_the_images_commands_are_shell_and_install_what_the_setup_asks_for():
    lines = (TEMPLATES / "Dockerfile").read_text().splitlines()
    commands = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    for command in commands:
        subprocess.run(["sh", "-nc", command], check=True)
    assert "g++" in commands[0] and "speedrun.sh" in commands[1]
    assert all("NANODAG_GPU" in text for text in (commands[1], (PROJECT / "speedrun.sh").read_text()))


def _import(name: str) -> Any:
    try:
        return __import__(name, fromlist=["x"])
    except ImportError as error:
        missing(f"{error}: pip install kubernetes-validate prefect-kubernetes")


@pytest.mark.parametrize(
    ("script", "lacking"),
    [("slurm.sh", "SERVER: the address of the Prefect server"), ("slurm-samplers.sh", "1: a folder that all nodes")],
)
def test_a_script_for_slurm_names_what_it_lacks(script, lacking):
    subprocess.run(["bash", "-n", str(TEMPLATES / script)], check=True)
    command = ["bash", str(TEMPLATES / script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "/bin"})
    assert done.returncode != 0 and lacking in done.stderr


IN_JOB = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "64"}


@pytest.fixture
def start(tmp_path):
    """Start a script in a job, with programs of these names and texts first on the PATH; they tell of themselves in
    `said`."""
    started = []

    def make(script: str, *arguments: str, job: str = "77", more: dict[str, str] | None = None, **programs: str):
        (tmp_path / "bin").mkdir(exist_ok=True)
        for name, text in programs.items():
            path = tmp_path / "bin" / name
            path.write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/said\n{text}\n')
            path.chmod(0o755)
        environment = {**os.environ, **IN_JOB, "SLURM_JOB_ID": job, "TMPDIR": str(tmp_path), **(more or {})}
        environment["PATH"] = f"{tmp_path}/bin:{environment['PATH']}"
        command = ["bash", str(TEMPLATES / script), *arguments]
        started.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return started[-1]

    yield make
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# A worker with one stage for as long as the file `busy` is there.
WORKER = """
cp "$NANODAG_HOSTFILE" {folder}/hosts; echo $PREFECT_API_URL $PREFECT_API_AUTH_STRING > {folder}/server
exec python3 -c '
import os, subprocess, time
stage = subprocess.Popen(["sleep", "30"])
while os.path.exists("{folder}/busy"):
    time.sleep(0.05)
stage.kill()
stage.wait()
time.sleep(60)'
"""


@pytest.mark.parametrize("limit", [False, True], ids=["no stage is left", "time limit"])
def test_a_pools_worker_ends_without_stages_and_only_its_time_limit_queues_it_again(start, tmp_path, limit):
    (tmp_path / "login").write_text("team:secret\n")
    (tmp_path / "busy").touch()
    more = {"SERVER": "10.0.0.5:4201", "LOGIN": str(tmp_path / "login"), "IDLE_S": "5"}
    scontrol = '[ "$1" != show ] || printf "n1\\nn2\\n"'
    job = start("slurm.sh", "POOL", more=more, prefect=WORKER.format(folder=tmp_path), scontrol=scontrol)
    wait_until(lambda: (tmp_path / "server").exists() and (tmp_path / "server").read_text())
    assert (tmp_path / "hosts").read_text() == "n1 slots=8\nn2 slots=8\n"
    assert (tmp_path / "server").read_text() == "http://10.0.0.5:4201/api team:secret\n"
    if limit:
        job.send_signal(signal.SIGUSR1)
    else:
        time.sleep(7)
        assert job.poll() is None  # a stage is under way
        (tmp_path / "busy").unlink()
    job.wait(60)
    said = (tmp_path / "said").read_text()
    assert "prefect worker start --pool POOL --type process --limit 1 --name slurm-77" in said
    assert ("scontrol requeue incomplete 77" in said) == limit


def test_samplers_of_an_array_stand_in_the_file_for_as_long_as_they_serve(start, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    arguments = ("slurm-samplers.sh", str(shared), "--model", "m")

    def task(job):
        return start(*arguments, job=job, nanodag="trap 'exit 0' TERM; while true; do sleep 0.05; done")

    def ports():
        text = (shared / "servers").read_text() if (shared / "servers").exists() else ""
        return re.findall(rf"^http://{socket.gethostname()}:(\d+) {shared}/key$", text, re.MULTILINE)

    first = task("101")
    task("10102")
    wait_until(lambda: sorted(ports()) == ["20101", "20102"])
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0 and ports() == ["20102"]
    task("103")
    wait_until(lambda: sorted(ports()) == ["20102", "20103"])
    served = f"nanodag sampler serve --host 0.0.0.0 --port 20101 --api-key-file {shared}/key --model m"
    assert served in (tmp_path / "said").read_text()


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
