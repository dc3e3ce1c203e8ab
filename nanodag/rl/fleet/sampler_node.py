"""Samplers on nodes of their own (`sampler.nodes`), started in the way of the trainer's other ranks: `worker/nodes.py`.

A server there listens on the address by which this machine reaches that one, and wants the stage's token. It ends with
this process, with the connection, and when it is told to.
"""

import contextlib
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from nanodag.config.pipeline import ClusterConfig
from nanodag.inference.sampler_process import ServerProcess
from nanodag.inference.server_environment import PARENT_VARIABLE, TOKEN_VARIABLE
from nanodag.worker.nodes import ADDRESS, address_of, seen_address, start_there

GRACE_S = 25.0  # over the watchdog's own, on the other side


class NodeServer(ServerProcess):
    """A server on another node. process: what reaches it from here."""

    def kill(self) -> None:
        """Make it end: here at once, there as soon as the connection is seen to have gone."""
        self._hang_up()
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = GRACE_S) -> None:
        """Have it end, and wait until it has."""
        self._hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self.kill()

    def _hang_up(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class SamplerNode:
    """One node and its samplers; `Elsewhere` of nanodag.inference. number: of the sampler that is started next, for the
    files that tell of it. folder: the workspace, which all nodes share."""

    host = ADDRESS

    def __init__(self, cluster: ClusterConfig, name: str, folder: Path, *, number: int) -> None:
        self._cluster, self._name, self.folder = cluster, name, folder
        self._up, self._usage = folder / f"sampler-{number}.up", folder / f"usage-sampler-{number}.jsonl"
        self._token = secrets.token_hex(8)

    def spawn(self, command: Sequence[str], *, log_path: Path, env: Mapping[str, str], token: str) -> ServerProcess:
        """Start it there."""
        environment = {name: value for name, value in env.items() if name != PARENT_VARIABLE} | {TOKEN_VARIABLE: token}
        with log_path.open("ab") as output:
            process = start_there(
                self._cluster,
                self._name,
                command,
                environment,
                address=seen_address(self._name),
                usage=self._usage,
                up=self._up,
                token=self._token,
                output=output,
            )
        return NodeServer(process, "", log_path)

    def address(self, server: ServerProcess) -> str:
        """The node's, once it has written it."""
        return address_of(self._up, self._token)
