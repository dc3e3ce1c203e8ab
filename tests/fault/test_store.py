"""The store under fire: whatever happens to a writer or to what it wrote, the right result or one clear error, and no
good artifact is lost or replaced by a bad one."""

import contextlib
import errno
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nanodag.cli.run import bury_the_dead
from nanodag.errors import ArtifactNotFound, CorruptArtifact, NewerFormat, StoreError
from nanodag.run.record import state_of
from nanodag.store import Checkpoints, Store
from nanodag.store.provenance import process_started
from tests.fault.publishing import kill_at_random
from tests.run_records import run_record
from tests.store.making import KEY, forge, product_in, publish, save


@pytest.fixture
def good(store, product):
    return publish(store, product)


def is_whole(store, artifact):
    """It is the one that counts, and its bytes are what they were."""
    return store.lookup(KEY) == artifact and (store.materialize(artifact) / "weights").read_bytes() == b"abcdefgh"


def in_child(body):
    """What `body` returns or raises, as text, called in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = body()
        except (OSError, AssertionError) as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, str(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


def as_ordinary_user(body):
    """`in_child` without root's privilege to write anywhere."""

    def plainly():
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        return body()

    return in_child(plainly)


@pytest.mark.parametrize(
    ("scheme", "num_kills", "least"),
    [("", 20, 1), ("local://", 20, 1), pytest.param("", 500, 101, marks=pytest.mark.slow)],
)
def test_random_kills_and_no_corrupt_read(tmp_path, scheme, num_kills, least):
    told = kill_at_random(f"{scheme}{tmp_path}/s", tmp_path, num_kills)
    assert told["kills"] == num_kills and told["published"] >= least


class Failing:
    """Lets `num_good` calls of functions of `os` through, then has them fail."""

    def __init__(self, monkeypatch, number):
        self.number, self.num_good = number, 10**9
        for name in ("fsync", "rename", "replace", "mkdir"):
            monkeypatch.setattr(os, name, self.wrapped(getattr(os, name)))

    def wrapped(self, function):
        def called(*arguments, **named):
            self.num_good -= 1
            if self.num_good < 0:
                raise OSError(self.number, os.strerror(self.number))
            return function(*arguments, **named)

        return called


def errors_of(failing, act):
    """Have a disk fail at the first call, the second, and so on, until `act` gets through; yields what it raised."""
    for num_good in range(1000):
        failing.num_good = num_good
        try:
            act()
            return
        except StoreError as error:
            said = str(error)
        finally:
            failing.num_good = 10**9
        yield said


def test_a_disk_that_is_full_at_any_point_of_publishing_leaves_what_was_there(store, product, good, monkeypatch):
    (product / "weights").write_bytes(b"ijklmnop")
    num_points = 0
    for error in errors_of(Failing(monkeypatch, errno.ENOSPC), lambda: publish(store, product)):
        num_points += 1
        assert "The disk is full" in error and "nanodag gc" in error
        newest = store.lookup(KEY)
        # Only the last flush, of the folder's name, comes after the artifact has become visible, and it is whole.
        assert newest == good or (store.materialize(newest) / "weights").read_bytes() == b"ijklmnop"
        assert (store.materialize(good) / "weights").read_bytes() == b"abcdefgh"
        assert not list((store.local / "artifacts" / KEY).glob(".*")), "a failed writer cleans up"
    assert num_points > 5


def test_a_file_that_may_not_get_that_large_is_one_clear_error(tmp_path, product):
    (product / "weights").write_bytes(b"x" * 100_000)

    def body():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        publish(Store(tmp_path / "s"), product)

    said = in_child(body)
    assert "Publishing stage sft" in said and "may not get as large" in said
    assert Store(tmp_path / "s").lookup(KEY) is None


def test_a_disk_that_is_full_at_any_point_of_writing_a_record_keeps_the_old_one(store, monkeypatch):
    store.write_run(run_record("r", ended=1.0))
    failing, num_points = Failing(monkeypatch, errno.ENOSPC), 0
    for error in errors_of(failing, lambda: store.change_run("r", lambda record: record.changed(ended=2.0))):
        num_points += 1
        assert "The disk is full" in error
        assert store.read_run("r").ended in (1, 2)
        assert not list((store.local / "runs").glob(".*"))
    assert store.read_run("r").ended == 2 and num_points >= 2


def test_a_disk_that_is_full_at_any_point_of_a_checkpoint_leaves_a_whole_one(tmp_path, monkeypatch):
    checkpoints, num_points = Checkpoints(tmp_path, keep=1), 0

    def save(step):
        (checkpoints.begin(step) / "state").write_text(str(step))
        checkpoints.commit(step)

    save(1)
    for error in errors_of(Failing(monkeypatch, errno.ENOSPC), lambda: save(2)):
        num_points += 1
        assert "The disk is full" in error
        step, folder = checkpoints.newest_valid()
        assert (folder / "state").read_text() == str(step)
    assert checkpoints.newest_valid()[0] == 2 and num_points > 3


def test_a_damaged_newer_checkpoint_does_not_push_out_the_good_one(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (10, 20):
        save(checkpoints, step, str(step))
    (tmp_path / "step-00000020" / "rank-0" / "state").write_text("21")
    assert checkpoints.newest_valid() is None  # so the stage begins again, and saves more often
    save(checkpoints, 15)
    assert checkpoints.newest_valid()[0] == 15
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000015"]


@pytest.fixture
def open_folder():
    """A folder that every user can get to; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_store_is_read_and_refuses_to_be_written(open_folder):
    store, product = Store(open_folder / "s"), product_in(open_folder / "product")
    good = publish(store, product)
    store.write_run(run_record("r", ended=1.0))
    for path in [store.local, *store.local.rglob("*")]:
        if path.is_dir():
            path.chmod(0o555)
    assert as_ordinary_user(lambda: is_whole(Store(store.local), good)) == "True"
    assert as_ordinary_user(lambda: Store(store.local).read_run("r").ended) == "1.0"
    for act in (
        lambda: publish(Store(store.local), product),
        lambda: Store(store.local).write_run(run_record("r", ended=2.0)),
        lambda: Store(store.local).change_run("r", lambda record: record.changed(ended=2.0)),
        lambda: Store(store.local).workspace(KEY),
    ):
        said = as_ordinary_user(act)
        assert said.startswith("StoreError: ") and "may not write there" in said, said
    assert is_whole(store, good) and store.read_run("r").ended == 1


def test_a_clock_that_goes_back_makes_no_older_attempt_the_newest(store, product, good, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    (product / "weights").write_bytes(b"ijklmnop")
    second = publish(store, product)
    assert second.created == 1000.0 < good.created
    assert store.lookup(KEY) == second
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert publish(store, product).attempt == "0003"
    monkeypatch.undo()
    assert store.lookup(KEY).attempt == "0003"
    assert publish(store, product).attempt == store.lookup(KEY).attempt == "0004"


def test_a_deleted_artifact_is_not_there_and_says_so(store, product, good):
    shutil.rmtree(store.local / good.folder)
    assert store.lookup(KEY) is None
    with pytest.raises(ArtifactNotFound, match="no attempt 0001"):
        store.attempt(KEY, "0001")
    with pytest.raises(CorruptArtifact, match="is missing"):
        store.materialize(good)  # somebody who had looked it up before
    again = publish(store, product)
    assert again.digest == good.digest and is_whole(store, again)


@pytest.mark.parametrize("damage", ["truncated", "deleted", "grown", "a link", "a folder"])
@pytest.mark.parametrize("name", ["weights", "sub/more"])
def test_a_damaged_file_gives_way_to_the_attempt_before(store, product, good, damage, name):
    second = publish(store, product)
    path = store.local / second.folder / "files" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[:-1])
    elif damage == "grown":
        path.write_bytes(content + b"x")
    elif damage == "a link":  # to the very same bytes: they could change
        path.symlink_to(store.local / good.folder / "files" / name)
    elif damage == "a folder":
        path.mkdir()
    assert is_whole(store, good)
    with pytest.raises(CorruptArtifact, match=f"files/{name}"):
        store.attempt(KEY, second.attempt)
    with pytest.raises(CorruptArtifact):
        store.materialize(second)


def test_any_flipped_bit_of_a_manifest_is_found(store, good):
    path = store.local / good.folder / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        path.write_bytes(bytes(flipped))
        with contextlib.suppress(NewerFormat):  # where the digit of the format becomes a higher one
            assert store.lookup(KEY) is None, f"byte {place}, {content[place : place + 1]} is now {flipped[place]}"
    path.write_bytes(content)
    assert is_whole(store, good)


def test_any_flipped_bit_of_a_file_is_found(store, good):
    path = store.local / good.folder / "files" / "weights"
    path.chmod(0o644)
    for bit in range(8 * 8):
        flipped = bytearray(b"abcdefgh")
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(bytes(flipped))
        with pytest.raises(CorruptArtifact, match="nanodag verify aaaaaaaaaaaa --set-aside"):
            store.materialize(good)


def test_a_manifest_of_a_newer_format_is_neither_read_nor_built_over(store, product, good):
    newer = publish(store, product)
    forge(store, newer, lambda raw: raw.update(format=2, shape="of things to come"))
    assert store.lookup(KEY) == good, "an older attempt in a format that is known still counts"
    forge(store, good, lambda raw: raw.update(format=2))
    with pytest.raises(NewerFormat, match="has format 2; this nanodag reads up to 1: update it"):
        store.lookup(KEY)
    forced = publish(store, product)
    assert forced.attempt == "0003" and is_whole(store, forced)


def test_a_product_that_changes_while_it_is_published_is_not(store, product, good, monkeypatch):
    import nanodag.store.atomic as atomic

    copy = atomic.copy_hashed

    def meddled(source, target):
        if source.name == "weights":
            source.write_bytes(b"meddled!")
        return copy(source, target)

    monkeypatch.setattr(atomic, "copy_hashed", meddled)
    with pytest.raises(StoreError, match="changed while it was published"):
        publish(store, product)
    assert is_whole(store, good)


def test_a_clock_that_jumps_lets_no_run_that_is_alive_look_dead(monkeypatch):
    record = run_record("r", state="running", pid=os.getpid(), pid_started=process_started(psutil.Process()))
    boot_time = psutil.boot_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time - 3600.0)  # what the kernel says when the clock is set
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time - 3600.0)
    assert record.is_alive
    assert not record.changed(pid_started=record.pid_started - 10.0).is_alive


def test_a_run_that_another_machine_executes_is_not_called_interrupted(store):
    here = run_record("r", state="running")  # its process is gone
    there = here.changed(host="node2")
    assert state_of(here) == "interrupted" and state_of(there) == "running" and not there.is_alive
    store.write_run(there)
    bury_the_dead(None, store)
    assert store.read_run("r").state == "running"


def test_a_run_that_lives_again_by_the_time_is_not_buried(store, monkeypatch):
    dead = run_record("r", state="running", flow_run="f")
    alive = dead.changed(pid=os.getpid(), pid_started=process_started(psutil.Process()))
    store.write_run(dead)
    monkeypatch.setattr(store, "records_of_runs", lambda: {"r": dead})
    store.write_run(alive)
    told = []
    api = SimpleNamespace(run_state=lambda flow_run: {"type": "RUNNING"}, set_state=lambda *state: told.append(state))
    bury_the_dead(api, store)
    assert (store.read_run("r").state, told) == ("running", [])
    store.write_run(dead)
    for state, wanted in (("PENDING", 0), ("RUNNING", 1)):  # one that waits was resumed in the UI
        store.write_run(dead)
        api.run_state = lambda flow_run, state=state: {"type": state}
        bury_the_dead(api, store)
        assert len(told) == wanted
