"""Large data sets on the hub: what each rank fetches and gives, and what a restart does."""

import json
import os
import threading
import time
from collections import Counter
from itertools import islice

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from nanodag.data import hub, shards, shuffle
from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.data.opening import open_source
from nanodag.data.shards import RemoteFile, ShardedSource, make_room
from nanodag.data.shuffle import RowOrder
from nanodag.errors import SourceError
from nanodag.train.batches import TokenBatches

FILES, ROWS = 6, 10
TEXTS = [[f"document {number}-{row}" for row in range(ROWS)] for number in range(FILES)]
ALL = sorted(text for texts in TEXTS for text in texts)


class CountedFiles(MemoryFileSystem):
    """A file system that says what was fetched from it, by name. slow_s: of one file. dead: how often the line goes."""

    protocol = "counted"
    store = {}  # noqa: RUF012 - fsspec's own
    pseudo_dirs = [""]  # noqa: RUF012
    fetched = Counter()  # noqa: RUF012
    slow_s = 0.0
    dead = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def get_file(self, rpath, lpath, *args, **options):
        if CountedFiles.dead:
            CountedFiles.dead -= 1
            raise ConnectionError("the line is dead")
        self.fetched[rpath.strip("/").removesuffix(".parquet")] += 1
        time.sleep(self.slow_s)
        super().get_file(rpath, lpath, *args, **options)


fsspec.register_implementation("counted", CountedFiles, clobber=True)


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    CountedFiles.store.clear()
    CountedFiles.fetched.clear()
    monkeypatch.setattr(CountedFiles, "slow_s", 0.0)
    monkeypatch.setattr(CountedFiles, "dead", 0)
    return CountedFiles


@pytest.fixture
def large(counted, monkeypatch):
    """A data set on the hub: six files of ten rows, in row groups of three."""
    found = []
    for number, texts in enumerate(TEXTS):
        with counted().open(f"/{number}.parquet", "wb") as stream:
            pq.write_table(pa.table({"text": texts}), stream, row_group_size=3)
        found.append(RemoteFile(f"counted://{number}.parquet", counted().size(f"/{number}.parquet")))
    monkeypatch.setattr(hub, "open_hub", lambda url, mirror: ShardedSource(found))
    return found


def order_of(large, **options):
    return RowOrder(ShardedSource(large), seed=5, **options)


def one_pass(order):
    return list(iter(order.next_row, None))


def texts_of(rows):
    return [row["text"] for _, _, row in rows]


def test_more_ranks_than_shards_have_every_row_once_between_them(large):
    assert sorted(text for rank in range(8) for text in texts_of(one_pass(order_of(large, rank=rank, world=8)))) == ALL


def test_rows_and_shards_are_shuffled_anew_in_each_pass_and_numbers_say_where_a_row_is(large):
    order = order_of(large)
    first, second = one_pass(order), one_pass(order)
    assert sorted(texts_of(first)) == sorted(texts_of(second)) == ALL
    assert texts_of(first) != ALL
    assert texts_of(first) != texts_of(second)
    assert [text for _, text in sorted((n, row["text"]) for _, n, row in second)] == ALL
    assert {n: row["text"] for _, n, row in second}[3 * shards.ROWS_OF_A_SHARD + 4] == "document 3-4"


def test_a_restart_fetches_nothing_again_and_on_a_new_machine_nothing_from_the_front(large, counted, tmp_path):
    whole = order_of(large, rank=1, world=2)
    rows = one_pass(whole) + one_pass(whole)
    for stop in range(len(rows) + 1):
        order = order_of(large, rank=1, world=2)
        assert list(islice(_endless(order), stop)) == rows[:stop]
        state = json.loads(json.dumps(order.state_dict()))
        again = order_of(large, rank=1, world=2)
        again.load_state_dict(state)
        assert again.passes() == order.passes()
        assert list(islice(_endless(again), len(rows) - stop)) == rows[stop:]
    _let_threads_end()
    assert set(counted.fetched.values()) == {1}
    for taken, num_fetched in ((4, 2), (10, 1)):  # the shard under way and the last of three; only the last
        for path in (tmp_path / "cache" / "shards").iterdir():
            path.unlink()
        counted.fetched.clear()
        again = order_of(large, rank=1, world=2)
        again.load_state_dict({"epoch": 1, "shard": 1, "taken": taken, "rows_of_shard": 10, "window_start": 0})
        again.next_row()
        _let_threads_end()
        assert len(counted.fetched) == num_fetched


def _endless(order):
    while True:
        if (row := order.next_row()) is not None:
            yield row


def _let_threads_end():
    for thread in threading.enumerate():
        if thread.name == "shard-ahead":
            thread.join()


def test_the_next_shard_is_fetched_while_this_one_is_read(large, counted):
    order = order_of(large, shuffle=False)
    order.next_row()
    _let_threads_end()
    assert list(counted.fetched) == ["0", "1"]
    one_pass(order)
    assert list(counted.fetched) == list("012345")


def test_a_fraction_of_a_pass_over_shards_of_unknown_length_is_that_share_of_them(large):
    source = SourceConfig(url="hub:a/large", epochs=1.5)
    other = SourceConfig(url="hub:a/other", epochs=0.5)
    found = [
        Counter(d.source for d in Mixture([source, other], kind="document", seed=1, rank=r, world=2)) for r in (0, 1)
    ]
    assert found[0] + found[1] == {0: 90, 1: 30}


def test_a_last_shard_that_is_held_out_is_all_that_validation_opens_and_what_training_never_does(large, counted):
    sources = [SourceConfig(url="hub:a/large", held_out="last_shard")]
    training = Mixture(sources, kind="document", seed=1, once=True)
    assert sorted(drawn.record["text"] for drawn in training) == ALL[:50]
    assert set(counted.fetched) == set("01234")
    counted.fetched.clear()
    held_out = Mixture(sources, kind="document", seed=1, once=True, part="held_out", shuffle=False)
    assert [drawn.record["text"] for drawn in held_out] == TEXTS[5]
    assert set(counted.fetched) == {"5"}


def test_of_files_the_last_is_held_out_of_one_file_its_last_row_group_and_of_less_nothing(tmp_path):
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), tmp_path / "1.parquet", row_group_size=2)
    one = SourceConfig(url=f"file:{tmp_path}/*.parquet", held_out="last_shard")
    assert _parts(one) == (["a", "b"], ["c"])
    pq.write_table(pa.table({"text": ["d", "e"]}), tmp_path / "2.parquet", row_group_size=1)
    assert _parts(one) == (["a", "b", "c"], ["d", "e"])
    (tmp_path / "1.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    alone = SourceConfig(url=f"file:{tmp_path}/1.jsonl", held_out="last_shard")
    with pytest.raises(SourceError, match=r"1\.jsonl: held_out: last_shard needs .* as a fraction"):
        _parts(alone)


def _parts(source):
    parts = [
        Mixture([source], kind="document", seed=1, once=True, shuffle=False, part=p) for p in ("train", "held_out")
    ]
    return tuple([drawn.record["text"] for drawn in part] for part in parts)


def test_batches_over_shards_go_on_to_the_byte(large, tokenizer_path):
    def make():
        sources = [SourceConfig(url="hub:a/large", held_out="last_shard", weight=1)]
        settings = {"batch_rows": 1, "sequence_length": 16, "seed": 3, "window_pieces": 4, "window_rows": 4}
        return TokenBatches(sources, tokenizer_path=tokenizer_path, kind="document", rank=1, world=2, **settings)

    whole = [batch.input_ids.tolist() for batch in islice(make(), 40)]
    for stop in (0, 1, 13, 26):
        first, second = make(), make()
        list(islice(first, stop))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [batch.input_ids.tolist() for batch in islice(second, 40 - stop)] == whole[stop:]


def test_what_was_used_longest_ago_makes_room_and_what_is_open_stays_readable(large, counted, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "shards"
    opened = [shard.open() for shard in large[:3]]
    for age, path in enumerate(sorted(folder.iterdir(), key=lambda path: path.name[-9:], reverse=True)):
        os.utime(path, (1000 - age, 1000 - age))
    large[0].fetch()  # used again
    monkeypatch.setattr(shards, "MOST_BYTES", large[0].num_bytes * 3 + 10)
    make_room(folder, large[3].num_bytes)
    assert {path.name[-9:] for path in folder.iterdir()} == {"0.parquet", "2.parquet"}
    assert texts_of((0, *numbered) for numbered in opened[1].rows()) == TEXTS[1]


def test_two_that_want_the_same_shard_fetch_it_once(large, counted, monkeypatch):
    monkeypatch.setattr(counted, "slow_s", 0.05)
    both = [threading.Thread(target=large[0].fetch) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    target = large[0].fetch()
    large[0]._fetch(counted(), "/0.parquet", target)  # of one that looked just before the other was done
    assert counted.fetched == {"0": 1}
    assert list(target.parent.iterdir()) == [target]


def test_a_line_that_goes_dead_is_tried_again_and_then_named(large, counted, monkeypatch):
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    monkeypatch.setattr(counted, "dead", 4)
    assert texts_of((0, *numbered) for numbered in large[0].open().rows()) == TEXTS[0]
    monkeypatch.setattr(counted, "dead", 5)
    with pytest.raises(
        SourceError, match=r"counted://1\.parquet cannot be fetched .* ConnectionError the line is dead"
    ):
        large[1].open()
    with pytest.raises(SourceError, match="of 7 bytes came"):
        RemoteFile("counted://2.parquet", 7).open()


def test_ranks_have_windows_of_their_own_where_there_are_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "WINDOW_BYTES", 1)
    monkeypatch.setattr(shuffle, "_WINDOWS_A_RANK", 4)
    pq.write_table(pa.table({"text": list("abcdefghijklmnopqrstuvw")}), tmp_path / "a.parquet", row_group_size=2)
    read = []

    class Watched(type(open_source(f"file:{tmp_path}/a.parquet"))):
        def read(self, number):
            read.append(number)
            return super().read(number)

    source = Watched([tmp_path / "a.parquet"])
    found, blocks = [], []
    for rank in range(3):
        read.clear()
        order = RowOrder(source, seed=1, rank=rank, world=3)
        rows = one_pass(order)
        found += texts_of(rows)
        blocks += read
        assert order.passes() == 1
        for stop in range(len(rows)):
            order, again = (RowOrder(source, seed=1, rank=rank, world=3) for _ in range(2))
            list(islice(iter(order.next_row, None), stop))
            assert order.reached(stop / len(rows))
            assert not order.reached((stop + 0.5) / len(rows))
            again.load_state_dict(order.state_dict())
            assert one_pass(again) == rows[stop:]
    assert sorted(found) == list("abcdefghijklmnopqrstuvw")
    assert sorted(blocks) == list(range(12))  # each by one rank
    read.clear()
    one_pass(RowOrder(source, seed=1, rank=0, world=4))
    assert len(read) == 6  # too few for four: every fourth row, and not three blocks of its own
