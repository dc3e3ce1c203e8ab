"""A whole pipeline as one job of Slurm: what is asked for and refused, and what the job's script does when it is told
to stop. tests/team/test_slurm.py runs it by Slurm itself."""

import os
import re
import signal
import subprocess

import pytest

from nanodag.cli.slurm import job_script, sampler_nodes
from nanodag.config import resolve
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.host.machine import NODES_VARIABLE, detect, machine_of
from tests.fault.processes import wait_until

SHIPPED = PROJECT / "pipeline.yaml"
THREE, HOSTS = "3xcpu:8:avx2:32GiB", "NANODAG_HOSTFILE"
ASKED = f"slurm --on {THREE} --file {SHIPPED} --name mine"


@pytest.fixture(autouse=True)
def hostfile(monkeypatch):
    monkeypatch.setenv(HOSTS, "$" + HOSTS)  # the command sets it; so it is taken back


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put programs of these names and texts first on the PATH; what they are called with is told in `said`."""

    def make(**texts):
        for name, text in texts.items():
            path = tmp_path / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/said\n{text}\n')
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")

    return make


def test_the_job_asks_for_the_nodes_and_says_where_samplers_lie(nanodag):
    script = nanodag(
        f"{ASKED} --time 2:00:00 --partition gpu --sbatch qos=high --sbatch exclusive --print rl.num_steps=9"
    )
    options = re.findall("^#SBATCH (.*)$", script, re.MULTILINE)
    expected = ["--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=8", "--time=2:00:00", "--partition=gpu"]
    expected += ["--requeue", "--job-name=nanodag-mine", "--dependency=singleton", "--signal=B:USR1@180"]
    assert set(expected) <= set(options) and options[-2:] == ["--qos=high", "--exclusive"]
    assert not [option for option in options if option.startswith(("--gpus", "--account"))]
    run = next(line for line in script.splitlines() if line.startswith("run="))
    assert run.endswith(f"/nanodag run --name mine --preset pocket --file={SHIPPED} rl.num_steps=9 "
                        "rl.placement=separate rl.sampler.nodes=1)")  # fmt: skip
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("machine", "overrides", "placed"),
    [
        ("2x8xH100", [], ["rl.placement=separate", "rl.sampler.nodes=1"]),
        ("5x8xH100", [], ["rl.placement=separate", "rl.sampler.nodes=2"]),
        ("8xH100", [], []),
        ("2x8xH100", ["rl.placement=beside"], []),
        ("2x8xH100", ["rl.resources.nodes=2"], []),
        ("2x8xH100", ["rl.only=rollouts"], []),
    ],
)
def test_samplers_of_rl_have_half_of_the_nodes_unless_it_is_said_where_they_lie(machine, overrides, placed):
    assert sampler_nodes(resolve(SHIPPED, "pocket", overrides, machine=machine_of(machine))) == placed


@pytest.mark.parametrize("ranks", [[], ["rl.num_ranks=4"]])
def test_ranks_of_rl_have_the_nodes_that_its_samplers_leave(ranks):
    placed = ["rl.placement=separate", "rl.sampler.nodes=1", *ranks]
    stage = resolve(SHIPPED, "speedrun", placed, machine=machine_of("3x8xH100")).pipeline.stages["rl"]
    assert (stage.resources.nodes, stage.sampler.replicas) == (2, 8)


def test_a_job_has_as_many_nodes_as_its_environment_says_and_hosts_that_no_override_sets(monkeypatch):
    assert detect().nodes == 1
    monkeypatch.setenv(NODES_VARIABLE, "3")
    monkeypatch.setenv(HOSTS, "/tmp/hosts")
    monkeypatch.setenv("NANODAG_SSH_COMMAND", "srun --nodelist={host}")
    assert detect().nodes == 3
    cluster = resolve(SHIPPED, "pocket").pipeline.cluster
    assert (cluster.hostfile, cluster.ssh_command) == ("/tmp/hosts", "srun --nodelist={host}")
    with pytest.raises(ConfigError, match="an override cannot set it"):
        resolve(SHIPPED, "pocket", ["cluster.hostfile=/tmp/others"])


def test_what_cannot_run_is_refused_before_it_is_sent(nanodag, programs, tmp_path, monkeypatch):
    programs(sbatch="cat > /dev/null; echo 'invalid partition specified: gpu' >&2; exit 1")
    nanodag(f"{ASKED} rl.nm_steps=3", "rl.nm_steps", code=2)
    nanodag(ASKED.replace("32GiB", "1GiB"), "does not fit 3xcpu:8:avx2:1GiB", code=2)
    nanodag(f"{ASKED}{'-' * 80}", "Run name 'mine--", "at most 80", code=2)
    assert not (tmp_path / "said").exists()
    nanodag(ASKED, "sbatch refused the job: invalid partition specified: gpu", code=2)
    monkeypatch.setenv("PATH", str(tmp_path))
    nanodag(ASKED, "There is no sbatch here", code=1)


def test_the_job_is_sent_and_named(nanodag, programs, tmp_path):
    programs(sbatch=f"cat > {tmp_path}/script; echo '77;cluster'")
    nanodag(ASKED, "Job 77 runs mine", "squeue --job 77", "scancel 77")
    assert (tmp_path / "said").read_text() == "sbatch --parsable\n"
    # Before the line on standard error, which says that packages are looked at.
    assert nanodag(f"{ASKED} --print").startswith((tmp_path / "script").read_text())


IN_JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "4"}
# Ends with 130 when it is told to stop, as `nanodag run` does, and at once with what the file `code` says.
RUN = """
trap '[ -e {folder}/completes ] && exit 0; exit 130' TERM
env > {folder}/environment; cp "$NANODAG_HOSTFILE" {folder}/hosts; stat -c %a "$NANODAG_PASSWORD_FILE" > {folder}/mode
until [ -e {folder}/code ]; do sleep 0.05; done
exit $(cat {folder}/code)
"""


@pytest.fixture
def job(tmp_path, programs):
    """Start the job with programs in the place of Slurm's and nanodag's."""
    programs(scontrol='[ "$1" != show ] || printf "n1\\nn2\\n"', nanodag=RUN.format(folder=tmp_path), end="")
    script = tmp_path / "job"
    script.write_text(job_script([], ["nanodag", "run", "a b"], ["end", "server"]))
    process = subprocess.Popen(["bash", str(script)], env={**os.environ, **IN_JOB, "TMPDIR": str(tmp_path)})
    wait_until(lambda: (tmp_path / "mode").exists() and (tmp_path / "mode").read_text())
    yield process
    process.kill()
    process.wait()


def said(folder):
    return [line for line in (folder / "said").read_text().splitlines() if not line.startswith("scontrol show")]


@pytest.mark.parametrize(
    ("told", "code", "queued"),
    [(signal.SIGUSR1, 130, True), (signal.SIGTERM, 130, False), (0, 0, False), (1, 1, False)],
    ids=["time limit", "scancel", "completed", "failed"],
)
def test_only_a_job_that_its_time_limit_stopped_queues_again(job, tmp_path, told, code, queued):
    if isinstance(told, signal.Signals):
        job.send_signal(told)
    else:
        (tmp_path / "code").write_text(str(told))
    assert job.wait(60) == code
    requeued = ["scontrol requeue incomplete 77"] if queued else []
    assert said(tmp_path) == ["nanodag run a b", "end server", *requeued]


def test_a_run_that_completes_just_at_its_time_limit_does_not_queue_again(job, tmp_path):
    (tmp_path / "completes").touch()
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 0 and said(tmp_path)[-1] == "end server"


def test_a_job_has_its_own_hosts_login_and_server_and_leaves_nothing(job, tmp_path):
    environment = dict(line.partition("=")[::2] for line in (tmp_path / "environment").read_text().splitlines())
    assert (tmp_path / "hosts").read_text() == "n1 slots=4\nn2 slots=4\n"
    assert environment[NODES_VARIABLE] == "2" and "--nodelist={host}" in environment["NANODAG_SSH_COMMAND"]
    own = environment["NANODAG_SERVER_FOLDER"].removesuffix("/prefect")
    assert os.path.dirname(environment["NANODAG_PASSWORD_FILE"]) == own and (tmp_path / "mode").read_text() == "600\n"
    (tmp_path / "code").write_text("0")
    assert job.wait(60) == 0 and not os.path.exists(own)
