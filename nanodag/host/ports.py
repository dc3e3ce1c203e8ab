"""Ports, sockets and network interfaces of this machine."""

import os
import resource
import socket

import psutil

LOOPBACK = "127.0.0.1"
MANY_FILES = 1 << 16


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at the address ("": at any of this machine's). Another process may take it before
    it is used."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def allow_many_sockets() -> None:
    """Raise this process's soft limit of open files, as far as its hard one: 512 engines need more than the usual
    1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def address_towards(host: str, port: int = 9) -> str:
    """This machine's address from which it reaches a host. Nothing is sent. Raises OSError where no way leads there."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(address)
        return str(way.getsockname()[0])


def own_address(named: str) -> str:
    """An address of this machine, or that of an interface of this name. Raises ValueError when it has neither."""
    of_each = {
        name: [entry.address for entry in has if entry.family == socket.AF_INET]
        for name, has in psutil.net_if_addrs().items()
    }
    if any(named in addresses for addresses in of_each.values()):
        return named
    if of_each.get(named):
        return of_each[named][0]
    known = ", ".join(f"{name} {addresses[0]}" for name, addresses in of_each.items() if addresses)
    raise ValueError(f"{named!r} is neither an address nor an interface of this machine; it has {known}")


def no_proxy_here() -> dict[str, str]:
    """Environment in which no proxy stands before addresses of this machine."""
    direct = ",".join([*filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy")]), LOOPBACK])
    return {"NO_PROXY": direct, "no_proxy": direct}


def network_environment(address: str = LOOPBACK) -> dict[str, str]:
    """Environment in which gloo and NCCL listen and meet on the interface of this machine's address, and on no other.
    They would else take that of the machine's name, or all. What the user set stays."""
    interfaces = [name for name, has in psutil.net_if_addrs().items() if any(entry.address == address for entry in has)]
    assert interfaces, f"no interface has {address}"
    return {name: os.environ.get(name, interfaces[0]) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
