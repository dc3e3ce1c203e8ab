"""The store on S3: a real server of that protocol (moto's) on this machine."""

import socket
import subprocess
import sys
import time

import pytest

from nanodag.errors import CorruptArtifact, MissingTool, StoreError
from nanodag.host.ports import free_port
from nanodag.run.retention import free, plan
from nanodag.store import Store
from tests.fault.publishing import kill_at_random
from tests.run_records import built, run_record
from tests.store.making import KEY, publish, write_file

BUCKET = "nanodag-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of an S3 server with one bucket."""
    port = free_port()
    log = (tmp_path_factory.mktemp("moto") / "log").open("w")
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in {**keys, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            patch.delenv(name, raising=False)
        deadline = time.monotonic() + 120.0
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", port)) != 0:
                assert time.monotonic() < deadline and process.poll() is None, "moto's server did not come up"
                time.sleep(0.1)
        import s3fs

        s3fs.S3FileSystem().mkdir(BUCKET)
        yield url
    process.kill()
    process.wait()
    log.close()


@pytest.fixture
def store(server, tmp_path):
    return Store(f"s3://{BUCKET}/{tmp_path.name}", local=tmp_path / "here")


def test_what_is_published_is_pulled_only_when_it_is_wanted(store, product, tmp_path):
    assert store.lookup(KEY) is None and store.keys() == [] and store.runs() == []
    made = publish(store, product, records=product)
    elsewhere = Store(store.url, local=tmp_path / "elsewhere")
    assert elsewhere.lookup(KEY) == made and elsewhere.get("aa") == made
    assert not (tmp_path / "elsewhere" / "cache").exists()
    folder = elsewhere.materialize(made)
    assert folder.is_relative_to(tmp_path / "elsewhere")
    assert (folder / "weights").read_bytes() == b"abcdefgh" and (folder / "sub" / "more").read_text() == "x"
    store.write_run(run_record("r"))
    changed = elsewhere.change_run("r", lambda record: record.changed(preset="another"))
    assert changed.preset == "another" and store.read_run("r") == changed


def test_a_copy_gone_bad_is_pulled_again_and_a_bad_original_is_an_error(store, product):
    made = publish(store, product)
    copy = store.materialize(made) / "weights"
    copy.write_bytes(b"abcdefgX")
    assert (store.materialize(made) / "weights").read_bytes() == b"abcdefgh"
    (copy.parent / "more").write_text("not named")
    with pytest.raises(CorruptArtifact, match="names no file files/more"):
        store.materialize(made)
    (copy.parent / "more").unlink()
    write_file(store, f"{made.folder}/files/weights", b"abcdefgX")
    copy.write_bytes(b"abcdefgY")
    with pytest.raises(CorruptArtifact, match="differ from their recorded sha256"):
        store.materialize(made)


def test_random_kills_leave_no_corrupt_read(server, tmp_path):
    told = kill_at_random(f"s3://{BUCKET}/{tmp_path.name}", tmp_path, 6)
    assert told["kills"] == 6 and told["published"] >= 1, told


def test_gc_and_setting_aside_work_without_rename(store, product):
    used, useless = publish(store, product), publish(store, product, "b" * 40)
    store.write_run(run_record("r", stages={"s": built(used)}))
    found = plan(store)
    assert [item.name for item in found.items] == [f"{useless.key}/{useless.attempt}"]
    freed, stayed = free(store, found, settle_s=0)
    assert (freed, stayed) == (9, []) and store.keys() == [KEY]
    store.set_aside(KEY, used.attempt)
    assert store.lookup(KEY) is None


def test_a_bucket_or_server_that_is_not_there_is_one_clear_error(server, product, tmp_path, monkeypatch):
    none = Store("s3://nanodag-none/x", local=tmp_path / "here")
    reads = (none.runs, none.keys, lambda: none.lookup(KEY))
    for ask in (*reads, lambda: none.write_run(run_record("r")), lambda: publish(none, product)):
        with pytest.raises(StoreError, match=r"There is no bucket 'nanodag-none' \(store.url is s3://nanodag-none/x"):
            ask()
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    away = Store(f"s3://{BUCKET}/x", local=tmp_path / "there")
    with pytest.raises(StoreError, match="Look at address, credentials and network"):
        away.lookup(KEY)
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_missing_driver_is_named(tmp_path, monkeypatch):
    import fsspec

    def missing(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with pytest.raises(MissingTool, match=r"pip install 'nanodag\[s3\]'"):
        Store("s3://bucket", local=tmp_path)
