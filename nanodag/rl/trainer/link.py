"""Messages between the controller and the ranks of the trainer: lines of JSON over TCP. No torch here.

The controller listens, ranks connect, say who they are and then that they are ready; after that the controller asks
all of them for the same thing and waits for every reply. Large things (rollouts, weights, checkpoints) are files that a
message names. A process that ends, by SIGKILL too, closes its connection: the other side sees that at once and ends
with the reason.
"""

import asyncio
import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nanodag.children.child import Lines
from nanodag.errors import StageFailed, TrainingDiverged
from nanodag.host.threads import in_thread

ADDRESS_VARIABLE = "NANODAG_CONTROLLER"  # host:port:token
POLL_S = 0.2


class RankLink:
    """The controller's side: one connection a rank, in rank order. host: this machine's address, where it listens."""

    def __init__(self, num_ranks: int, *, host: str = "127.0.0.1") -> None:
        self.num_ranks = num_ranks
        self._token = secrets.token_hex(16)
        self._server = socket.create_server((host, 0))
        self._connections: list[Lines] = []
        self._one_at_a_time = asyncio.Lock()

    @property
    def address(self) -> str:
        """Value of ADDRESS_VARIABLE in the ranks' environment."""
        host, port = self._server.getsockname()
        return f"{host}:{port}:{self._token}"

    def accept(self, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait until every rank has said hello, and then that it is ready. timeout_s: for the hellos; how long a rank
        loads its model is its own affair. check: called often; raises when a rank's process has ended. Raises what a
        rank raised."""
        deadline = time.monotonic() + timeout_s
        connections: dict[int, Lines] = {}
        while len(connections) < self.num_ranks:
            check()
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.num_ranks)) - set(connections))
                raise StageFailed(f"Trainer ranks {missing} did not connect within {timeout_s:.0f} s; see the log.")
            self._server.settimeout(POLL_S)
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            lines = _lines(connection)
            try:
                hello = lines.hear(10.0)
            except (ValueError, OSError):  # another program that looks what listens here
                hello = None
            if not isinstance(hello, dict) or hello.get("token") != self._token:  # not one of ours
                connection.close()
                continue
            connection.settimeout(None)
            connections[hello["rank"]] = lines
        self._connections = [connections[rank] for rank in range(self.num_ranks)]
        waiting = list(range(self.num_ranks))
        while waiting:
            check()
            ready = [rank for rank in waiting if self._connections[rank].has_more(within_s=POLL_S / len(waiting))]
            for rank in ready:
                self._take(rank, "start")
            waiting = [rank for rank in waiting if rank not in ready]

    async def exchange(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Ask every rank to do something; their replies, by rank. One exchange after the other, also when the caller is
        cancelled. Raises what a rank raised, or StageFailed when one ended."""
        return await asyncio.shield(asyncio.ensure_future(self._exchange(do, arguments)))

    async def _exchange(self, do: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        async with self._one_at_a_time:
            for rank, connection in enumerate(self._connections):
                try:
                    connection.say({"do": do, **arguments})
                except OSError as error:
                    raise StageFailed(f"Trainer rank {rank} ended before it was asked to {do}: {error}.") from error
            replies = (in_thread(partial(self._take, rank, do)) for rank in range(self.num_ranks))
            return list(await asyncio.gather(*replies))

    def close(self) -> None:
        """Tell every rank to end, and close the connections."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it may be gone
                connection.say({"do": "end"})
                connection.socket.shutdown(socket.SHUT_RDWR)  # a thread may wait for its reply
            connection.socket.close()
        self._server.close()

    def _take(self, rank: int, asked: str) -> dict[str, Any]:
        """The reply of a rank, once it has sent one, or has ended. asked: what the rank was asked to do."""
        try:
            reply = self._connections[rank].hear()
        except OSError:
            raise StageFailed(f"Trainer rank {rank} ended while it was asked to {asked}.") from None
        if "error" in reply:
            kind = TrainingDiverged if reply["error"] == "TrainingDiverged" else StageFailed
            raise kind(f"Trainer rank {rank}: {reply['message']}")
        return reply


class ControllerLink:
    """A rank's side. A thread reads, so the rank notices at once that the controller has gone, and ends. It does so in
    the middle of a step too, or stuck in a collective."""

    def __init__(self, rank: int) -> None:
        host, port, token = os.environ[ADDRESS_VARIABLE].split(":")
        self._lines = _lines(socket.create_connection((host, int(port)), timeout=30.0))
        self._lines.socket.settimeout(None)
        self._lines.say({"rank": rank, "token": token, "pid": os.getpid()})
        self._rank = rank
        self._waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> dict[str, Any]:
        return self._waiting.get()

    def reply(self, values: Mapping[str, Any]) -> None:
        self._lines.say(dict(values))

    def fail(self, error: BaseException) -> None:
        self._lines.say({"error": type(error).__name__, "message": str(error) or type(error).__name__})

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                message = self._lines.hear()
                self._waiting.put(message)
                if message["do"] == "end":
                    return
        os.write(2, f"rank {self._rank}: the controller has gone; ending\n".encode())
        os._exit(1)


def _lines(connection: socket.socket) -> Lines:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Lines(connection)
