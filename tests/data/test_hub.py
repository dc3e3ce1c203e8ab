import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanodag.data import hub
from nanodag.data.hub import HubSource
from nanodag.data.opening import open_source
from nanodag.data.urls import parse_url
from nanodag.errors import SourceError
from tests.data.fake_hub import fake_hub, parquet

ROWS = [{"question": f"{i}?", "answer": f"so #### {i}"} for i in range(5)]


@pytest.fixture
def mirror(tmp_path):
    folder = tmp_path / "mirror" / "openai" / "gsm8k" / "main"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[:2]), folder / "test-00000-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[2:3]), folder / "test-00001-of-00002.parquet")
    return tmp_path / "mirror"


def test_a_mirror_stands_for_the_hub_and_content_is_its_identity(mirror):
    assert [row for _, row in open_source("hub:openai/gsm8k/main", mirror).rows()] == ROWS
    assert [row for _, row in open_source("hub:openai/gsm8k/main:test", mirror).rows()] == ROWS[:3]
    assert open_source("hub:openai/gsm8k/main:train[1:3]", mirror).length() == 2
    train, test = (open_source(f"hub:openai/gsm8k/main:{split}", mirror).identity() for split in ("train", "test"))
    assert train["name"] == "openai/gsm8k"
    assert train["files"] != test["files"]  # their content


@pytest.mark.parametrize(("url", "words"), [
    ("hub:openai/gsm8k:train", r"no .*openai/gsm8k/default/train\.parquet.*it has main/test-.*main/train\.parquet"),
    ("hub:openai/gsm8k/main:validation", r"main/validation\.parquet"),
    ("hub:openai/gsm9k/main", r"nothing of openai/gsm9k; it has openai/gsm8k"),
])  # fmt: skip
def test_what_a_mirror_lacks_is_an_error_that_says_what_it_has(mirror, url, words):
    with pytest.raises(SourceError, match=words):
        open_source(url, mirror)
    with pytest.raises(SourceError, match="nowhere is not a folder"):
        open_source(url, mirror / "nowhere")


class LocalHub(HubSource):
    """A hub source whose data set lies in a local folder, which the datasets library streams the same way."""

    def __init__(self, folder, split="train"):
        super().__init__(parse_url("hub:some/name@" + "0" * 40))
        self._path = type(self._path)(str(folder), "0" * 40, "", split)


def test_a_small_data_set_is_fetched_whole_and_has_blocks_and_a_large_one_has_shards(tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "train-0.parquet", row_group_size=2)
    pq.write_table(pa.Table.from_pylist(ROWS[:1]), tmp_path / "train-1.parquet")
    source = LocalHub(tmp_path)
    assert [block.num_rows for block in source.blocks()] == [2, 2, 1, 1]
    assert source.shards() is None
    assert source.length() == 6
    assert list(source.read(1)) == ROWS[2:4]
    assert source.identity()["commit"] == "0" * 40
    monkeypatch.setattr(hub, "_FEW_BYTES", 1)
    source = LocalHub(tmp_path)
    assert source.blocks() is None
    assert [[row for _, row in shard.open().rows()] for shard in source.shards()] == [ROWS, ROWS[:1]]
    assert [[row for _, row in part.rows()] for part in source.apart()] == [ROWS, ROWS[:1]]


def test_rows_are_streamed_by_index_and_shard_and_a_split_that_is_not_there_is_refused(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "train.parquet")
    source = LocalHub(tmp_path)
    assert list(source.rows()) == list(enumerate(ROWS))
    assert list(source.rows(start=1, shard=0, num_shards=2)) == [(2, ROWS[2]), (4, ROWS[4])]
    source = LocalHub(tmp_path, split="nonsense")
    with pytest.raises(SourceError, match="cannot be read from the hub"):
        list(source.rows())


def test_what_is_no_parquet_has_neither_blocks_nor_a_last_shard(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    source = LocalHub(tmp_path)
    assert (source.blocks(), source.shards()) == (None, None)
    assert list(source.rows()) == [(0, {"text": "a"})]
    assert source.apart() is None


def test_without_network_the_commit_is_an_error_not_a_guess():
    code = "from nanodag.data.opening import open_source; open_source('hub:openai/gsm8k/main').identity()"
    nobody_there = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=nobody_there)
    assert "does not say which commit openai/gsm8k is at" in ended.stderr
    assert "or set a mirror" in ended.stderr


READ_TWICE = """
import json, sys
from itertools import islice
from nanodag.data import hub
from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
hub._FEW_BYTES = 1
def open_mixture(**options):
    sources = [SourceConfig(url="hub:some/name", held_out="last_shard")]
    return Mixture(sources, kind="document", seed=1, once=True, **options)
found = {"held_out": [drawn.record["text"] for drawn in open_mixture(part="held_out")]}
for rank in (0, 1):
    first, again = open_mixture(rank=rank, world=2), open_mixture(rank=rank, world=2)
    texts = [drawn.record["text"] for drawn in islice(first, 6)]
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found[rank] = texts + [drawn.record["text"] for drawn in again]
print(json.dumps(found))
"""


def test_over_the_network_each_file_is_sent_once_to_one_rank_and_to_no_restart(tmp_path):
    texts = [[f"document {number}-{row}" for row in range(4)] for number in range(5)]
    files = {f"shard_{number}.parquet": parquet(rows) for number, rows in enumerate(texts)}
    with fake_hub(files | {"README.md": b"---\nlicense: mit\n---\n"}) as (url, sent):
        environment = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        code = [sys.executable, "-c", READ_TWICE]
        ended = subprocess.run(code, capture_output=True, text=True, env={**os.environ, **environment})
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["held_out"] and sorted(found["held_out"]) == texts[4]
    assert sorted(found["0"] + found["1"]) == [text for rows in texts[:4] for text in rows]
    assert sorted(name for name in sent if name != "README.md") == sorted(files)
