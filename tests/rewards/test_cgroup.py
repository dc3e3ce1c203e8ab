"""A cgroup for the processes of one program, in a folder that stands for the kernel's: no machine of ours lets us."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanodag.rewards import cgroup

KERNELS_FILES = ["cgroup.kill", "cgroup.procs", "memory.max", "memory.oom.group", "pids.max"]


@pytest.mark.parametrize(("membership", "on", "above"), [
    ("0::/system.slice/cron.service\n", "cpu memory pids", "system.slice"),
    ("4:memory:/x\n0::/user.slice/a.scope\n", "memory pids", "user.slice"),
    ("0::/\n", "memory pids", "."), ("0::/system.slice/cron.service\n", "cpu pids", None),
    ("4:memory:/x\n", "memory pids", None),
])  # fmt: skip
def test_programs_get_a_cgroup_beside_their_starters_where_it_can_bound_them(tmp_path, membership, on, above):
    for name in ("system.slice", "user.slice", "."):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "cgroup.subtree_control").write_text(on)
    wanted = None if above is None else tmp_path / above
    assert cgroup.candidate(tmp_path, membership) == wanted


@pytest.fixture
def a_slice(tmp_path, monkeypatch):
    """A folder for /sys/fs/cgroup with this process in a.slice/own. The kernel's part is played here: it makes a
    group's files, and lets a group go once all of it was killed."""
    made = tmp_path / "a.slice"
    (made / "own").mkdir(parents=True)
    (made / "cgroup.subtree_control").write_text("cpu memory pids")
    (made / "cgroup.procs").touch()

    def make(path):
        os.mkdir(path)
        for name in (*KERNELS_FILES, "memory.swap.max"):
            (path / name).touch()

    def remove(path):
        if (path / "cgroup.kill").read_text() != "1":
            raise OSError(errno.EBUSY, "Device or resource busy")
        shutil.rmtree(path)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    (tmp_path / "membership").write_text("0::/a.slice/own\n")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
    cgroup.parent.cache_clear()
    yield made
    cgroup.parent.cache_clear()


def failing(number):
    """A function of a path that fails as the kernel does."""

    def fails(path):
        raise OSError(number, os.strerror(number))

    return fails


def groups_in(folder):
    return [path.name for path in folder.glob("nanodag-*")]


def test_a_process_joins_the_group_that_bounds_it(a_slice):
    with cgroup.group(max_bytes=1 << 20, max_processes=3) as made:
        subprocess.run([sys.executable, "-c", ""], preexec_fn=made, check=True)
        (path,) = a_slice.glob("nanodag-*")
        found = {file.name: file.read_text() for file in path.iterdir()}
    wanted = {"memory.max": str(1 << 20), "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "3"}
    assert found == wanted | {"cgroup.procs": "0", "cgroup.kill": ""}
    assert groups_in(a_slice) == []
    assert cgroup.in_force() == f"cgroups in {a_slice}"


def test_a_group_is_killed_and_removed_when_its_program_fails(a_slice):
    with pytest.raises(KeyError), cgroup.group(max_bytes=1, max_processes=1):
        assert len(groups_in(a_slice)) == 1
        raise KeyError
    assert groups_in(a_slice) == []


def test_empty_groups_that_killed_starters_left_are_removed_at_the_next_start(a_slice):
    for name, killed, age_s in (("left", "1", 3600), ("in-use", "", 3600), ("just-made", "1", 0)):
        (a_slice / f"nanodag-{name}").mkdir()
        (a_slice / f"nanodag-{name}" / "cgroup.kill").write_text(killed)
        os.utime(a_slice / f"nanodag-{name}", (time.time() - age_s,) * 2)
    assert cgroup.parent() == a_slice
    assert set(groups_in(a_slice)) == {"nanodag-in-use", "nanodag-just-made"}


def test_a_group_whose_processes_take_a_moment_to_end_is_removed_then(a_slice, monkeypatch):
    looks, remove = [], Path.rmdir

    def busy(path):
        looks.append(path)
        (failing(errno.EBUSY) if len(looks) < 4 else remove)(path)

    assert cgroup.parent() == a_slice
    monkeypatch.setattr(Path, "rmdir", busy)
    with cgroup.group(max_bytes=1, max_processes=1):
        pass
    assert len(looks) == 4 and groups_in(a_slice) == []


def test_a_group_that_cannot_be_removed_is_named(a_slice, monkeypatch, caplog):
    assert cgroup.parent() == a_slice
    monkeypatch.setattr(Path, "rmdir", failing(errno.EBUSY))
    monkeypatch.setattr(cgroup, "END_TIMEOUT_S", 0.01)
    with caplog.at_level(logging.WARNING), cgroup.group(max_bytes=1, max_processes=1):
        (path,) = a_slice.glob("nanodag-*")
    assert f"The cgroup {path} cannot be removed: [Errno 16] Device or resource busy." in caplog.text


def test_what_bounds_programs_where_no_cgroup_can_be_made_is_said(a_slice, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", failing(errno.EROFS))
    with cgroup.group(max_bytes=1, max_processes=1) as made:
        assert made is None
    assert cgroup.in_force() == "limits of each process and a watch, as no cgroup can be made"


@pytest.mark.parametrize("missing", ["memory.max", "pids.max", "cgroup.kill", "a.slice/cgroup.procs"])
def test_no_cgroup_is_used_that_cannot_bound_kill_or_take_a_process(a_slice, monkeypatch, missing):
    """An older kernel has no cgroup.kill; who may not write the slice's cgroup.procs cannot move a process into it."""
    (a_slice.parent / missing).unlink(missing_ok=True)
    make = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda path: (make(path), (path / missing).unlink(missing_ok=True)))
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    assert cgroup.parent() is None and groups_in(a_slice) == []


def test_a_cgroup_that_cannot_be_made_any_more_does_not_stop_a_program(a_slice, monkeypatch, caplog):
    assert cgroup.parent() == a_slice
    monkeypatch.setattr(Path, "mkdir", failing(errno.EAGAIN))
    with caplog.at_level(logging.WARNING), cgroup.group(max_bytes=1, max_processes=1) as made:
        assert made is None
    assert f"No cgroup can be made in {a_slice}: [Errno 11] Resource temporarily unavailable" in caplog.text
