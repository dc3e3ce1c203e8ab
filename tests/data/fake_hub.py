"""The hub as huggingface_hub speaks to it, with one data set, and what was asked of it."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.parquet as pq

from tests.http_server import Quiet, serving

NAME, COMMIT = "some/name", "a" * 40


def parquet(texts: list[str]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), stream)
    return stream.getvalue()


@contextmanager
def fake_hub(files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the names of the files that were sent, in order."""
    sent: list[str] = []
    entries = [{"type": "file", "path": name, "size": len(content), "oid": "b" * 40} for name, content in files.items()]
    about = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files], "tags": []}

    class Hub(Quiet):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlparse(self.path).path
            name = path.removeprefix(f"/datasets/{NAME}/resolve/{COMMIT}/")
            if name in files:
                self.send_file(name)
            elif path == f"/api/datasets/{NAME}/tree/{COMMIT}":
                self.answer(entries)
            elif path in (f"/api/datasets/{NAME}", f"/api/datasets/{NAME}/revision/{COMMIT}"):
                self.answer(about)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def send_file(self, name: str) -> None:
            content = files[name]
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, end = (int(part[1]), int(part[2]) + 1) if part else (0, len(content))
            self.send_response(206 if part else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{name}"')
            self.send_header("Content-Length", str(len(content[start:end])))
            if part:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content[start:end])
                sent.append(name)

    with serving(Hub) as url:
        yield url, sent
