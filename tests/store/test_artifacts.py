"""Artifacts: whole or not there, found again, verified when read; on a local folder and behind fsspec."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanodag.errors import ArtifactNotFound, CorruptArtifact, StoreBusy, StoreError
from nanodag.store import Store, content_digest, stage_key
from nanodag.store.manifest import canonical_json
from tests.run_records import run_record
from tests.store.making import KEY, forge, publish, read_file, write_file


@pytest.fixture(params=["local", "fsspec folder", "memory"])
def store(request, tmp_path):
    urls = {"local": tmp_path / "s", "fsspec folder": f"local://{tmp_path}/s", "memory": f"memory://{tmp_path.name}"}
    return Store(urls[request.param], local=tmp_path / "here")


def test_what_is_published_is_found_with_equal_bytes(store, product):
    assert store.lookup(KEY) is None
    made = publish(store, product, records=product)
    found = store.lookup(KEY)
    assert found == made and found.metrics == {"loss": 1.5} and found.num_bytes == 9
    folder = store.materialize(found)
    assert (folder / "weights").read_bytes() == b"abcdefgh" and (folder / "sub" / "more").read_text() == "x"
    assert (store.verified(found, "records") / "weights").read_bytes() == b"abcdefgh"
    assert json.loads((folder.parent / "manifest.json").read_text())["key"] == KEY


def test_an_address_for_others_bears_no_login(tmp_path, product):
    made = publish(Store(f"memory://{tmp_path.name}", local=tmp_path / "here"), product)
    for url, root in (
        ("memory://me:secret@host/a@b/", "memory://host/a@b"),
        ("memory://bucket/a", "memory://bucket/a"),
    ):
        assert Store(url, local=tmp_path / "other").address(made) == f"{root}/artifacts/{KEY}/{made.attempt}"
    assert Store(tmp_path / "s").address(made) == f"file://{tmp_path}/s/artifacts/{KEY}/{made.attempt}"


def test_a_second_attempt_counts_and_the_first_stays(store, product):
    first = publish(store, product)
    (product / "weights").write_bytes(b"other")
    second = publish(store, product)
    assert (first.attempt[:4], second.attempt[:4]) == ("0001", "0002")
    assert store.lookup(KEY) == second
    assert (store.materialize(store.attempt(KEY, first.attempt)) / "weights").read_bytes() == b"abcdefgh"


def test_an_attempt_without_manifest_is_half_a_write_and_does_not_count(store, product):
    good = publish(store, product)
    # A writer that was killed before its last act, and one that was killed in it.
    write_file(store, f"artifacts/{KEY}/0002/files/weights", "abc")
    write_file(store, f"artifacts/{KEY}/0003/manifest.json", '{"format": 1, "key":')
    assert store.lookup(KEY) == good
    assert publish(store, product).attempt[:4] == "0004"


def test_a_flipped_byte_is_named_and_a_file_cut_short_means_that_the_attempt_does_not_count(store, product):
    artifact = publish(store, product)
    write_file(store, f"{artifact.folder}/files/weights", "abcdefgX")
    with pytest.raises(CorruptArtifact, match=r"weights .* differ from their recorded sha256 9c56cc51b374"):
        store.materialize(artifact)
    write_file(store, f"{artifact.folder}/files/weights", "abc")
    assert store.lookup(KEY) is None


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "sub/../../x", "./weights", "a//b", "a\\b", ""])
def test_a_manifest_that_names_a_file_outside_is_refused(store, product, name):
    artifact = publish(store, product)

    def rename(raw):
        raw["files"][name] = raw["files"].pop("weights")
        raw["digest"] = content_digest({n: f["sha256"] for n, f in raw["files"].items()})

    forge(store, artifact, rename)
    with pytest.raises(CorruptArtifact, match="lies outside"):
        store.attempt(KEY, artifact.attempt)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.update(digest="0" * 64),
        lambda raw: raw["files"]["weights"].update(sha256="../x"),
        lambda raw: raw["files"]["weights"].update(bytes="8"),
        lambda raw: raw.update(files=[]),
        lambda raw: raw.update(format="1"),
        lambda raw: raw.update(key="b" * 40),
        lambda raw: raw.update(more=1),
    ],
)
def test_a_manifest_that_is_none_does_not_count(store, product, change):
    artifact = publish(store, product)
    forge(store, artifact, change)
    assert store.lookup(KEY) is None
    with pytest.raises(CorruptArtifact):
        store.attempt(KEY, artifact.attempt)


def at_once(count, act, *arguments):
    with ThreadPoolExecutor(count) as pool:
        return [thread.result() for thread in [pool.submit(act, *arguments) for _ in range(count)]]


def test_two_writers_of_one_key_both_publish(store, product):
    made = at_once(2, publish, store, product)
    assert len({artifact.attempt for artifact in made}) == 2
    assert all((store.materialize(artifact) / "weights").read_bytes() == b"abcdefgh" for artifact in made)


def test_a_product_without_files_or_with_a_link_is_refused(store, product, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="no files"):
        publish(store, tmp_path / "empty")
    (product / "link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="is a link"):
        publish(store, product)


def test_runs_are_listed_oldest_first_and_an_unknown_one_names_them(store):
    store.write_run(run_record("first", created=2.0))
    store.write_run(run_record("second", created=1.0))  # the clock was set back meanwhile
    store.write_run(run_record("first", created=2.0))  # begun again: still the older one
    assert store.runs() == ["first", "second"]
    with pytest.raises(ArtifactNotFound, match="first, second"):
        store.read_run("third")
    with pytest.raises(StoreError, match="not a name"):
        store.write_run(run_record("../escape"))


def test_many_editors_of_a_run_lose_no_change(store):
    store.write_run(run_record("r"))

    def add():
        for _ in range(5):
            store.change_run("r", lambda record: record.changed(ended=record.ended + 1))

    at_once(4, add)
    assert store.read_run("r").ended == 20


def test_one_builder_at_a_time_and_its_lock_goes_with_its_holders(store):
    with store.building(KEY) as descriptor:
        child = subprocess.Popen(["sleep", "600"], pass_fds=(descriptor,))
        with pytest.raises(StoreBusy, match="held by another process"):
            with store.building(KEY, timeout_s=0.1):
                pass
    with pytest.raises(StoreBusy):  # the child, such as a worker's watchdog, still holds it
        with store.building(KEY, timeout_s=0.1):
            pass
    child.kill()
    child.wait()
    with store.building(KEY, timeout_s=1.0):
        pass


def test_keys_and_digests_depend_on_every_part_and_not_on_order():
    given = {"kind": "sft", "code_version": 1, "config": {"a": 1, "b": 2}, "inputs": {"model": "x"}}
    key = stage_key(**given)
    assert key == stage_key(**{**given, "config": {"b": 2, "a": 1}})
    for change in ({"kind": "rl"}, {"code_version": 2}, {"config": {"a": 1}}, {"inputs": {"model": "y"}}):
        assert stage_key(**{**given, **change}) != key
    assert content_digest({"a": "1", "b": "2"}) == content_digest({"b": "2", "a": "1"})
    assert content_digest({"a": "1"}) != content_digest({"b": "1"})
    with pytest.raises(ValueError, match="Out of range float"):
        canonical_json({"x": float("nan")})


def test_a_manifest_changed_without_its_seal_does_not_count(store, product):
    artifact = publish(store, product)
    path = f"{artifact.folder}/manifest.json"
    write_file(store, path, read_file(store, path).replace('"loss": 1.5', '"loss": 1.4'))
    assert store.lookup(KEY) is None
    with pytest.raises(CorruptArtifact, match="was changed after it was written"):
        store.attempt(KEY, artifact.attempt)
