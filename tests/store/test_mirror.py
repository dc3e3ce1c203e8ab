"""Checkpoints of a stage under way on a remote store: another machine goes on from the newest whole one."""

import logging

import pytest

from nanodag.errors import StoreError
from nanodag.run.retention import free, plan
from nanodag.store import Checkpoints, Store
from nanodag.store.backends import RemoteBackend
from tests.run_records import run_record, stage_record
from tests.store.making import KEY, names_in, save, write_file


@pytest.fixture
def store(tmp_path):
    return Store(f"memory://mirror-{tmp_path.name}", local=tmp_path / "here")


def copies(store):
    return names_in(store, f"checkpoints/{KEY}")


def test_another_machine_goes_on_from_the_newest(store, tmp_path):
    here = Checkpoints(tmp_path / "a")
    with store.mirror(KEY, here.path):
        save(here, 10)
        save(here, 20, "state of 20")
    assert copies(store) == ["step-00000020"]
    there = store.mirror(KEY, tmp_path / "b")
    assert there.restore() == 20
    step, folder = Checkpoints(tmp_path / "b").newest_valid()
    assert (step, (folder / "rank-0" / "state").read_text()) == (20, "state of 20")
    assert there.restore() is None, "what is here already is not brought again"
    there.drop()
    assert copies(store) == [] and store.mirror(KEY, tmp_path / "c").restore() is None


def test_the_first_machine_goes_on_from_what_the_second_left_and_never_removes_it(store, tmp_path):
    first, second = Checkpoints(tmp_path / "a"), Checkpoints(tmp_path / "b")
    save(first, 100)
    store.mirror(KEY, first.path).copy_newest()
    there = store.mirror(KEY, second.path)
    assert there.restore() == 100
    save(second, 900)
    there.copy_newest()
    again = store.mirror(KEY, first.path)
    again.copy_newest()  # before it looks what others left
    assert "step-00000900" in copies(store)
    assert again.restore() == 900 and first.newest_valid()[0] == 900


def test_with_a_checkpoint_here_a_store_that_is_away_is_not_waited_for(store, tmp_path, monkeypatch):
    here = Checkpoints(tmp_path / "a")
    save(here, 100)

    def away(*arguments):
        raise StoreError("away")

    mirror = store.mirror(KEY, here.path)
    monkeypatch.setattr(mirror, "_steps", away)
    assert mirror.restore() is None and here.newest_valid()[0] == 100
    with pytest.raises(StoreError, match="away"):
        other = store.mirror(KEY, tmp_path / "b")
        monkeypatch.setattr(other, "_steps", away)
        other.restore()


def test_a_damaged_or_half_copied_one_gives_way_to_the_one_before(store, tmp_path, caplog):
    here, mirror = Checkpoints(tmp_path / "a"), store.mirror(KEY, tmp_path / "a")
    save(here, 10)
    assert mirror.copy_newest() and not mirror.copy_newest()
    for step, text in ((20, '{"step": 20, "files": {"../../x": {}}}'), (30, "{")):
        write_file(store, f"checkpoints/{KEY}/step-{step:08d}/checkpoint.json", text)
    write_file(store, f"checkpoints/{KEY}/step-00000040/rank-0/state", "half")
    with caplog.at_level(logging.WARNING):
        assert store.mirror(KEY, tmp_path / "b").restore() == 10
    assert "lies outside" in caplog.text and "no readable checkpoint.json" in caplog.text
    write_file(store, f"checkpoints/{KEY}/step-00000010/rank-0/state", "state of 11")
    assert store.mirror(KEY, tmp_path / "c").restore() is None
    assert Checkpoints(tmp_path / "c").newest_valid() is None


def test_a_store_that_is_away_does_not_end_the_stage(store, tmp_path, monkeypatch, caplog):
    here = Checkpoints(tmp_path / "a")
    save(here, 10)

    def away(backend, source, path):
        raise StoreError("the network is away")

    monkeypatch.setattr(RemoteBackend, "push", away)
    with caplog.at_level(logging.WARNING):
        with store.mirror(KEY, here.path):
            pass
    assert "not mirrored: the network is away" in caplog.text and copies(store) == []


def test_gc_takes_copies_that_no_run_goes_on_with(store, tmp_path):
    save(Checkpoints(tmp_path / "a"), 10)
    assert store.mirror(KEY, tmp_path / "a").copy_newest()
    store.write_run(run_record("r", stages={"s": stage_record(key=KEY, state="stopped")}))
    assert plan(store).items == ()
    store.remove_run("r")
    with store.building(KEY):
        _, stayed = free(store, plan(store), settle_s=0)
    assert stayed == [f"checkpoints/{KEY}: somebody is building that key"] and copies(store) != []
    free(store, plan(store), settle_s=0)
    assert copies(store) == []


def test_a_local_store_has_nothing_to_mirror(tmp_path):
    with pytest.raises(StoreError, match="is local"):
        Store(tmp_path / "s").mirror(KEY, tmp_path / "a")
