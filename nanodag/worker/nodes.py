"""The machines that one stage is spread over: which they are, how another one is reached, what runs on each.

`python -m nanodag.worker.nodes MODULE job.json` runs a supervised stage on all of them and ends as it ended;
RL's controller asks `Nodes` for its trainer's ranks alone. This machine is the first node: rank 0, RL's controller and
its samplers run here. The others are named by a hostfile of DeepSpeed's format (`worker-2 slots=8`) and reached by a
command (ssh as a rule) that runs this module there without arguments; on each node torchrun starts the ranks, which
meet at this machine's address. What another node needs to know comes by that command's stdin, so no secret is seen in
`ps`, and the end of stdin is the sign to end everything there: whatever becomes of this machine or of the connection,
nothing is left running.

All nodes have the same Python environment at the same path, and share the folder of the stage's workspace.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import shlex
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from nanodag.children.child import Child, start_child
from nanodag.children.tree import killed_with_parent
from nanodag.config.pipeline import ClusterConfig
from nanodag.config.stage_base import Resources
from nanodag.errors import ConfigError, NodeLost
from nanodag.errors.words import counted
from nanodag.host.ports import address_towards, free_port, network_environment
from nanodag.worker.job import STOPPED_EXIT_CODE, Job, leave_stopped, load_job, stop_requested

log = logging.getLogger(__name__)

NOT_SHARED_EXIT_CODE = 78  # EX_CONFIG of sysexits.h: a node has no folder of that name
ADDRESS = "{address}"  # in a command: that of the node that runs it, as this machine reaches it
SHARE_IT = "All nodes must share the store's local folder: put store.url, or store.local, where all of them see it."
REACH_TIMEOUT_S = 600.0  # as long as a machine may take to start again
AGAIN_AFTER_S = 5.0
OVER_STOP_S = 10.0  # a watchdog may take that much longer than stop_timeout_s
OTHERS_FAIL_WITHIN_S = 30.0  # after the first node that was seen to fail
# What another node takes over of this one's environment, beside what is set for the stage.
PASSED_ON = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_", "TORCH", "DS_", "OMP_", "MKL_", "GOMP_", "MALLOC_", "HF_"),
    *("PYTHON", "NANODAG_", "SGLANG_", "TOKENIZERS_", "LD_LIBRARY_PATH", "DO_NOT_TRACK"),
)

_LINE = re.compile(r"(?P<name>[^\s-]\S*)\s+slots=(?P<slots>\d+)(?:\s*#.*)?")


def hostfile_of(cluster: ClusterConfig) -> Path:
    """The hostfile, its variables filled in here: each job of a cluster's scheduler may have one of its own. Raises
    ConfigError when one of them is not set."""
    path = Path(os.path.expandvars(cluster.hostfile)).expanduser()
    if "$" in str(path) and not path.exists():
        raise ConfigError(f"cluster.hostfile {cluster.hostfile} names a variable that is not set where the stage runs.")
    return path


def read_hostfile(path: Path) -> dict[str, int]:
    """The hosts of a file of DeepSpeed's format, in order -> their slots, ranks that they have room for. Raises
    ConfigError with the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"The hostfile {path} (cluster.hostfile) cannot be read: {error}.") from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{path}, line {number}: {text!r} is not of the form `worker-1 slots=8`.")
        if match["name"] in hosts:
            raise ConfigError(f"{path}, line {number}: {match['name']} is there twice; give its slots in one line.")
        hosts[match["name"]] = int(match["slots"])
    return hosts


def chosen(path: Path, *, nodes: int, ranks_per_node: int) -> list[str]:
    """The hosts of a stage, out of a hostfile: this machine, then the first others with room for its ranks.

    Raises ConfigError as `read_hostfile`, and when this machine is not among them, or too few have room.
    """
    hosts = read_hostfile(path)
    names = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses} | _own_names()
    here = [host for host in hosts if host in names]
    if not here:
        raise ConfigError(
            f"{path} (cluster.hostfile) does not name this machine ({', '.join(sorted(_own_names()))}, or one of its "
            "addresses). Start the run on one of its hosts: rank 0 runs where the run does."
        )
    candidates = [host for host in [here[0], *(h for h in hosts if h not in here)] if hosts[host] >= ranks_per_node]
    if here[0] not in candidates or len(candidates) < nodes:
        raise ConfigError(
            f"The stage takes {counted(nodes, 'node')} with {counted(ranks_per_node, 'rank')} each, "
            f"this machine among them; {path} has {', '.join(f'{name} slots={n}' for name, n in hosts.items())}. "
            "Lower resources.nodes or num_ranks."
        )
    return candidates[:nodes]


def _own_names() -> set[str]:
    name = socket.gethostname()
    return {name, name.partition(".")[0], socket.getfqdn()}


def _address_towards(host: str) -> str:
    """This machine's IPv4 address as another one sees it. Raises NodeLost for a name that nobody knows."""
    try:
        return address_towards(host)
    except OSError as error:
        raise NodeLost(f"There is no way to {host} from {socket.gethostname()}: {error}.") from error


def seen_address(host: str) -> str:
    """`_address_towards` another machine. Raises ConfigError for a host that is this machine itself."""
    address = _address_towards(host)
    if address.startswith("127."):
        raise ConfigError(
            f"{host} is this machine itself to {socket.gethostname()} (seen from {address}), so no other node would "
            "find it. Put addresses into the hostfile, or mend /etc/hosts."
        )
    return address


class Nodes:
    """The nodes of one stage. Call `close` whatever happens: nothing of them is left running.

    address: this machine's, which the others can reach.
    """

    def __init__(self, job: Job) -> None:
        resources: Resources = job.config.resources
        self._cluster = ClusterConfig(**job.context["cluster"])
        self._num_nodes = resources.num_nodes
        self._ranks_per_node = int(resources.num_ranks) // self._num_nodes
        self._workspace = job.workspace
        self.end_timeout_s = job.config.stop_timeout_s + OVER_STOP_S
        path = hostfile_of(self._cluster)
        self._hosts = chosen(path, nodes=self._num_nodes, ranks_per_node=self._ranks_per_node)
        self.address = seen_address(self._hosts[1])
        self._port = free_port(self.address)
        self._others: dict[str, RemoteCommand] = {}

    def command(self, number: int, module: str) -> list[str]:
        return [
            *(sys.executable, "-m", "nanodag.train.torchrun"),
            *(f"--nnodes={self._num_nodes}", f"--node-rank={number}", f"--nproc-per-node={self._ranks_per_node}"),
            *(f"--master-addr={self.address}", f"--master-port={self._port}"),
            *("-m", module, str(self._workspace / "job.json")),
        ]

    def start(self, module: str, environment: Mapping[str, str]) -> dict[str, Child]:
        """Start a module's ranks everywhere; returns the process that stands for each node, this machine's first.

        A node that cannot be reached is asked again for REACH_TIMEOUT_S. Raises NodeLost after that, ConfigError when
        one does not share the workspace.
        """
        for number, host in enumerate(self._hosts[1:], start=1):
            self._others[host] = RemoteCommand(
                self._cluster,
                host,
                self.command(number, module),
                environment,
                address=self.address,
                folder=self._workspace,
                name=str(number),
            )
        while not all([other.is_there() for other in self._others.values()]):
            if stop_requested():
                self.close()
                leave_stopped()
            time.sleep(0.05)
        env = dict(environment) | network_environment(self.address)
        # A session of its own: torchrun that is told twice to end leaves its ranks alone in the middle of it.
        begin = partial(killed_with_parent, os.getpid())
        here = start_child(self.command(0, module), environment=env, preexec_fn=begin)
        return {self._hosts[0]: here, **{host: other.child for host, other in self._others.items()}}

    def close(self) -> None:
        """Have the other nodes end what they run, and wait until they have."""
        for other in self._others.values():
            other.child.tell(b"")
        deadline = time.monotonic() + self.end_timeout_s
        for other in self._others.values():
            other.child.hang_up(deadline - time.monotonic())


class RemoteCommand:
    """A command on another machine, which is asked again until it has heard of it. child: the process that stands for
    it here; it is ended there when this one's stdin ends. there: that machine's address, empty until it has heard.

    address: this machine's, as that one reaches it. folder: one that both share. name: of the files there that tell of
    it. log_path: where what it prints goes, to this process's log by default.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        host: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        address: str,
        folder: Path,
        name: str,
        log_path: Path | str = "",
    ) -> None:
        self._host, self._folder, self._up, self._log_path = host, folder, folder / f"node-{name}.up", log_path
        way = [part.replace("{host}", host) for part in shlex.split(cluster.ssh_command)]
        self._reaching = [*way, sys.executable, "-m", "nanodag.worker.nodes"]
        self._deadline = time.monotonic() + REACH_TIMEOUT_S
        self._message = {
            "command": list(command),
            "environment": {k: v for k, v in environment.items() if k.startswith(PASSED_ON)},
            "address": address,
            "usage": str(folder / f"usage-{name}.jsonl"),
            "up": str(self._up),
        }
        self.there = ""
        self._ask()

    def _ask(self) -> None:
        self._asked, self._token = time.monotonic(), secrets.token_hex(8)
        payload = json.dumps({**self._message, "token": self._token}).encode() + b"\n"
        # A session of its own: a stop signal for this process's group would cut the connection, not end the node.
        self.child = start_child(self._reaching, given=payload, is_all=False, log_path=self._log_path)

    def is_there(self) -> bool:
        """True once that machine has heard of the command; it is asked again where it was not reached.

        Raises NodeLost after REACH_TIMEOUT_S, ConfigError when it does not share the folder.
        """
        if self.there:
            return True
        with contextlib.suppress(FileNotFoundError):
            token, _, there = self._up.read_text().partition(" ")
            if token == self._token:
                log.info("%s is reached", self._host)
                self.there = there
                return True
        code = None if self.child.is_alive else self.child.code
        is_late = time.monotonic() > self._deadline
        if code == NOT_SHARED_EXIT_CODE or is_late:
            self.child.hang_up(0.0)
        if code == NOT_SHARED_EXIT_CODE:
            raise ConfigError(f"{self._host} has no folder {self._folder}. {SHARE_IT}")
        if is_late:
            how = "has not ended" if code is None else f"ended with code {code}"
            raise NodeLost(
                f"{self._host} could not be reached in {REACH_TIMEOUT_S:.0f} s: `{shlex.join(self._reaching)}` {how}. "
                f"See that it works by hand, without a password.\n{self.child.tail(5)}".rstrip()
            )
        if code is not None and time.monotonic() - self._asked > AGAIN_AFTER_S:
            log.info("%s: not reached (code %d); once more", self._host, code)
            self.child.hang_up(0.0)
            self._ask()
        return False


def sampler_hosts(cluster: ClusterConfig, resources: Resources, count: int) -> list[str]:
    """The hosts of samplers that have nodes of their own: those after the trainer's. Raises as `chosen`."""
    each = int(resources.num_ranks) // resources.num_nodes
    hosts = chosen(hostfile_of(cluster), nodes=resources.num_nodes + count, ranks_per_node=each)
    return hosts[resources.num_nodes :]


def _wait_for_all(processes: Mapping[str, Child]) -> int:
    """Wait until every node has ended, one badly, or a stop is asked for; returns the code to end with.

    Raises NodeLost when a node went away, rather than having ended its ranks for what they did.
    """
    while any(child.is_alive for child in processes.values()):
        if stop_requested():
            return STOPPED_EXIT_CODE
        if any(_code_of(child) for child in processes.values()):
            break
        time.sleep(0.1)
    # The first to be seen need not be the one that the others fell over.
    deadline = time.monotonic() + OTHERS_FAIL_WITHIN_S
    while any(child.is_alive for child in processes.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    codes = {name: _code_of(child) or 0 for name, child in processes.items()}
    for name, code in codes.items():
        if (code < 0 or code > 128) and not stop_requested():
            raise NodeLost(f"Node {name} was lost: what ran there ended with code {code}.")
    return STOPPED_EXIT_CODE if stop_requested() else max(codes.values())


def _code_of(child: Child) -> int | None:
    return None if child.is_alive else child.code


def run_here() -> int:
    """Be one of the other nodes. The first line of stdin says what to run; the watchdog then runs it, and ends it when
    stdin ends."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # what follows the line, its end, is for the watchdog
        line = stdin.readline()
    if not line.endswith(b"\n"):
        raise SystemExit("nanodag.worker.nodes: stdin ended before it said what to run")
    message = json.loads(line)
    up = Path(message["up"])
    if not up.parent.is_dir():
        return NOT_SHARED_EXIT_CODE
    os.environ.update(message["environment"])
    own = _address_towards(message["address"])
    os.environ.update(network_environment(own))
    channel = os.dup(0)
    os.set_inheritable(channel, True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what runs here has nothing to read
    up.write_text(f"{message['token']} {own}")
    command = [part.replace(ADDRESS, own) for part in message["command"]]
    watched = [sys.executable, "-m", "nanodag.worker.watchdog", str(channel), message["usage"], "0", *command]
    os.execv(sys.executable, watched)


def main() -> int:
    """Run a supervised stage on its nodes; returns the exit code."""
    module, job = sys.argv[1], load_job(sys.argv[2:])
    with contextlib.closing(Nodes(job)) as nodes:
        processes = nodes.start(module, os.environ)
        here = next(iter(processes.values()))
        try:
            return _wait_for_all(processes)
        finally:
            # Both at once: ranks here and there agree on the step after which they leave a checkpoint.
            here.send(signal.SIGTERM)
            nodes.close()
            here.wait(nodes.end_timeout_s)
            here.kill()


if __name__ == "__main__":
    try:
        sys.exit(main() if len(sys.argv) > 1 else run_here())
    except Exception:
        log.exception("The stage failed.")
        sys.exit(1)
