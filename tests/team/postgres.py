"""A real Postgres of its own: a cluster in a temporary folder, owned by a user who is not root, on a free port."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from nanodag.host.ports import free_port

PASSWORD = "pg-QkZ81mTqvX"


def missing(what: str) -> NoReturn:
    """A tool that is not here: an error in CI."""
    (pytest.fail if os.environ.get("NANODAG_CI") else pytest.skip)(what)


@dataclass(frozen=True)
class Postgres:
    """port: on loopback. url: what server.database says, without the password."""

    port: int

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://nanodag@127.0.0.1:{self.port}/prefect"

    def query(self, sql: str) -> str:
        """What psql answers, unaligned and without headings."""
        command = ["psql", "-At", "-h", "127.0.0.1", "-p", str(self.port), "-U", "nanodag", "-d", "prefect", "-c", sql]
        environment = {**os.environ, "PGPASSWORD": PASSWORD}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def programs() -> Path | None:
    """The folder of initdb and pg_ctl, where Debian puts them or on the path."""
    found = [*sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")), *filter(None, [shutil.which("initdb")])]
    return Path(found[-1]).parent if found and shutil.which("psql") else None


@contextlib.contextmanager
def postgres(programs: Path) -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="nanodag-postgres-"))
    found = Postgres(free_port())
    as_other: list[str] = []
    if os.geteuid() == 0:  # Postgres refuses to run as root
        shutil.chown(folder, "postgres", "postgres")
        as_other = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
    (folder / "password").write_text(PASSWORD)
    (folder / "password").chmod(0o644)
    data, options = folder / "data", f"-p {found.port} -h 127.0.0.1 -k {folder} -F"

    def run(*command: str) -> None:
        subprocess.run([*as_other, *command], check=True, cwd=folder, stdout=subprocess.DEVNULL)

    try:
        initdb = [str(programs / "initdb"), "-D", str(data), "-U", "nanodag", "-A", "scram-sha-256"]
        run(*initdb, f"--pwfile={folder / 'password'}", "--no-sync")
        pg_ctl = [str(programs / "pg_ctl"), "-D", str(data), "-w"]
        run(*pg_ctl, "-o", options, "-l", str(folder / "log"), "start")
        try:
            environment = {**os.environ, "PGPASSWORD": PASSWORD}
            create = ["createdb", "-h", "127.0.0.1", "-p", str(found.port), "-U", "nanodag", "prefect"]
            subprocess.run(create, env=environment, check=True)
            yield found
        finally:
            run(*pg_ctl, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
