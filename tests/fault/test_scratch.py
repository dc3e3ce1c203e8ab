"""What a killed process leaves among the temporary files goes with the next one; what another one holds stays."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import time

import pytest

from nanodag.host.folders import PREFIX, Scratch

MAKE = "import time; from nanodag.host.folders import Scratch; made = Scratch('logs'); print(made.path, flush=True)"


@pytest.mark.parametrize("age_s", [60, -60])  # so new that the next one may take a minute to start
def test_the_folder_of_a_killed_process_goes_with_the_next_one_and_that_of_a_living_one_stays(ended, tmp_path, age_s):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def start():
        command = [sys.executable, "-c", f"{MAKE}; time.sleep(600)"]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        ended.append(process)
        return process, process.stdout.readline().strip()

    (killed, left), (living, held) = start(), start()
    killed.kill()
    killed.wait()
    for folder in (left, held):
        made = time.time() - age_s
        os.utime(folder, (made, made))
    own = subprocess.run([sys.executable, "-c", MAKE], env=environment, capture_output=True, text=True, check=True)
    assert os.path.isdir(held) and living.poll() is None
    assert os.path.isdir(left) == (age_s < 0), "one that is new may not be locked yet"
    assert own.stdout.startswith(str(tmp_path)) and not os.path.exists(own.stdout.strip())


def test_where_no_folder_can_be_locked_one_is_made_all_the_same_and_none_is_removed(tmp_path, monkeypatch):
    def refused(handle, how):
        raise OSError(errno.EBADF, "as NFS says")

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{PREFIX}logs-x"
    left.mkdir()
    os.utime(left, (0, 0))
    with Scratch("logs") as made:
        assert os.path.isdir(made) and left.is_dir()
    assert not os.path.exists(made)


def test_a_fork_that_drops_a_folder_leaves_it_to_its_maker():
    made = Scratch("logs")
    if (fork := os.fork()) == 0:
        made.cleanup()
        os._exit(0)
    os.waitpid(fork, 0)
    assert made.path.is_dir()
    made.cleanup()
    assert not made.path.exists()
