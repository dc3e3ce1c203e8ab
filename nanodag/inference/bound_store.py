"""torch's TCPStore, listening on one address: its own server listens on every address of the machine."""

import socket
from typing import Any

import torch
from torch.distributed import TCPStore

from nanodag.inference.nccl import VERSION_KEY, fault


def nccl_version() -> str:
    """NCCL's version in this torch, as `2.30.7`; "" for a torch without it."""
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""


class BoundStore(TCPStore):
    """Store where ranks find each other. Arguments as of TCPStore; the master listens on `host_name` alone. Raises
    RuntimeError, for whoever comes to a group of NCCL whose rank 0 has another version of it."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any, **more: Any
    ) -> None:
        if is_master:
            address = socket.getaddrinfo(host_name, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
            server = socket.create_server((str(address[0]), port), backlog=2048)
            port = server.getsockname()[1]
            more["master_listen_fd"] = server.detach()  # the store closes it
        super().__init__(host_name, port, world_size, is_master, *rest, **more)
        of_trainer = "" if is_master or not self.check([VERSION_KEY]) else self.get(VERSION_KEY).decode()
        if of_trainer and (wrong := fault(of_trainer, nccl_version())):
            raise RuntimeError(wrong)
