"""torch's TCPStore, listening on one address: its own server listens on every address of the machine."""

import socket
from typing import Any

from torch.distributed import TCPStore


class BoundStore(TCPStore):
    """Store where ranks find each other. Arguments as of TCPStore; the master listens on `host_name` alone."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any, **more: Any
    ) -> None:
        if is_master:
            address = socket.getaddrinfo(host_name, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
            server = socket.create_server((str(address[0]), port), backlog=2048)
            port = server.getsockname()[1]
            more["master_listen_fd"] = server.detach()  # the store closes it
        super().__init__(host_name, port, world_size, is_master, *rest, **more)
