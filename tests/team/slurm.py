"""Slurm on three nodes, which are namespaces of this machine for network and host name: a controller, a slurmd on each,
and munge. Root only."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.namespaces import TwoNodes, two_nodes
from tests.fault.processes import wait_until
from tests.team.postgres import missing

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare")
NAMES = ("n1", "n2", "n3")
CONF = """
ClusterName=test
SlurmctldHost=n1({first})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
{plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# A shell's: the host's name and file of names, then the command.
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$0" && shift && exec "$@"'


@dataclass(frozen=True)
class Slurm:
    """addresses: of each node by name; its network namespace is called so too."""

    folder: Path
    network: TwoNodes
    addresses: dict[str, str]

    def on(self, name: str, command: Sequence[str]) -> list[str]:
        """A command as it is run on a node."""
        enter = ["unshare", "--mount", "--uts", "sh", "-c", ENTER, name, str(self.folder / "hosts")]
        return self.network.on(self.addresses[name], [*enter, *command])

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def said(self, *command: str) -> str:
        """What a command prints on the first node."""
        done = subprocess.run(
            self.on("n1", command), env=self.environment, capture_output=True, text=True, check=False, timeout=100
        )
        return done.stdout + done.stderr

    def job(self, number: str) -> dict[str, str]:
        """What the controller says of a job: JobState, Restarts and so on."""
        words = self.said("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def programs(self) -> dict[str, set[str]]:
        """Programs on each node but for Slurm's; of Python's the module."""
        return {name: {*filter(None, map(_program, self.network.pids(a)))} for name, a in self.addresses.items()}

    def is_idle(self) -> bool:
        """True where nothing but Slurm runs on the nodes."""
        return not any(self.programs().values())

    def log(self) -> str:
        """The ends of the daemons' logs."""
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(logs))


def _program(pid: int) -> str:
    """Empty for Slurm's own, and for what has ended."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        command = process.cmdline()
        if process.name().startswith("slurm") or not command:
            return ""
        return command[command.index("-m") + 1] if "-m" in command[:-1] else command[0]
    return ""


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster whose nodes are idle. What runs on them is killed at the end."""
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    if absent or os.geteuid():
        missing(f"Slurm needs root, and apt install slurmctld slurmd slurm-client munge iproute2; missing: {absent}")
    with ExitStack() as stack:
        network = stack.enter_context(two_nodes())
        third = stack.enter_context(network.one_more())
        addresses = dict(zip(NAMES, (network.here, network.there, third), strict=True))
        made = Slurm(folder, network, addresses)
        (folder / "state").mkdir()
        names = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        nodes = [f"NodeName={n} NodeAddr={a} CPUs=2 RealMemory=64000 State=UNKNOWN" for n, a in addresses.items()]
        plugins = f"PluginDir={os.environ['NANODAG_SLURM_PLUGINS']}" if "NANODAG_SLURM_PLUGINS" in os.environ else ""
        text = CONF.format(first=network.here, folder=folder, nodes="\n".join(nodes), plugins=plugins)
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # it is asked for nothing
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        socket = folder / "munge.socket"
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        daemons = [["munged", "--foreground", "--force", f"--socket={socket}", *files]]
        conf = str(folder / "slurm.conf")
        daemons.append(made.on("n1", ["slurmctld", "-D", "-c", "-f", conf]))
        daemons += [made.on(name, ["slurmd", "-D", "-f", conf]) for name in NAMES]
        for number, command in enumerate(daemons):
            output = stack.enter_context((folder / f"daemon-{number}.out").open("wb"))
            process = subprocess.Popen(command, env=made.environment, stdout=output, stderr=output)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            if number == 0:
                wait_until(socket.exists)
        states = ("sinfo", "--noheader", "--format=%T %D")
        try:
            wait_until(lambda: "idle 3" in made.said(*states), 60, every_s=0.2)
        except AssertionError:
            raise AssertionError(made.log()) from None
        yield made
