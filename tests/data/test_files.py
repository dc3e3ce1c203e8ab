import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nanodag.data import formats
from nanodag.data.opening import open_source
from nanodag.errors import MissingTool, SourceError

ROWS = [{"text": f"row {i}", "n": i} for i in range(10)]


def jsonl(rows=ROWS) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(scope="module")
def formats_folder(tmp_path_factory) -> Path:
    """ROWS in a file of each format."""
    folder = tmp_path_factory.mktemp("formats")
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "a.parquet", row_group_size=3)
    (folder / "a.jsonl").write_bytes(jsonl())
    (folder / "a.json").write_text(json.dumps(ROWS))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(jsonl()))
    (folder / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    half = len(jsonl()) // 2  # two frames, cut in the middle of a line
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(jsonl()[:half]) + zstandard.compress(jsonl()[half:]))
    return folder


FORMATS = ["a.parquet", "a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows_from_any_start(formats_folder, name):
    source = open_source(f"file:{formats_folder / name}")
    assert list(source.rows()) == list(enumerate(ROWS))
    assert list(source.rows(start=7)) == [(i, ROWS[i]) for i in (7, 8, 9)]
    assert source.length() == 10


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("start", [0, 4])
def test_shards_are_disjoint_and_complete(formats_folder, name, start):
    source = open_source(f"file:{formats_folder / name}")
    shards = [[index for index, _ in source.rows(start, shard, 3)] for shard in range(3)]
    assert sorted(index for shard in shards for index in shard) == list(range(start, 10))
    assert all(index % 3 == shard for shard in range(3) for index in shards[shard])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("url_slice", "wanted"),
    [("[2:6]", [2, 3, 4, 5]), ("[8:]", [8, 9]), ("[:2]", [0, 1]), ("[3:8]", [3, 4, 5, 6, 7]), ("[8:100]", [8, 9]),
     ("[50:60]", [])],
)  # fmt: skip
def test_a_slice_numbers_its_rows_from_0_and_is_short_beyond_the_end(formats_folder, name, url_slice, wanted):
    source = open_source(f"file:{formats_folder / name}{url_slice}")
    assert [row["n"] for _, row in source.rows()] == wanted
    assert [index for index, _ in source.rows()] == list(range(len(wanted)))
    assert source.length() == len(wanted)
    assert [row["n"] for _, row in source.rows(start=1, shard=1, num_shards=2)] == wanted[1::2]


def test_a_glob_takes_files_in_order_of_name_and_ignores_other_kinds(tmp_path):
    (tmp_path / "2.jsonl").write_bytes(jsonl(ROWS[3:5]))
    (tmp_path / "1.jsonl").write_bytes(jsonl(ROWS[:3]))
    (tmp_path / "notes.md").write_text("no data")
    source = open_source(f"file:{tmp_path}/*")
    assert [row["n"] for _, row in source.rows()] == [0, 1, 2, 3, 4]


def test_a_jsonl_file_is_read_in_blocks_of_lines(formats_folder, monkeypatch):
    monkeypatch.setattr(formats, "_BLOCK_BYTES", 60)
    source = open_source(f"file:{formats_folder / 'a.jsonl'}")
    assert len(source.blocks()) > 2
    assert list(source.rows()) == list(enumerate(ROWS))


BROKEN = {
    "an ending that is not known": ("a.csv", b"a,b", r"a\.csv has no known format; files end in \.parquet"),
    "no JSON in a line": ("a.jsonl", jsonl(ROWS[:2]) + b'\n{"text": oops}\n', r"a\.jsonl line 4 is not JSON.*oops"),
    "a line of a later block": ("a.jsonl", jsonl() + b"[1]\n", r"line 11 must be a JSON object; found b'\[1\]"),
    "a file that is no JSON": ("a.json", b'[{"text": "x"},\n{"text"]', r"a\.json line 2 is not JSON"),
    "JSON that is no list": ("a.json", b'{"rows": []}', "must hold a list of objects"),
    "no UTF-8": ("a.txt", b"fine\nfine\nb\xffd\n", r"a\.txt line 3 is not UTF-8"),
    "no zstd": ("a.jsonl.zst", b"this is not compressed", r"a\.jsonl\.zst is damaged at or after line 0"),
    "no gzip": ("a.jsonl.gz", b"this is not compressed", r"a\.jsonl\.gz is damaged at or after line 0"),
    "half a zstd": ("a.jsonl.zst", zstandard.compress(jsonl())[:-9], r"a\.jsonl\.zst is damaged at or after line \d+"),
    "half a gzip": ("a.jsonl.gz", gzip.compress(jsonl())[:-9], r"a\.jsonl\.gz is damaged at or after line \d+"),
    "half a gzip of JSON": (
        "a.json.gz",
        gzip.compress(json.dumps(ROWS).encode())[:-9],
        r"damaged at or after line \d+",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_its_line(tmp_path, monkeypatch, case):
    monkeypatch.setattr(formats, "_BLOCK_BYTES", 60)
    name, content, message = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        list(open_source(f"file:{tmp_path / name}").rows())


def test_a_damaged_row_group_is_named_and_a_cut_off_parquet_file_too(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist([{"text": "abcdefgh" * 50 + str(i)} for i in range(100)])
    pq.write_table(table, path, row_group_size=50, compression="zstd", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)
    source = open_source(f"file:{path}")
    with pytest.raises(SourceError, match=r"a\.parquet row group 1 \(of 2\) cannot be read"):
        list(source.rows())
    path.write_bytes(bytes(data[:200]))
    with pytest.raises(SourceError, match=r"a\.parquet is not a readable parquet file"):
        open_source(f"file:{path}").length()


def test_a_text_file_is_one_document_a_file_a_paragraph_or_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\nthree\n")
    whole, paragraphs, lines = (open_source(f"file:{tmp_path}/a.txt{by}") for by in ("", "?by=paragraph", "?by=line"))
    assert [row["text"] for _, row in whole.rows()] == ["one\ntwo\n\n\nthree"]
    assert [row["text"] for _, row in paragraphs.rows()] == ["one\ntwo", "three"]
    assert [row["text"] for _, row in lines.rows()] == ["one", "two", "three"]
    assert paragraphs.identity() != lines.identity()


def test_a_book_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    text = "".join(f"paragraph {i} " + "x" * 500 + "\n\n" for i in range(400))
    (tmp_path / "book.txt").write_text(text)
    pieces = [row["text"] for _, row in open_source(f"file:{tmp_path}/book.txt").rows()]
    assert len(pieces) == 4
    assert all(piece.startswith("paragraph") for piece in pieces)
    assert "\n\n".join(pieces) + "\n\n" == text


def test_identity_follows_the_bytes_not_the_place_or_the_time(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(jsonl())
    here, there = (open_source(f"file:{tmp_path}/{folder}/a.jsonl") for folder in ("x", "y"))
    before = here.identity()
    assert before == there.identity()
    (tmp_path / "x" / "a.jsonl").write_bytes(jsonl(ROWS[:9]))
    assert open_source(f"file:{tmp_path}/x/a.jsonl").identity() != before
    assert open_source(f"file:{tmp_path}/y/a.jsonl[0:5]").identity() != before
    json.dumps(before)


def test_a_package_or_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SourceError, match="matches no file"):
        open_source(f"file:{tmp_path}/*.jsonl")
    with pytest.raises(MissingTool, match="pip install --no-deps no-such-wheel"):
        open_source("package:no-such-wheel/data.json")
    with pytest.raises(SourceError, match=r"has no file data/none\.json"):
        open_source("package:pydantic/data/none.json")


def test_a_file_of_a_package_is_read_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "some_wheel-1.0.dist-info").mkdir()
    (tmp_path / "some_wheel-1.0.dist-info" / "METADATA").write_text("Name: some-wheel\nVersion: 1.0\n")
    (tmp_path / "some_wheel").mkdir()
    (tmp_path / "some_wheel" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "some_wheel" / "rows.jsonl").write_bytes(jsonl())
    monkeypatch.syspath_prepend(tmp_path)
    source = open_source("package:some-wheel/some_wheel/rows.jsonl[8:]")
    assert [row["n"] for _, row in source.rows()] == [8, 9]
    assert "1.0" not in json.dumps(source.identity())


CONTENT = [
    {"question": "?", "context": [["Ed", ["Ed is", " a man."]], ["Bo", ["Bo sings."]]]},
    {"question": "?", "context": [["Bo", ["Bo sings."]], ["Ed", ["Another Ed."]], ["Nil", [" "]]]},
]


def test_a_view_of_passages_has_each_once_in_order_and_is_part_of_url_and_identity(tmp_path):
    (tmp_path / "q.json").write_text(json.dumps(CONTENT))
    plain, viewed = open_source(f"file:{tmp_path}/q.json"), open_source(f"file:{tmp_path}/q.json#passages")
    assert plain.length() == 2
    passages = [("Ed", "Ed is a man."), ("Bo", "Bo sings."), ("Ed", "Another Ed.")]
    assert [(row["title"], row["text"]) for _, row in viewed.rows()] == passages
    assert [row["text"] for _, row in viewed.rows(start=1)] == ["Bo sings.", "Another Ed."]
    assert plain.identity() != viewed.identity()


def test_a_view_of_something_else_is_refused(tmp_path):
    (tmp_path / "q.json").write_text('[{"question": "?"}]')
    with pytest.raises(SourceError, match=r"q\.json is not what the view 'passages' reads"):
        open_source(f"file:{tmp_path}/q.json#passages").length()
    with pytest.raises(SourceError, match="views are passages"):
        open_source(f"file:{tmp_path}/q.json#paragraphs").length()


def test_a_value_of_parquet_that_python_cannot_hold_is_named_with_its_row(tmp_path):
    path = tmp_path / "a.parquet"
    no_text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    for table in ({"text": no_text}, {"text": ["a"], "at": pa.array([2**62], pa.timestamp("us"))}):
        pq.write_table(pa.table(table), path)
        with pytest.raises(SourceError, match=r"a\.parquet row group 0, row 0 cannot be read"):
            list(open_source(f"file:{path}").rows())
