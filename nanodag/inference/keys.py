"""Files of keys: one a line, what a server wants to see as `Authorization: Bearer KEY`."""

from pathlib import Path

from nanodag.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LEAST_KEY = 16
"""Characters of a key that a server of ours takes."""


def read_keys(path: Path, *, named: str, least: int = LEAST_KEY) -> list[str]:
    """The keys of a file; lines that begin with # are comments. named: the setting that names it, for a message.

    Raises ConfigError for a file that cannot be read, has no key, or has one that is too short or no plain ASCII.
    """
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
