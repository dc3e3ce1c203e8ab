"""Workers end with whoever asked for them, however that one ended."""

import os
import signal
import subprocess
import sys

import pytest

from nanodag.worker.watchdog import STOP_TIMEOUT
from tests.fault.processes import is_running, wait_until

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
    """An asker, its watchdog's pid, and the pids of the three processes of the worker."""

    def start(*arguments):
        pids_path = tmp_path / "pids"
        command = [sys.executable, "-c", GROUP, str(pids_path), *arguments]
        asker = subprocess.Popen(
            [sys.executable, "-c", ASKER, str(pids_path), *command], stdout=subprocess.PIPE, text=True
        )
        ended.append(asker)
        watchdog = int(asker.stdout.readline())
        wait_until(lambda: pids_path.exists() and len(pids_path.read_text().split()) == 3)
        return asker, watchdog, [int(pid) for pid in pids_path.read_text().split()]

    return start


def test_a_killed_asker_leaves_no_orphan(asked):
    asker, watchdog, pids = asked()
    asker.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in [watchdog, *pids]))


def test_a_watchdog_told_to_end_takes_the_worker_along(asked):
    _, watchdog, pids = asked()
    os.kill(watchdog, signal.SIGTERM)
    wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_killed_watchdog_takes_the_ranks_of_torchrun_along(tmp_path, ended, monkeypatch):
    pids, rank = tmp_path / "pids", tmp_path / "rank.py"
    rank.write_text(RANK)
    monkeypatch.setenv("PIDS", str(pids))
    torchrun = [sys.executable, "-m", "nanodag.train.torchrun", "--standalone", "--nproc_per_node=2", str(rank)]
    asker = subprocess.Popen([sys.executable, "-c", ASKER, str(pids), *torchrun], stdout=subprocess.PIPE, text=True)
    ended.append(asker)
    watchdog = int(asker.stdout.readline())
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    os.kill(watchdog, signal.SIGKILL)
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()), timeout_s=5.0)


def test_a_worker_deaf_to_sigterm_is_killed_after_the_time_that_it_has_to_stop(asked, monkeypatch):
    monkeypatch.setenv(STOP_TIMEOUT, "0.5")
    asker, watchdog, pids = asked("deaf")
    asker.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in [watchdog, *pids]))


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -KILL $$", 137), ("true", 0)])
def test_the_watchdog_passes_on_how_the_command_ended(tmp_path, command, code):
    read_end, write_end = os.pipe()
    watchdog = [sys.executable, "-m", "nanodag.worker.watchdog", str(read_end), str(tmp_path / "usage"), "0"]
    done = subprocess.run([*watchdog, "sh", "-c", command], pass_fds=(read_end,), check=False)
    os.close(read_end)
    os.close(write_end)
    assert done.returncode == code
    assert '"cpu_s"' in (tmp_path / "usage").read_text()
