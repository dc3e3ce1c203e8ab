from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest

from nanodag.train.held_out_rows import held_out_rows
from nanodag.train.packing import document_piece, make_batch

SHARED = ("input_ids", "labels", "position_ids", "document_ids")
ROWS = [[[3, 4], [5]], [[6, 7, 8, 9]], [[10]]]  # documents of three rows of 6 positions


def batches(made):
    for number, row in enumerate(ROWS):
        made.append(number)
        pieces = [document_piece(ids, 1, surplus_bytes=len(ids)) for ids in row]
        yield make_batch([pieces], num_rows=1, row_length=6, pad_id=0)


def whole_batch(rows):
    pieces = [[document_piece(ids, 1, surplus_bytes=len(ids)) for ids in row] for row in rows]
    return make_batch(pieces, num_rows=2, row_length=6, pad_id=0)


def assert_same(one, other):
    assert one.surplus_bytes == other.surplus_bytes
    for name in SHARED:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)


def test_held_out_rows_are_made_once_for_all_ranks_restarts_and_stages_with_the_same_data(tmp_path):
    made = []
    for _ in range(3):
        rows = held_out_rows(tmp_path, {"data": "a"}, lambda: batches(made))
    assert made == [0, 1, 2]
    held_out_rows(tmp_path, {"data": "b"}, lambda: islice(batches(made), 1))
    assert made == [0, 1, 2, 0]
    dealt = {(0, 2): [[ROWS[0], ROWS[2]]], (1, 2): [[ROWS[1]]], (0, 1): [ROWS[:2], ROWS[2:]]}
    for (rank, world), wanted in dealt.items():
        for batch, its in zip(rows.batches(rank=rank, world=world, batch_rows=2, pad_id=0), wanted, strict=True):
            assert_same(batch, whole_batch(its))
    assert rows.batches(rank=3, world=4, batch_rows=2, pad_id=0) == []


def test_ranks_that_ask_at_once_wait_for_the_one_that_makes_them(tmp_path):
    made = []
    with ThreadPoolExecutor(3) as ranks:
        found = list(ranks.map(lambda rank: held_out_rows(tmp_path, {}, lambda: batches(made)), range(3)))
    assert made == [0, 1, 2]
    assert all(np.array_equal(rows.input_ids, found[0].input_ids) for rows in found)


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    made = []
    held_out_rows(tmp_path, {}, lambda: batches(made))
    (path,) = tmp_path.glob("*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage == "flipped" else whole[:-9])
    held_out_rows(tmp_path, {}, lambda: batches(made))
    assert made == [0, 1, 2, 0, 1, 2]
    assert path.read_bytes() == whole


def test_the_eight_used_last_are_kept(tmp_path):
    for number in range(10):
        held_out_rows(tmp_path, {"data": number}, lambda: batches([]))
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(tmp_path.glob("*.lock"))) == 8


def test_without_any_held_out_text_there_are_no_batches(tmp_path):
    rows = held_out_rows(tmp_path, {}, lambda: iter(()))
    assert rows.batches(rank=0, world=1, batch_rows=2, pad_id=0) == []
