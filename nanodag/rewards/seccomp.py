"""System calls that a program in the sandbox may make: filters for the kernel, and how they are made.

ALLOWED and CLOSED are Podman's default profile for a process without capabilities, on x86_64 and aarch64, as
/usr/share/containers/seccomp.json of Debian's package golang-github-containers-common 0.50.1+ds1-4 (Apache-2.0) has it.
The profile is made for containers that may hold containers; what only those need is refused here, too. A call that is
not named gets ENOSYS. `python -m nanodag.rewards.seccomp` writes the filters anew, where libseccomp and pyseccomp are.
"""

import errno
import platform
from pathlib import Path
from typing import Any

MACHINES = ("x86_64", "aarch64")
ALLOWED = """
accept accept4 access adjtimex alarm arch_prctl bind brk capget capset chdir chmod chown clock_adjtime clock_getres
clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1
epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 execve execveat exit
exit_group faccessat faccessat2 fadvise64 fallocate fanotify_mark fchdir fchmod fchmodat fchown fchownat fcntl
fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futimesat
get_mempolicy get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups
getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage
getsid getsockname getsockopt gettid gettimeofday getuid getxattr inotify_add_watch inotify_init inotify_init1
inotify_rm_watch io_cancel io_destroy io_getevents io_setup io_submit ioctl ioprio_get ioprio_set kill
landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listxattr
llistxattr lremovexattr lseek lsetxattr lstat madvise mbind membarrier mincore mkdir mkdirat mknod mknodat mlock
mlock2 mlockall modify_ldt mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink mremap
msync munlock munlockall munmap name_to_handle_at nanosleep newfstatat open openat openat2 pause pidfd_getfd
pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64 preadv preadv2
prlimit64 process_mrelease process_vm_readv process_vm_writev pselect6 ptrace pwrite64 pwritev pwritev2 read readahead
readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr rename renameat renameat2
restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam
sched_setscheduler sched_yield seccomp select sendfile sendmmsg sendmsg sendto set_mempolicy set_robust_list
set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid setpriority setregid setresgid
setresuid setreuid setrlimit setsid setsockopt setuid setxattr shutdown sigaltstack signalfd signalfd4 socketpair
splice stat statfs statx symlink symlinkat sync sync_file_range syncfs sysinfo syslog tee tgkill time timer_create
timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill
truncate umask uname unlink unlinkat utime utimensat utimes vfork wait4 waitid write writev
"""
CLOSED = """
acct chroot clock_settime delete_module fanotify_init finit_module init_module io_pgetevents ioperm iopl kcmp
kexec_file_load kexec_load lookup_dcookie migrate_pages move_pages nfsservctl open_by_handle_at process_madvise
query_module quotactl setdomainname sethostname settimeofday swapoff swapon sysfs uselib ustat vhangup vmsplice
"""
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
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)


def filter_path(machine: str = platform.machine()) -> Path:
    """The filter for a processor, by its name in uname; there may be none."""
    return Path(__file__).with_name(f"seccomp-{machine}.bpf")


def main() -> None:
    """Write one filter for each processor."""
    import pyseccomp

    for machine in MACHINES:
        made = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))
        made.remove_arch(pyseccomp.Arch.NATIVE)
        made.add_arch(getattr(pyseccomp.Arch, machine.upper()))
        made.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, 2)  # a tree is searched for each call, not a list
        _add_rules(pyseccomp, made)
        with filter_path(machine).open("wb") as stream:
            made.export_bpf(stream)


def _add_rules(pyseccomp: Any, made: Any) -> None:
    allowed, refused = pyseccomp.ALLOW, pyseccomp.ERRNO(errno.EPERM)
    for name in ALLOWED.split():
        _rule(made, allowed, name)
    for name in [*CLOSED.split(), *sorted(REFUSED)]:
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
    for family in FAMILIES.values():
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
