"""Which system calls a program in the sandbox may make: Podman's default profile, and less, as a filter for the kernel.

`podman.json` is /usr/share/containers/seccomp.json of Debian's package golang-github-containers-common 0.50.1+ds1-4
(Apache-2.0), word for word. `x86_64.bpf` and `aarch64.bpf` are made from it by make.py, for a process without
capabilities; make.py says what is refused beyond it, and why.
"""

import platform
from pathlib import Path

FOLDER = Path(__file__).parent


def filter_path() -> Path | None:
    """The filter for this machine's processor; None where there is none."""
    path = FOLDER / f"{platform.machine()}.bpf"
    return path if path.is_file() else None
