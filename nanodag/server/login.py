"""The login of a store's Prefect server: a file of one line, `user:password`, that nobody else may read."""

import stat
from pathlib import Path

from nanodag.errors import ConfigError

NO_LOGIN = "none"
HOW = 'Make it so: (umask 077; echo "team:$(openssl rand -hex 16)" > FILE)'


def read_login(file: str) -> tuple[str, str] | None:
    """User and password; None when the server asks for none.

    Raises ConfigError when the file (server.password_file) is not there, is no such line, or others may read it. No
    message holds what the file says.
    """
    if file == NO_LOGIN:
        return None
    path = Path(file)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        user, colon, password = path.read_text(encoding="utf-8").strip().partition(":")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.password_file {path} cannot be read: {type(error).__name__}. {HOW}") from error
    if mode & 0o077:
        raise ConfigError(f"server.password_file {path} may be read by others (mode {mode:o}). Run: chmod 600 {path}")
    if not (user and colon and password) or len(password.split()) != 1:
        raise ConfigError(f"server.password_file {path} is not one line of the form user:password. {HOW}")
    return user, password
