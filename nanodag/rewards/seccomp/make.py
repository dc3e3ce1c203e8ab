"""Makes the filters from Podman's profile: `python nanodag/rewards/seccomp/make.py`, where libseccomp and pyseccomp
are.

Run it again when podman.json is replaced by a newer one. A rule that the profile gives to processes with a capability
is left out, as a program in the sandbox has none. The profile is made for containers that may hold containers; what
only those need is refused here, too.
"""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NAMES = {"x86_64": "amd64", "aarch64": "arm64"}  # as uname has it, and as the profile has it
REFUSED = {
    # A user namespace of its own would give a program every capability in it, and much of the kernel to attack.
    *("unshare", "setns", "mount", "umount", "umount2", "pivot_root"),
    *("open_tree", "move_mount", "mount_setattr", "fsopen", "fsconfig", "fsmount", "fspick"),
    # System V IPC: its memory outlives a process and is bounded by no limit that an ordinary user can set.
    *("shmget", "shmat", "shmctl", "shmdt", "semget", "semop", "semctl", "semtimedop", "semtimedop_time64"),
    *("msgget", "msgsnd", "msgrcv", "msgctl", "ipc"),
    # Keys belong to a user, not to a namespace. Memory behind a descriptor is bounded by no limit of the address space,
    # and belongs to no process that could be looked at.
    *("keyctl", "add_key", "request_key", "memfd_create", "memfd_secret", "reboot"),
    # Neither bounds nor walls are made for these; nothing of the standard library needs them.
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "bpf", "perf_event_open"),
}
# Sockets of these families alone: vsock reaches the hypervisor past every network namespace.
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
NETLINK = 16  # of the protocol 0, by which the C library lists network interfaces
NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
SHARED, ANONYMOUS = 0x01, 0x20  # flags of mmap
BY_ARGUMENTS = {"socket", "clone", "clone3", "socketcall", "mmap"}  # what _add_own says of them


def main() -> None:
    """Write one filter for each processor."""
    import pyseccomp

    profile = json.loads((FOLDER / "podman.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    for machine, name in NAMES.items():
        made = pyseccomp.SyscallFilter(pyseccomp.ERRNO(profile["defaultErrnoRet"]))
        made.remove_arch(pyseccomp.Arch.NATIVE)
        made.add_arch(getattr(pyseccomp.Arch, machine.upper()))
        made.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, 2)  # a tree is searched for each call, not a list
        for rule in profile["syscalls"]:
            if _holds(rule, name):
                _add(pyseccomp, made, rule)
        _add_own(pyseccomp, made)
        with (FOLDER / f"{machine}.bpf").open("wb") as stream:
            made.export_bpf(stream)


def _holds(rule: Mapping[str, Any], machine: str) -> bool:
    """Whether a rule is for this processor and for a process without capabilities."""
    wanted, unwanted = rule.get("includes", {}), rule.get("excludes", {})
    is_machine = machine in wanted.get("arches", [machine]) and machine not in unwanted.get("arches", [])
    return is_machine and not wanted.get("caps")


def _add(pyseccomp: Any, made: Any, rule: Mapping[str, Any]) -> None:
    is_allowed = rule["action"] == "SCMP_ACT_ALLOW"
    action = pyseccomp.ALLOW if is_allowed else pyseccomp.ERRNO(rule["errnoRet"])
    for name in rule["names"]:
        if name not in REFUSED | BY_ARGUMENTS:
            _rule(made, action, name, *(_argument(pyseccomp, argument) for argument in rule.get("args") or []))


def _add_own(pyseccomp: Any, made: Any) -> None:
    refused = pyseccomp.ERRNO(errno.EPERM)
    for name in sorted(REFUSED):
        _rule(made, refused, name)
    # What clone3 is asked for lies in memory, where no filter looks: it stays at the default, ENOSYS, and the C library
    # takes clone instead.
    _rule(made, pyseccomp.ALLOW, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, NAMESPACE_FLAGS, 0))
    # Shared memory without a file is held as long as one page of it is mapped, and only mapped pages are counted.
    for flags in (0, SHARED, ANONYMOUS, SHARED | ANONYMOUS):
        action = refused if flags == SHARED | ANONYMOUS else pyseccomp.ALLOW
        _rule(made, action, "mmap", pyseccomp.Arg(3, pyseccomp.MASKED_EQ, SHARED | ANONYMOUS, flags))
    for family in FAMILIES.values():
        _rule(made, pyseccomp.ALLOW, "socket", pyseccomp.Arg(0, pyseccomp.EQ, family))
    netlink = pyseccomp.Arg(0, pyseccomp.EQ, NETLINK), pyseccomp.Arg(2, pyseccomp.EQ, 0)
    _rule(made, pyseccomp.ALLOW, "socket", *netlink)


def _rule(made: Any, action: int, name: str, *arguments: Any) -> None:
    try:
        made.add_rule(action, name, *arguments)
    except (OSError, ValueError):  # a call that this libseccomp, or this processor, does not know
        print(f"{name}: not known, so it gets the profile's default, an error")


def _argument(pyseccomp: Any, one: Mapping[str, Any]) -> Any:
    operator = getattr(pyseccomp, one["op"].removeprefix("SCMP_CMP_"))
    return pyseccomp.Arg(one["index"], operator, one["value"], one.get("valueTwo", 0))


if __name__ == "__main__":
    main()
