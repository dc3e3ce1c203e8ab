"""Ports of this machine."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at the address ("": at any of this machine's). Another process may take it before
    it is used."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])
