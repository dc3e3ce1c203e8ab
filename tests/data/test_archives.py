"""A zip by its URL: fetched once, held to its first content, from a mirror, and what a hostile one may do."""

import io
import shutil
import stat
import zipfile

import pytest

from nanodag.data import archives, digests
from nanodag.data.core_tasks import TASKS, find_files
from nanodag.data.opening import open_source
from nanodag.errors import SourceError
from nanodag.host.folders import cache_folder
from tests.core_bundle import write_archive, write_bundle
from tests.http_server import Quiet, serving

ROW, OTHER = b'{"text": "a row"}\n', b'{"text": "another"}\n'


def zipped(*entries):
    """entries: (name or ZipInfo, content)."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in entries:
            archive.writestr(entry, content)
    return stream.getvalue()


@pytest.fixture
def web():
    """Its address, the files that it serves, and how often each was sent."""
    files, sent = {}, []

    class Web(Quiet):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            content = files.get(self.path, b"")
            self.send_response(200 if self.path in files else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
                sent.append(self.path)

    with serving(Web) as address:
        yield address, files, sent


def texts_of(url, mirror=None):
    return [row["text"] for _, row in open_source(url, mirror).rows()]


def as_another_process():
    digests._remembered.cache_clear()


def test_an_archive_is_fetched_once_and_its_rows_are_those_of_its_files_by_name(web):
    address, files, sent = web
    files["/a/data.zip"] = zipped(("b/2.jsonl", OTHER), ("a/1.jsonl", ROW * 2), ("readme.txt", b"no row"))
    url = f"{address}/a/data.zip"
    assert texts_of(url) == ["a row", "a row", "another"]
    shutil.rmtree(cache_folder() / "shards")  # which is bounded
    assert texts_of(f"{url}[1:3]") == ["a row", "another"]
    assert sent == ["/a/data.zip"]
    with pytest.raises(SourceError, match=r"other\.zip cannot be fetched into .* Check the network"):
        open_source(f"{address}/other.zip")


def test_its_identity_is_that_of_the_same_files_in_a_folder(web, tmp_path):
    address, files, _ = web
    files["/x.zip"] = zipped(("x/a/1.jsonl", ROW), ("x/b/2.jsonl", OTHER))
    for name, row in (("a/1", ROW), ("b/2", OTHER)):
        path = tmp_path / "folder" / f"{name}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_bytes(row)
    assert open_source(f"{address}/x.zip").identity() == open_source(f"file:{tmp_path}/folder/**/*.jsonl").identity()


def test_other_content_than_the_first_is_refused_with_both_digests_until_the_first_comes_back(web):
    address, files, _ = web
    first, then = zipped(("1.jsonl", ROW)), zipped(("1.jsonl", OTHER))
    files["/x.zip"] = first
    url = f"{address}/x.zip"
    assert texts_of(url) == ["a row"]
    shutil.rmtree(cache_folder() / "archives")
    shutil.rmtree(cache_folder() / "shards")
    files["/x.zip"] = then
    for _ in range(2):
        as_another_process()
        with pytest.raises(SourceError, match=r"its sha256 is \w{64}, and was \w{64} .*digests\.jsonl"):
            texts_of(url)
    files["/x.zip"] = first
    assert texts_of(url) == ["a row"]


def test_a_page_in_the_place_of_an_archive_is_refused_and_not_kept(web):
    address, files, _ = web
    files["/x.zip"] = b"<html>Please log in"
    with pytest.raises(SourceError, match="File is not a zip file"):
        texts_of(f"{address}/x.zip")
    files["/x.zip"] = zipped(("1.jsonl", ROW))
    assert texts_of(f"{address}/x.zip") == ["a row"]


def test_a_mirror_serves_it_by_host_and_path_and_nothing_is_asked_of_the_web(tmp_path):
    url, place = "https://data.example.org/sets/x.zip", tmp_path / "data.example.org" / "sets" / "x.zip"
    with pytest.raises(SourceError, match=rf"'{url}' cannot be taken, as {place}: .*No such file"):
        texts_of(url, tmp_path)
    place.parent.mkdir(parents=True)
    place.write_bytes(zipped(("1.jsonl", ROW)))
    assert texts_of(url, tmp_path) == ["a row"]
    assert place.exists()


def link():
    entry = zipfile.ZipInfo("1.jsonl")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


def packed_otherwise():
    entry = zipfile.ZipInfo("1.jsonl")
    entry.compress_type = zipfile.ZIP_LZMA
    return entry


@pytest.mark.parametrize(("entries", "why"), [
    ([("../../out.jsonl", ROW)], r"'\.\./\.\./out\.jsonl' is no plain file inside"),
    ([("/out.jsonl", ROW)], "'/out.jsonl' is no plain file inside"),
    ([(link(), b"/etc/passwd")], "is no plain file inside"),
    ([(packed_otherwise(), ROW)], "is no plain file inside"),
    ([("1.jsonl", ROW), ("2.jsonl", b"0" * 2000)], "it holds more than 3 files, or 2.0 kB unpacked"),
    ([(f"{number}.jsonl", ROW) for number in range(4)], "it holds more than 3 files"),
], ids=["way up", "absolute", "link", "packing", "bytes", "files"])  # fmt: skip
def test_a_hostile_archive_is_refused_and_leaves_nothing(entries, why, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MOST_BYTES", 2000)
    monkeypatch.setattr(archives, "MOST_FILES", 3)
    mirror = tmp_path / "mirror"
    (mirror / "host").mkdir(parents=True)
    (mirror / "host" / "x.zip").write_bytes(zipped(*entries))
    with pytest.raises(SourceError, match=why):
        open_source("https://host/x.zip", mirror)
    assert not list((cache_folder() / "archives" / "host").iterdir())
    assert not list(tmp_path.rglob("out.jsonl"))


def test_an_entry_that_holds_more_than_it_states_is_not_read_to_its_end(tmp_path):
    content = zipped(("1.jsonl", b"0" * 100_000))
    stated = (100_000).to_bytes(4, "little")
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "x.zip").write_bytes(content.replace(stated, (10).to_bytes(4, "little")))
    with pytest.raises(SourceError, match="Bad CRC-32"):
        open_source("https://host/x.zip", tmp_path)


def test_cores_files_are_found_in_an_archive_as_in_a_folder(tmp_path):
    write_archive(tmp_path / "mirror" / "host" / "eval_bundle.zip")
    found = find_files("https://host/eval_bundle.zip", tmp_path / "mirror")
    in_folder = find_files(f"file:{write_bundle(tmp_path / 'folder')}/*/*.jsonl")
    assert found.keys() == in_folder.keys() == {task.file for task in TASKS}
    assert all(found[name].read_bytes() == in_folder[name].read_bytes() for name in found)
