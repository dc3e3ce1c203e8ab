"""Samplers on nodes of their own (`sampler.nodes`), started in the way of the trainer's other ranks: `worker/nodes.py`.

A server there listens on the address by which this machine reaches that one, and wants the stage's token. It ends with
this process, with the connection, and when it is told to.
"""

import logging
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nanodag.config.pipeline import ClusterConfig
from nanodag.engines.start import POLL_S, ServerProcess
from nanodag.errors import ConfigError, NodeLost
from nanodag.inference.server_variables import PARENT_VARIABLE, TOKEN_VARIABLE
from nanodag.worker import nodes
from nanodag.worker.job import stop_requested
from nanodag.worker.watchdog import STOP_TIMEOUT, STOP_TIMEOUT_S

log = logging.getLogger(__name__)

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
        self._cluster, self._name, self._folder = cluster, name, folder
        self._up, self._usage = folder / f"sampler-{number}.up", folder / f"usage-sampler-{number}.jsonl"
        self._token = ""

    def spawn(self, command: Sequence[str], *, log_path: Path, env: Mapping[str, str], token: str) -> ServerProcess:
        """Start it there. A node that cannot be reached is asked again for REACH_TIMEOUT_S; then raises NodeLost.
        Raises ConfigError where it does not share the workspace."""
        environment = {name: value for name, value in env.items() if name != PARENT_VARIABLE}
        environment |= {TOKEN_VARIABLE: token, STOP_TIMEOUT: str(STOP_TIMEOUT_S)}  # the stage's own is for checkpoints
        deadline = time.monotonic() + nodes.REACH_TIMEOUT_S
        while True:
            self._token = secrets.token_hex(8)
            child = nodes.start_there(
                self._cluster,
                self._name,
                command,
                environment,
                address=nodes.seen_address(self._name),
                usage=self._usage,
                up=self._up,
                token=self._token,
                log_path=log_path,
            )
            server = NodeServer(child.process, log_path=log_path, in_group=True)
            while server.is_alive and not self.address(server) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if self.address(server):
                return server
            code = None if server.is_alive else server.code
            server.kill()
            if code == nodes.NOT_SHARED_EXIT_CODE:
                raise ConfigError(f"{self._name} has no folder {self._folder}. {nodes.SHARE_IT}")
            if time.monotonic() > deadline or stop_requested():
                raise NodeLost(
                    f"{self._name}, a node of samplers, could not be reached in {nodes.REACH_TIMEOUT_S:.0f} s; the end "
                    f"of {log_path}:\n{server.tail(5)}"
                )
            log.info("%s, a node of samplers: not reached (code %s); once more", self._name, code)
            time.sleep(nodes.AGAIN_AFTER_S)

    def address(self, server: ServerProcess) -> str:
        """The node's, once it has written it; else empty."""
        return nodes.address_of(self._up, self._token)
