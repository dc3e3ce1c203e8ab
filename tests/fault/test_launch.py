"""Workers end with whoever asked for them, however that one ended."""

import os
import signal
import subprocess
import sys

import pytest

from nanodag.worker.watchdog import STOP_TIMEOUT
from tests.fault.processes import alive, is_running, wait_until

GROUP = """
import os, subprocess, sys, time
from pathlib import Path
deaf = "deaf" in sys.argv
if deaf:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
same_group = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
own_session = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
Path(sys.argv[1]).write_text(f"{os.getpid()} {same_group.pid} {own_session.pid}")
time.sleep(600)
"""

ASKER = """
import subprocess, sys, os, time
read_end, write_end = os.pipe()
process = subprocess.Popen([sys.executable, "-m", "nanodag.worker.watchdog", str(read_end), sys.argv[1] + ".usage", "0",
                            *sys.argv[2:]], pass_fds=(read_end,), start_new_session=True)
os.close(read_end)
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def asked(tmp_path, ended):
    """Start an asker of this worker, GROUP if none is given; gives it, its watchdog's pid, and those of the worker's
    processes, once there are so many in the file `pids`."""

    def start(*arguments, command=(), num_pids=3):
        path = tmp_path / "pids"
        worker = command or [sys.executable, "-c", GROUP, str(path), *arguments]
        starts = [sys.executable, "-c", ASKER, str(path), *worker]
        asker = subprocess.Popen(starts, stdout=subprocess.PIPE, text=True)
        ended.append(asker)
        watchdog = int(asker.stdout.readline())
        wait_until(lambda: path.exists() and len(path.read_text().split()) == num_pids)
        return asker, watchdog, [int(pid) for pid in path.read_text().split()]

    return start


@pytest.mark.parametrize("arguments", [(), ("deaf",)])
def test_a_killed_asker_leaves_no_orphan_nor_a_worker_deaf_to_sigterm(asked, arguments, monkeypatch):
    if arguments:
        monkeypatch.setenv(STOP_TIMEOUT, "0.5")
    asker, watchdog, pids = asked(*arguments)
    asker.send_signal(signal.SIGKILL)
    wait_until(lambda: not alive([watchdog, *pids]))


def test_a_watchdog_told_to_end_takes_the_worker_along(asked):
    _, watchdog, pids = asked()
    os.kill(watchdog, signal.SIGTERM)
    wait_until(lambda: not alive(pids))


def test_a_killed_watchdog_takes_the_worker_along(asked):
    _, watchdog, pids = asked()
    os.kill(watchdog, signal.SIGKILL)
    wait_until(lambda: not is_running(pids[0]))
    for pid in pids[1:]:  # what the worker itself started has no watchdog any more
        os.kill(pid, signal.SIGKILL)


RANK = """
import os, sys, time
from nanodag.train.deepspeed_engine import start_ranks
start_ranks("cpu")
open(os.environ["PIDS"], "a").write(f"{os.getpid()}\\n")
time.sleep(60)
"""


def test_a_killed_watchdog_takes_the_ranks_of_torchrun_along(asked, tmp_path, monkeypatch):
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    torchrun = [sys.executable, "-m", "nanodag.train.torchrun", "--standalone", "--nproc_per_node=2"]
    _, watchdog, pids = asked(command=[*torchrun, str(tmp_path / "rank.py")], num_pids=2)
    os.kill(watchdog, signal.SIGKILL)
    wait_until(lambda: not alive(pids), timeout_s=5.0)


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -KILL $$", 137), ("true", 0)])
def test_the_watchdog_passes_on_how_the_command_ended(tmp_path, command, code):
    read_end, write_end = os.pipe()
    watchdog = [sys.executable, "-m", "nanodag.worker.watchdog", str(read_end), str(tmp_path / "usage"), "0"]
    done = subprocess.run([*watchdog, "sh", "-c", command], pass_fds=(read_end,), check=False)
    os.close(read_end)
    os.close(write_end)
    assert done.returncode == code
    assert '"cpu_s"' in (tmp_path / "usage").read_text()
