"""Addresses of servers that somebody else runs: `http://node2:30000`, then the file of its key where it wants one; and
files of keys: one a line, what a server wants to see as `Authorization: Bearer KEY`."""

import ipaddress
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from nanodag.errors import ConfigError

LARGEST_FILE = 1 << 20
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LEAST_KEY = 16
"""Characters of a key that a server of ours takes."""


def is_loopback(host: str) -> bool:
    """True for an address or a name by which only this machine is reached."""
    with suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@dataclass(frozen=True)
class Address:
    """Address of a server. key_file: of the key that requests to it bear, "" for none."""

    url: str
    key_file: str = ""

    @property
    def is_here(self) -> bool:
        """True when it is a server of this machine, by its address."""
        return is_loopback(urlsplit(self.url).hostname or "")


def parse_address(text: str) -> Address:
    """From `URL` or `URL KEYFILE`. Raises ValueError for what is neither."""
    url, *rest = text.split(maxsplit=1)[:2] if text.strip() else [""]
    key_file = rest[0].strip() if rest else ""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number
        is_url = False
    if not is_url or parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{text!r:.200} is not of the form `http://node2:30000`, with the file of its key behind it")
    if key_file and not key_file.startswith(("/", "~/")):
        raise ValueError(f"{text!r:.200}: the file of the key needs its whole path")
    return Address(f"{parts.scheme}://{parts.netloc}", key_file)


def read_addresses(path: Path) -> list[Address]:
    """Addresses of a file, one a line; empty lines and comments are passed over. Raises ValueError with the line that
    is wrong, OSError where it cannot be read."""
    addresses: list[Address] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = file.read(LARGEST_FILE).splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            address = parse_address(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if any(other.url == address.url for other in addresses):
            raise ValueError(f"{path}, line {number}: {address.url} is there twice")
        addresses.append(address)
    return addresses


def read_keys(path: Path, *, named: str, least: int = LEAST_KEY) -> list[str]:
    """The keys of a file; lines that begin with # are comments. named: the setting that names it, for a message. Raises
    ConfigError for a file that cannot be read, has no key, or has one that is too short or no plain ASCII."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{named} {path} cannot be read: {error}.") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys or any(len(key) < least or not key.isascii() or " " in key for key in keys):
        raise ConfigError(
            f"{named} {path} needs one key a line, each of {least} ASCII characters or more, as from: "
            "openssl rand -hex 24"
        )
    return keys


def keys_for(host: str, file: Path | None) -> list[str]:
    """The keys of the file that --api-key-file names, none without one. Raises ConfigError as `read_keys` does, and
    where there is no file and anybody could ask at the address."""
    if file is not None:
        return read_keys(file.expanduser(), named="--api-key-file")
    if host not in LOOPBACK:
        raise ConfigError(
            f"--host {host} is within reach of others: name a file of keys with --api-key-file, or serve on 127.0.0.1."
        )
    return []
