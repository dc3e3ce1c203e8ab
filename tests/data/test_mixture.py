import gzip
import json
import random
import subprocess
import sys
from collections import Counter
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanodag.data import shuffle
from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.data.opening import open_source
from nanodag.data.shuffle import RowOrder, permutation
from nanodag.errors import ConfigError, CorruptArtifact, SourceError
from tests.data.rows import write_rows


@pytest.fixture
def write(tmp_path):
    """Makes a source of documents `<letter>0 .. <letter>n-1`; by its ending it has blocks (jsonl) or none (gz)."""

    def write(letter, num_rows, ending="jsonl", padding=0):
        lines = "".join(json.dumps({"text": f"{letter}{i}" + "." * padding}) + "\n" for i in range(num_rows)).encode()
        path = tmp_path / f"{letter}.{ending}"
        path.write_bytes(gzip.compress(lines) if ending.endswith("gz") else lines)
        return f"file:{path}"

    return write


def texts(mixture, count=None):
    return [drawn.record["text"] for drawn in islice(mixture, count)]


def mixture(sources, **options):
    return Mixture(sources, **{"kind": "document", "seed": 1, **options})


ENDINGS = ["jsonl", "jsonl.gz"]


def test_a_permutation_has_each_number_once_and_depends_on_its_key():
    order = permutation(1000, 1, 2)
    assert sorted(order) == list(range(1000))
    assert (order == permutation(1000, 1, 2)).all()
    assert (order != permutation(1000, 2, 1)).any()
    assert permutation(8, 5).tolist() == [2, 5, 0, 4, 7, 3, 1, 6]  # with every version of numpy


def test_permutations_are_even():
    counts = np.zeros((4, 4))
    for key in range(4000):
        counts[np.arange(4), permutation(4, key)] += 1
    assert np.abs(counts / 4000 - 0.25).max() < 0.03


@pytest.mark.parametrize("ending", ENDINGS)
def test_without_shuffling_rows_come_in_the_order_of_the_source(write, ending):
    assert texts(mixture([SourceConfig(url=write("a", 7, ending))], shuffle=False)) == [f"a{i}" for i in range(7)]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("shuffled", [True, False])
def test_ranks_share_nothing_and_together_have_everything(write, ending, shuffled):
    source = SourceConfig(url=write("a", 23, ending))
    shards = [texts(mixture([source], rank=rank, world=3, shuffle=shuffled)) for rank in range(3)]
    assert sorted(t for shard in shards for t in shard) == sorted(f"a{i}" for i in range(23))
    assert {len(shard) for shard in shards} == {7, 8}


def test_blocks_are_mixed_across_a_file_and_beyond_a_window_shuffled_too_and_read_once(tmp_path, monkeypatch):
    table = pa.Table.from_pylist([{"text": str(i)} for i in range(100)])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    found = [int(t) for t in texts(mixture([SourceConfig(url=f"file:{tmp_path}/a.parquet")]))]
    assert sorted(found) == list(range(100))
    assert len({n // 10 for n in found[:10]}) > 4
    source = open_source(f"file:{tmp_path}/a.parquet")
    monkeypatch.setattr(shuffle, "WINDOW_BYTES", 3 * source.blocks()[0].num_bytes)
    reads = []
    read = source.read
    monkeypatch.setattr(source, "read", lambda number: reads.append(number) or read(number))
    order = RowOrder(source, seed=1)
    found = [order.next_row()[1] for _ in range(100)]
    assert sorted(found) == list(range(100))
    assert sorted(reads) == list(range(10))
    assert reads != list(range(10))
    assert order.next_row() is None
    assert sorted(order.next_row()[1] for _ in range(100)) == list(range(100))
    assert sorted(reads[10:]) == list(range(10))
    assert reads[10:] != reads[:10]


@pytest.mark.parametrize("weights", [(1, 3), (0.2, 0.8), (5, 1)])
def test_weights_hold_in_bytes_at_every_point(write, weights):
    long, short = write("a", 50, padding=98), write("b", 200, padding=18)
    drawing = mixture([SourceConfig(url=url, weight=w) for url, w in zip((long, short), weights)])
    spent = [0, 0]
    for _ in range(2000):
        drawn = next(drawing)
        spent[drawn.source] += len(drawn.record["text"])
        # No source is ever further from its share than one document of either.
        assert abs(spent[0] / weights[0] - spent[1] / weights[1]) <= 102 / min(weights)


def test_a_weighted_source_is_repeated_for_ever_and_reshuffled(write):
    drawing = mixture([SourceConfig(url=write("a", 3), weight=1)])
    found = [next(drawing) for _ in range(30)]
    assert Counter(drawn.record["text"] for drawn in found) == {"a0": 10, "a1": 10, "a2": 10}
    assert [drawn.epoch for drawn in found] == [i // 3 for i in range(30)]


@pytest.mark.parametrize("ending", ENDINGS)
def test_epochs_are_respected_and_spread_evenly(write, ending):
    sources = [SourceConfig(url=write("a", 40, ending), epochs=2), SourceConfig(url=write("b", 40, ending), epochs=0.5)]
    drawing = mixture(sources)
    found = texts(drawing)
    counts = Counter(found)
    assert [counts[f"a{i}"] for i in range(40)] == [2] * 40
    assert sum(counts[f"b{i}"] for i in range(40)) == 20
    assert max(counts[f"b{i}"] for i in range(40)) == 1
    assert 8 <= sum(t.startswith("b") for t in found[:50]) <= 12
    assert drawing.progress == 1
    assert drawing.stats()[sources[1].url] == {"records": 20, "epochs": 0.5}


@pytest.mark.parametrize("epochs", [0.5, 1, 1.7])
def test_epochs_are_exact_over_all_ranks(write, epochs):
    source = SourceConfig(url=write("a", 41), epochs=epochs)
    found = Counter(t for rank in range(3) for t in texts(mixture([source], rank=rank, world=3)))
    assert sum(found.values()) == round(41 * epochs)
    assert set(found.values()) <= {int(epochs), int(epochs) + 1}


def test_a_repeated_mixture_begins_again_where_it_ended(write):
    drawing = mixture([SourceConfig(url=write("a", 10), epochs=0.5)], repeat=True)
    halves = [texts(drawing, 5) for _ in range(4)]
    assert sorted(halves[0] + halves[1]) == sorted(halves[2] + halves[3]) == sorted(f"a{i}" for i in range(10))
    assert halves[0] + halves[1] != halves[2] + halves[3]


def test_once_is_one_pass_whatever_weights_and_epochs_say(write):
    weighted = [SourceConfig(url=write("a", 9), weight=1), SourceConfig(url=write("b", 3), weight=7)]
    assert sorted(texts(mixture(weighted, once=True))) == [f"a{i}" for i in range(9)] + [f"b{i}" for i in range(3)]
    assert len(texts(mixture([SourceConfig(url=weighted[0].url, epochs=5)], once=True, repeat=True))) == 9


def test_the_held_out_part_and_the_rest_are_disjoint_and_complete(write):
    source = SourceConfig(url=write("a", 400), held_out=0.25)
    train, held_out, whole = (texts(mixture([source], part=part)) for part in ("train", "held_out", "all"))
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(whole) == sorted(f"a{i}" for i in range(400))
    assert 70 < len(held_out) < 130


def test_a_text_that_occurs_twice_is_on_one_side_only(write, tmp_path):
    copy = write_rows(tmp_path / "copy.jsonl", [{"text": f"a{i}", "id": i} for i in range(100)])
    both = [SourceConfig(url=url, held_out=0.3) for url in (write("a", 100), copy)]
    train, held_out = texts(mixture(both)), texts(mixture(both, part="held_out"))
    assert not set(train) & set(held_out)
    assert set(Counter(held_out).values()) == {2}


def test_a_part_without_rows_ends_in_an_error_not_in_a_loop(write):
    with pytest.raises(SourceError, match=r"gave this rank no record of the part 'held_out'"):
        next(mixture([SourceConfig(url=write("a", 5), weight=1)], part="held_out"))
    with pytest.raises(SourceError, match=r"no record of the part 'held_out'"):
        next(mixture([SourceConfig(url=write("a", 5))], part="held_out", repeat=True))
    assert texts(mixture([SourceConfig(url=write("a", 5))], part="held_out")) == []


def cases(write):
    a, b, c = write("a", 17), write("b", 29, "jsonl.gz"), write("c", 5)
    return {
        "weights": ([SourceConfig(url=a, weight=2), SourceConfig(url=b, weight=1, held_out=0.2)], {}),
        "epochs": ([SourceConfig(url=a, epochs=2), SourceConfig(url=b), SourceConfig(url=c, epochs=3.4)], {}),
        "repeat": ([SourceConfig(url=a, epochs=0.7), SourceConfig(url=b)], {"repeat": True}),
        "once": ([SourceConfig(url=a, weight=1), SourceConfig(url=b, weight=4)], {"once": True}),
        "in order": ([SourceConfig(url=a), SourceConfig(url=b)], {"shuffle": False, "repeat": True}),
        "sharded": ([SourceConfig(url=a), SourceConfig(url=b)], {"rank": 1, "world": 3, "repeat": True}),
    }


@pytest.mark.parametrize("case", ["weights", "epochs", "repeat", "once", "in order", "sharded"])
def test_a_mixture_goes_on_from_any_point_as_if_never_stopped(write, monkeypatch, case):
    monkeypatch.setattr(shuffle, "_WINDOW_ROWS", 8)
    sources, options = cases(write)[case]
    undisturbed = mixture(sources, **options)
    whole = texts(undisturbed, 90)
    for stop in range(len(whole) + 1):
        drawing = mixture(sources, **options)
        texts(drawing, stop)
        state = json.loads(json.dumps(drawing.state_dict()))
        resumed = mixture(sources, **options)
        resumed.load_state_dict(state)
        assert (resumed.stats(), resumed.progress) == (drawing.stats(), drawing.progress)
        assert texts(resumed, 90 - stop) == whole[stop:]
        assert resumed.state_dict() == undisturbed.state_dict()  # so it may be stopped again


def test_a_position_of_another_mixture_is_refused(write):
    url = write("a", 5)
    state = mixture([SourceConfig(url=url)]).state_dict()
    for changed, options in (({}, {"seed": 2}), ({"epochs": 2}, {}), ({}, {"world": 2})):
        with pytest.raises(ConfigError, match="belongs to another mixture"):
            mixture([SourceConfig(url=url, **changed)], **options).load_state_dict(state)


@pytest.mark.parametrize("change", [lambda s: s.pop("shard"), lambda s: s.update(places=[])])
def test_a_position_that_another_version_saved_is_refused_in_a_line(write, change):
    mixed = mixture([SourceConfig(url=write("a", 5))])
    state = mixed.state_dict()
    change(state["streams"][0])
    with pytest.raises(CorruptArtifact, match=r"another version saved it\. Remove the stage's checkpoints"):
        mixed.load_state_dict(state)


def test_mixing_by_epochs_needs_lengths_and_says_so(write, tmp_path, monkeypatch):
    (tmp_path / "endless_rows.py").write_text("def rows():\n    yield {'text': 'x'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    unknown = SourceConfig(url="python:endless_rows:rows")
    with pytest.raises(SourceError, match="does not know its number of rows"):
        mixture([unknown, SourceConfig(url=write("a", 5))])
    assert texts(mixture([unknown])) == ["x"]
    assert texts(mixture([SourceConfig(url=unknown.url, epochs=3)])) == ["x"] * 3


def test_prompts_are_weighed_by_rows_and_have_ids_of_their_own(tmp_path):
    rows = [[{"question": f"{i}" * length, "answer": i} for i in range(20)] for length in (5, 500)]
    urls = [write_rows(tmp_path / f"{number}.jsonl", each) for number, each in enumerate(rows)]
    sources = [SourceConfig(url=url, adapter="problem", weight=1) for url in urls]
    drawing = mixture(sources, kind="prompt")
    found = [next(drawing) for _ in range(40)]
    assert Counter(drawn.source for drawn in found) == {0: 20, 1: 20}
    assert len({drawn.record["prompt_id"] for drawn in found}) == 40


def test_memory_holds_a_window_not_the_corpus(tmp_path):
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(tmp_path / "big.parquet", schema, compression="none", use_dictionary=False) as writer:
        for group in range(50):
            texts = [random.Random(group * 100 + i).randbytes(25_000).hex() for i in range(100)]
            writer.write_table(pa.table({"text": texts}))  # 50 row groups of 5 MB
    code = (
        "import sys, resource; from nanodag.data.mixture import Mixture; from nanodag.data.config import SourceConfig;"
        "import nanodag.data.shuffle as s; s.WINDOW_BYTES = 10 << 20; import pyarrow.parquet;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "count = sum(1 for _ in Mixture([SourceConfig(url=sys.argv[1])], kind='document', seed=0));"
        "print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    command = [sys.executable, "-c", code, f"file:{tmp_path}/big.parquet"]
    count, megabytes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(count) == 5000
    assert int(megabytes) < 80  # of 250
