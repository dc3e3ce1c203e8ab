"""Samplers on nodes of their own (`sampler.nodes`), started in the way of the trainer's other ranks: `worker/nodes.py`.

A server there listens on the address by which this machine reaches that one, and wants the stage's token. It ends with
this process, with the connection, and when it is told to.
"""

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nanodag.config.pipeline import ClusterConfig
from nanodag.engines.start import POLL_S, ServerProcess
from nanodag.errors import NodeLost
from nanodag.inference.server_variables import PARENT_VARIABLE, TOKEN_VARIABLE
from nanodag.worker import nodes
from nanodag.worker.job import stop_requested
from nanodag.worker.watchdog import STOP_TIMEOUT, STOP_TIMEOUT_S

GRACE_S = STOP_TIMEOUT_S + 5.0  # over the watchdog's own, on the other side


class NodeServer(ServerProcess):
    """A server on another node. process: what reaches it from here."""

    def kill(self) -> None:
        """Make it end: here at once, there as soon as the connection is seen to have gone."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        super().kill()

    def stop(self, timeout_s: float = GRACE_S, signum: int = signal.SIGTERM) -> None:
        """Have it end, and wait until it has."""
        self.hang_up(timeout_s)


class SamplerNode:
    """One node and its samplers, of which `start_engine` starts one. number: of the sampler that is started next, for
    the files that tell of it. folder: the workspace, which all nodes share."""

    host = nodes.ADDRESS  # that they listen on

    def __init__(self, cluster: ClusterConfig, name: str, folder: Path, *, number: int) -> None:
        self._cluster, self._name, self._folder, self._number = cluster, name, folder, number
        self.address = ""  # the node's, once it is known

    def spawn(self, command: Sequence[str], *, log_path: Path, env: Mapping[str, str], token: str) -> ServerProcess:
        """Start it there. A node that cannot be reached is asked again for REACH_TIMEOUT_S; then raises NodeLost.
        Raises ConfigError where it does not share the workspace."""
        environment = {name: value for name, value in env.items() if name != PARENT_VARIABLE}
        environment |= {TOKEN_VARIABLE: token, STOP_TIMEOUT: str(STOP_TIMEOUT_S)}  # the stage's own is for checkpoints
        remote = nodes.RemoteCommand(
            self._cluster,
            self._name,
            command,
            environment,
            address=nodes.seen_address(self._name),
            folder=self._folder,
            name=f"sampler-{self._number}",
            log_path=log_path,
        )
        while not remote.is_there():
            if stop_requested():
                remote.child.hang_up(0.0)
                raise NodeLost(f"{self._name}, a node of samplers, was not reached before the stage was stopped.")
            time.sleep(POLL_S)
        self.address = remote.there
        return NodeServer(remote.child.process, log_path=log_path, in_group=True)
