"""Ports and network interfaces of this machine."""

import os
import socket

import psutil

LOOPBACK = "127.0.0.1"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at the address ("": at any of this machine's). Another process may take it before
    it is used."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def interface_of(address: str) -> str:
    """The network interface that has an address."""
    interfaces = [name for name, has in psutil.net_if_addrs().items() if any(entry.address == address for entry in has)]
    assert interfaces, f"no interface has {address}"
    return interfaces[0]


def network_environment(address: str = LOOPBACK) -> dict[str, str]:
    """What makes gloo and NCCL listen and meet on the interface of this machine's address, and on no other. They would
    else take that of the machine's name, or all. What the user set stays."""
    interface = interface_of(address)
    return {name: os.environ.get(name, interface) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
