"""Programs that attack the machine which runs them. Not a test: tests/rewards/test_sandbox.py runs them.

What becomes of one is the last line that it prints, `refused: EROFS` where the kernel said no, `bounded: MemoryError`
where Python ran into a limit, `succeeded` or `harmless` where it got what it wanted inside its walls; or `ended: time`,
`ended: memory` (of all its processes together), `ended: SIGSEGV`. docs/explanation/trust.md has them in a table.
"""

from dataclasses import dataclass

# Before each program: `tries(f)` prints the error of f(), or that it succeeded, and `call(n, ...)` makes a system call.
PRELUDE = """
import ctypes, errno, os, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    found = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), "system call")
    return found
def tries(f):
    try:
        f()
    except OSError as error:
        print("refused:", errno.errorcode.get(error.errno, error.errno), flush=True)
    except (RuntimeError, MemoryError) as error:
        print("bounded:", type(error).__name__, flush=True)
    else:
        print("succeeded", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Attack:
    """becomes: what may become of it, ` | ` between where kernels differ. by_number: it makes system calls by their
    numbers on x86-64. CANARY, PORT and ABSTRACT are a file, a TCP port and an abstract unix socket of the machine."""

    name: str
    tries: str
    becomes: str
    program: str
    by_number: bool = False


def _call(name: str, tries: str, number: int, arguments: str, becomes: str = "refused: EPERM") -> Attack:
    """A system call that the program makes itself."""
    return Attack(name, tries, becomes, f"tries(lambda: call({number}, {arguments}))", by_number=True)


def _fill(name: str, folder: str) -> Attack:
    write = f"open('{folder}/' + str(number), 'wb').write(bytes(1 << 20))"
    program = f"def fill():\n    for number in range(100000):\n        {write}\ntries(fill)"
    return Attack(name, f"fill {folder}", "refused: ENOSPC", program)


ATTACKS = [
    # The machine's files
    Attack("write-usr", "write below /usr", "refused: EROFS", "tries(lambda: open('/usr/x', 'w'))"),
    Attack("write-interpreter", "change the interpreter's library", "refused: EROFS | refused: EACCES",
           "tries(lambda: open(os.__file__, 'a'))"),
    Attack("write-etc", "write below /etc", "refused: EROFS", "tries(lambda: open('/etc/x', 'w'))"),
    Attack("write-root", "write at the root", "refused: EROFS", "tries(lambda: open('/x', 'w'))"),
    Attack("write-itself", "change its own file", "refused: EROFS", "tries(lambda: open(sys.argv[0], 'w'))"),
    Attack("chmod-usr", "make a file of /usr writable", "refused: EROFS",
           "tries(lambda: os.chmod('/usr/bin/env', 0o4777))"),
    Attack("proc-sys", "change the kernel's core_pattern", "refused: EROFS | refused: EACCES",
           "tries(lambda: open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh'))"),
    Attack("sysrq", "write to /proc/sysrq-trigger", "refused: EROFS | refused: EACCES | refused: ENOENT",
           "tries(lambda: open('/proc/sysrq-trigger', 'w').write('b'))"),
    Attack("sys", "write below /sys", "refused: ENOENT", "tries(lambda: open('/sys/power/state', 'w'))"),
    Attack("read-passwd", "read /etc/shadow", "refused: ENOENT", "tries(lambda: open('/etc/shadow').read())"),
    Attack("read-home", "read the canary of the machine", "refused: ENOENT", "tries(lambda: open(CANARY).read())"),
    Attack("symlink", "reach it by a symbolic link", "refused: ENOENT",
           "os.symlink(os.path.dirname(CANARY), '/tmp/link')\ntries(lambda: open('/tmp/link/canary').read())"),
    Attack("hardlink", "link a file of /usr to where it may write", "refused: EXDEV",
           "tries(lambda: os.link('/usr/bin/env', '/tmp/env'))"),
    Attack("proc-root", "go through /proc/1/root", "refused: ENOENT | refused: EACCES",
           "tries(lambda: open('/proc/1/root' + CANARY).read())"),
    Attack("proc-cwd", "go up from a file that it was given", "refused: ENOTDIR",
           "tries(lambda: os.listdir('/proc/self/fd/1/..'))"),
    Attack("descriptors", "use a descriptor that was left open", "harmless", """
left = [one for one in os.listdir('/proc/self/fd') if int(one) > 2 and os.path.exists('/proc/self/fd/' + one)]
print('harmless' if not left else [os.readlink('/proc/self/fd/' + one) for one in left])
"""),
    Attack("environment", "read secrets of the environment", "harmless", """
texts = [open(f'/proc/{p}/environ').read() for p in os.listdir('/proc') if p.isdigit() and p != '1']
print('harmless' if not any('A_SECRET' in text for text in [*texts, *os.environ]) else 'leaked')
"""),
    # Rights
    Attack("setuid", "become root", "refused: EINVAL", "tries(lambda: os.setuid(0))"),
    Attack("exec-setuid", "gain rights by a program with the setuid bit", "harmless", """
import subprocess
done = subprocess.run(['/usr/bin/mount', '-o', 'remount,rw', '/usr'], capture_output=True)  # has the bit
print('harmless' if done.returncode else 'succeeded')
"""),
    Attack("capabilities", "hold any capability", "harmless", """
held = [line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')]
print('harmless' if set(held) == {'0' * 16} else held)
"""),
    Attack("new-privileges", "do without no_new_privs and the filter", "harmless", """
status = dict(line.split(':\\t', 1) for line in open('/proc/self/status'))
print('harmless' if (status['NoNewPrivs'], status['Seccomp']) == ('1\\n', '2\\n') else status)
"""),
    _call("unshare", "make a user namespace", 272, "0x10000000"),
    _call("clone-userns", "make one with clone", 56, "0x10000000 | 17, 0, 0, 0, 0", "refused: ENOSYS"),
    _call("clone3", "make one with clone3", 435, "0, 0", "refused: ENOSYS"),
    _call("setns", "enter the namespace of another", 308, "os.open('/proc/1/ns/mnt', os.O_RDONLY), 0"),
    Attack("unshare-program", "start a program that makes namespaces", "refused: EPERM", """
import subprocess
done = subprocess.run(['/usr/bin/unshare', '--user', '--map-root-user', 'true'], capture_output=True)
print('refused: EPERM' if done.returncode else 'succeeded')
"""),
    _call("remount", "make /usr writable", 165, "b'none', b'/usr', 0, 0x1000 | 0x20, 0"),
    _call("mount-proc", "mount a fresh proc", 165, "b'proc', b'/tmp', b'proc', 0, 0"),
    _call("open-tree", "copy a mount with the new calls", 428, "-100, b'/', 1"),
    _call("umount", "take a wall away", 166, "b'/usr', 2"),
    _call("pivot-root", "change the root", 155, "b'/tmp', b'/tmp'"),
    _call("chroot", "change the root of the process", 161, "b'/tmp'"),
    Attack("mknod", "make the disk's device", "refused: EPERM",
           "tries(lambda: os.mknod('/tmp/d', 0o60666, os.makedev(254, 0)))"),
    Attack("handle", "open files of the disk by handle", "refused: EPERM",
           "tries(lambda: call(304, -100, ctypes.create_string_buffer(64), 0))", by_number=True),
    # The kernel
    _call("keyctl", "read the session's keys", 250, "0, -3, 1"),
    _call("bpf", "load a BPF program", 321, "5, 0, 0"), _call("userfaultfd", "handle page faults", 323, "0"),
    _call("io-uring", "go round the filter by io_uring", 425, "8, ctypes.create_string_buffer(256)"),
    _call("perf", "watch with perf events", 298, "ctypes.create_string_buffer(128), 0, -1, -1, 0"),
    _call("kexec", "load another kernel", 246, "0, 0, 0, 0"),
    _call("reboot", "halt the machine", 169, "0xfee1dead, 672274793, 0x4321fedc, 0"),
    _call("swapon", "swap on a file", 167, "b'/tmp/x', 0"),
    _call("settimeofday", "set the clock", 164, "ctypes.create_string_buffer(16), 0"),
    _call("iopl", "reach the ports", 172, "3"),
    _call("module", "load a module", 175, "ctypes.create_string_buffer(16), 16, b''"),
    _call("syslog", "read the kernel's log", 103, "3, ctypes.create_string_buffer(64), 64"),
    _call("shm", "keep memory in System V IPC", 29, "0, 1 << 30, 0o1600"),
    _call("memfd", "keep memory in a file without a name", 319, "b'x', 0"),
    _call("memfd-secret", "keep memory that no other may read", 447, "0"),
    Attack("shared-memory", "keep memory that is mapped no more", "refused: EPERM",
           "tries(lambda: __import__('mmap').mmap(-1, 1 << 20))"),
    Attack("dev-zero", "map /dev/zero for that", "refused: EACCES", "tries(lambda: open('/dev/zero', 'r+b'))"),
    Attack("i386", "make a call of the 32-bit table", "ended: SIGSYS | ended: SIGSEGV", """
import mmap
code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
code.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')
start = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
print('succeeded:', start())
""", by_number=True),
    # Other processes
    Attack("ptrace", "trace the first process", "ended: time", "tries(lambda: call(101, 16, 1, 0, 0))",
           by_number=True),
    Attack("kill-all", "kill every process", "refused: ESRCH",
           "tries(lambda: os.kill(-1, signal.SIGKILL))"),
    Attack("signal-parent", "stop what started it", "succeeded",
           "tries(lambda: os.kill(os.getppid(), signal.SIGSTOP))"),
    Attack("processes", "see other processes", "harmless",
           "found = [p for p in os.listdir('/proc') if p.isdigit()]\nprint('harmless' if len(found) < 4 else found)"),
    Attack("daemon", "leave a process behind (double fork, own session)", "harmless", """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print('harmless')
"""),
    # The network
    Attack("network", "connect to the machine", "refused: ECONNREFUSED",
           "tries(lambda: socket.create_connection(('127.0.0.1', PORT), timeout=1))"),
    Attack("internet", "connect to the world", "refused: ENETUNREACH",
           "tries(lambda: socket.create_connection(('192.0.2.1', 80), timeout=1))"),
    Attack("abstract-socket", "connect to a unix socket without a file", "refused: ECONNREFUSED",
           "tries(lambda: socket.socket(socket.AF_UNIX).connect(ABSTRACT))"),
    Attack("vsock", "reach the hypervisor", "refused: ENOSYS", "tries(lambda: socket.socket(40, socket.SOCK_STREAM))"),
    Attack("raw-socket", "send raw packets", "refused: EPERM",
           "tries(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))"),
    # Resources
    Attack("fork-bomb", "start processes without end", "refused: EAGAIN", """
def fork():
    for _ in range(1000):
        if os.fork() == 0:
            time.sleep(60)
tries(fork)
"""),
    Attack("threads", "start threads without end", "bounded: RuntimeError", """
def start():
    for _ in range(1000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
tries(start)
os._exit(0)
"""),
    Attack("memory", "take 4 GB", "bounded: MemoryError", "tries(lambda: bytearray(4 << 30))"),
    Attack("memory-together", "take 400 MB in each of many processes", "ended: memory | ended: SIGKILL", """
for _ in range(10):
    if os.fork() == 0:
        held = bytearray(b'x') * (400 << 20)
        time.sleep(60)
time.sleep(60)
"""),
    Attack("memory-and-files", "fill /tmp, /dev/shm and processes, each by itself within its limit",
           "ended: memory | ended: SIGKILL", """
for folder in '/tmp', '/dev/shm':
    for number in range(60):
        open(f'{folder}/{number}', 'wb').write(bytes(1 << 20))
for size in 400, 400, 130:
    if os.fork() == 0:
        held = bytearray(b'x') * (size << 20)
        time.sleep(60)
time.sleep(60)
"""),
    _fill("fill-tmp", "/tmp"),
    _fill("fill-shm", "/dev/shm"),
    Attack("large-file", "write one large file", "refused: EFBIG", """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tries(lambda: os.posix_fallocate(os.open('/tmp/x', os.O_CREAT | os.O_WRONLY), 0, 1 << 30))
"""),
    Attack("output", "print without end", "ended: OSError", "while True: os.write(1, b'x' * 100000)"),
    Attack("descriptors-many", "open files without end", "refused: EMFILE",
           "tries(lambda: [os.open('/usr', 0) for _ in range(100000)])"),
    Attack("mlock", "hold memory in place", "refused: EPERM | refused: ENOMEM",
           "tries(lambda: call(149, ctypes.create_string_buffer(1 << 20), 1 << 20))", by_number=True),
    Attack("recursion", "recurse without end", "bounded: RecursionError",
           "def again(n): return again(n + 1)\ntries(lambda: again(0))"),
    Attack("stack", "overflow the C stack", "ended: SIGSEGV | ended: RecursionError", """
sys.setrecursionlimit(1 << 30)
class A:
    def __getattr__(self, name): return getattr(self, name + 'x')
A().x
"""),
    Attack("priority", "run before all others", "refused: EACCES | refused: EPERM",
           "tries(lambda: os.setpriority(0, 0, -20))"),
    # Time
    Attack("sleep", "sleep for ever", "ended: time", "time.sleep(600)"),
    Attack("loop", "compute for ever", "ended: time", "while True: pass"),
    Attack("stop", "stop itself", "ended: time",
           "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)"),
    Attack("deaf", "ignore every signal", "ended: time",
           "[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 3, 13, 14, 15, 24)]\ntime.sleep(600)"),
    Attack("linger", "close all output and stay", "ended: time",
           "os.closerange(0, 64)\ntime.sleep(600)"),
]  # fmt: skip
