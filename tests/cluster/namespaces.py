"""Network namespaces of this machine, joined by a cable of their own, as two machines or more. Root only."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SSH_COMMAND = "ip netns exec {host}"
TWO = {"num_ranks": 2, "threads": 1, "device": "cpu"}  # resources of a trainer


@dataclass(frozen=True)
class TwoNodes:
    """here, there: the addresses of the nodes, which are the names of their namespaces too."""

    here: str
    there: str

    def make(self) -> None:
        """Both nodes and the cable. The first one's end is a bridge, so its address stays when the other one goes."""
        self._add(self.here)
        run("ip", "-n", self.here, "link", "add", "cable", "type", "bridge")
        self._up(self.here, "cable")
        self.plug(self.there)

    def plug(self, node: str) -> None:
        """Add the other node, and the cable to it. A machine that is back has the network card that it had."""
        self._add(node)
        number = int(node.rpartition(".")[2])
        ends = [f"nd{os.getpid() % 100000}-{number}{end}" for end in "ab"]  # 15 characters at most
        for where in ([], ["-n", self.here]):  # the kernel takes a node's old cable away some time after the node
            subprocess.run(["ip", *where, "link", "del", ends[0]], check=False, capture_output=True)
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        run("ip", "link", "set", ends[0], "netns", self.here)
        run("ip", "-n", self.here, "link", "set", ends[0], "master", "cable")
        run("ip", "-n", self.here, "link", "set", ends[0], "up")
        run("ip", "link", "set", ends[1], "address", f"02:00:00:00:00:{number:02x}", "netns", node)
        self._up(node, ends[1])

    def unplug(self) -> None:
        """End whatever runs on both nodes, and take them away."""
        for node in (self.here, self.there):
            self.kill(node)
            subprocess.run(["ip", "netns", "del", node], check=False, capture_output=True)

    def pids(self, node: str) -> list[int]:
        """The processes on a node."""
        done = subprocess.run(["ip", "netns", "pids", node], check=False, capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def kill(self, node: str) -> int:
        """Cut a node's power: SIGKILL to every process on it; how many there were."""
        pids = self.pids(node)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    @contextlib.contextmanager
    def cut(self, node: str) -> Iterator[None]:
        """Inside, nothing reaches a node, nor comes from there; no connection is told."""
        device = "cable" if node == self.here else f"nd{os.getpid() % 100000}-{node.rpartition('.')[2]}b"
        end = ["ip", "-n", node, "link", "set", device]
        run(*end, "down")
        try:
            yield
        finally:
            run(*end, "up")

    @contextlib.contextmanager
    def one_more(self, number: int = 3) -> Iterator[str]:
        """A third node, or a later one."""
        node = f"{self.here.rpartition('.')[0]}.{number}"
        try:
            self.plug(node)
            yield node
        finally:
            self.kill(node)
            subprocess.run(["ip", "netns", "del", node], check=False, capture_output=True)

    def on(self, node: str, command: Sequence[str]) -> list[str]:
        """A command as it is run on a node."""
        return [*SSH_COMMAND.format(host=node).split(), *command]

    def _up(self, node: str, device: str) -> None:
        run("ip", "-n", node, "addr", "add", f"{node}/24", "dev", device)
        run("ip", "-n", node, "link", "set", device, "up")

    def _add(self, node: str) -> None:
        run("ip", "netns", "add", node)
        run("ip", "-n", node, "link", "set", "lo", "up")


def run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@contextlib.contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    network = f"10.213.{os.getpid() % 250}"
    nodes = TwoNodes(f"{network}.1", f"{network}.2")
    try:
        nodes.make()
        yield nodes
    finally:
        nodes.unplug()
