"""Writes the filters of system calls for the sandbox from nanodag/rewards/seccomp.yaml, where libseccomp and pyseccomp
are: `python .ci/seccomp.py`. A call that is not named there gets ENOSYS."""

import errno
from pathlib import Path
from typing import Any

import pyseccomp
import yaml

FOLDER = Path(__file__).parents[1] / "nanodag" / "rewards"
MACHINES = ("x86_64", "aarch64")
NETLINK = 16  # of the protocol 0, by which the C library lists network interfaces
NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
SHARED, ANONYMOUS = 0x01, 0x20  # flags of mmap
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)


def main() -> None:
    """Write one filter for each processor."""
    profile = yaml.safe_load((FOLDER / "seccomp.yaml").read_text(encoding="utf-8"))
    for machine in MACHINES:
        made = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))
        made.remove_arch(pyseccomp.Arch.NATIVE)
        made.add_arch(getattr(pyseccomp.Arch, machine.upper()))
        made.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, 2)  # a tree is searched for each call, not a list
        _add_rules(made, profile)
        with (FOLDER / f"seccomp-{machine}.bpf").open("wb") as stream:
            made.export_bpf(stream)


def _add_rules(made: Any, profile: dict[str, Any]) -> None:
    allowed, refused = pyseccomp.ALLOW, pyseccomp.ERRNO(errno.EPERM)
    for name in profile["allowed"].split():
        _rule(made, allowed, name)
    for name in [*profile["closed"].split(), *sorted(" ".join(profile["refused"]).split())]:
        _rule(made, refused, name)
    for personality in PERSONALITIES:
        _rule(made, allowed, "personality", pyseccomp.Arg(0, pyseccomp.EQ, personality))
    # What clone3 is asked for lies in memory, where no filter looks: it stays at the default, ENOSYS, and the C library
    # takes clone instead.
    _rule(made, allowed, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, NAMESPACE_FLAGS, 0))
    # Shared memory without a file is held as long as one page of it is mapped, and only mapped pages are counted.
    for flags in (0, SHARED, ANONYMOUS, SHARED | ANONYMOUS):
        action = refused if flags == SHARED | ANONYMOUS else allowed
        _rule(made, action, "mmap", pyseccomp.Arg(3, pyseccomp.MASKED_EQ, SHARED | ANONYMOUS, flags))
    for family in profile["families"].values():
        _rule(made, allowed, "socket", pyseccomp.Arg(0, pyseccomp.EQ, family))
    netlink = pyseccomp.Arg(0, pyseccomp.EQ, NETLINK), pyseccomp.Arg(2, pyseccomp.EQ, 0)
    _rule(made, allowed, "socket", *netlink)


def _rule(made: Any, action: int, name: str, *arguments: Any) -> None:
    try:
        made.add_rule(action, name, *arguments)
    except (OSError, ValueError):  # a call that this libseccomp, or this processor, does not know
        print(f"{name}: not known, so it gets the profile's default, an error")


if __name__ == "__main__":
    main()
