from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nanodag.train.packing import Packer, conversation_piece, document_piece, make_batch
from tests.data.rows import unpack

BOS = 1


def pairs(piece):
    """(input, label) by slot; None where nothing is trained."""
    labels = zip(piece.tokens[1:].tolist(), piece.trained.tolist())
    return [(i, label if trained else None) for i, (label, trained) in zip(piece.tokens[:-1].tolist(), labels)]


def conversation(ids):
    """All of it trained; as many slots as a document of these ids."""
    return conversation_piece(np.array([BOS, *ids, BOS], dtype=np.int32), np.full(len(ids) + 2, True))


def rows_of(packer, pieces=()):
    for piece in pieces:
        packer.add(piece)
    return list(iter(packer.row, []))


def test_a_document_is_learned_from_its_first_token_to_its_end():
    assert pairs(document_piece([7, 8], BOS)) == [(1, 7), (7, 8), (8, 1)]
    assert pairs(document_piece([], BOS)) == [(1, None)]


def test_only_masked_tokens_of_a_conversation_are_learned():
    ids = np.array([1, 5, 6, 7, 8], dtype=np.int32)
    mask = np.array([False, False, False, True, True])
    assert pairs(conversation_piece(ids, mask)) == [(1, None), (5, None), (6, 7), (7, 8)]


def test_the_largest_piece_that_fits_goes_first_and_of_equals_the_oldest():
    packer = Packer(8, bos_id=BOS)
    for ids in ([2, 2], [3, 3, 3, 3], [4, 4], [5] * 6):  # 3, 5, 3 and 7 slots
        packer.add(conversation(ids))
    rows = rows_of(packer)
    assert [[int(piece.tokens[1]) for piece in row] for row in rows] == [[5], [3, 2], [4]]


def test_where_nothing_fits_the_shortest_document_is_cut():
    packer = Packer(5, bos_id=BOS)
    for ids in ([2, 2, 2], [3, 3, 3]):  # 4 slots each
        packer.add(document_piece(ids, BOS))
    rows = rows_of(packer)
    assert [[pairs(piece) for piece in row] for row in rows] == [
        [[(1, 2), (2, 2), (2, 2), (2, 1)], [(1, 3)]],
        [[(1, None), (3, 3), (3, 3), (3, 1)]],
    ]
    assert packer.num_cut == 1


documents = st.lists(st.lists(st.integers(2, 99), min_size=1, max_size=30), min_size=1, max_size=25)


@settings(max_examples=150, deadline=None)
@given(documents, st.integers(2, 20))
def test_every_prediction_of_every_document_is_trained_exactly_once(texts, row_length):
    packer = Packer(row_length, bos_id=BOS)
    rows = rows_of(packer, [document_piece(ids, BOS) for ids in texts])
    trained = Counter(pair for row in rows for piece in row for pair in pairs(piece) if pair[1] is not None)
    # A cut puts bos before what follows it, without training that; all other pairs are those of the whole documents.
    assert trained == Counter(pair for ids in texts for pair in pairs(document_piece(ids, BOS)))
    assert all(sum(piece.num_positions for piece in row) == row_length for row in rows[:-1])
    assert all(row[0].tokens[0] == BOS for row in rows)


@settings(max_examples=100, deadline=None)
@given(documents, st.integers(31, 60))
def test_packing_never_changes_a_conversation(texts, row_length):
    pieces = [conversation(ids) for ids in texts]
    packer = Packer(row_length, bos_id=BOS)
    rows = rows_of(packer, pieces)
    batch = make_batch(rows, num_rows=len(rows), row_length=row_length, pad_id=0)
    found = Counter((tuple(i.tolist()), tuple(labels.tolist())) for i, labels in unpack(batch))
    assert found == Counter((tuple(p.tokens[:-1].tolist()), tuple(p.tokens[1:].tolist())) for p in pieces)


@settings(max_examples=100, deadline=None)
@given(documents, documents, st.integers(31, 60))
def test_beside_conversations_documents_are_trained_whole_and_fill_every_row(chats, texts, row_length):
    packer = Packer(row_length, bos_id=BOS)
    pieces = [conversation(ids) for ids in chats]
    rows = rows_of(packer, [*pieces, *(document_piece(ids, BOS) for ids in texts)])
    found = [piece for row in rows for piece in row]
    kept = Counter(tuple(piece.tokens.tolist()) for piece in found if not piece.is_document)
    assert kept == Counter((BOS, *ids, BOS) for ids in chats)
    trained = Counter(p for piece in found if piece.is_document for p in pairs(piece) if p[1] is not None)
    assert trained == Counter(pair for ids in texts for pair in pairs(document_piece(ids, BOS)))
    last = max(number for number, row in enumerate(rows) if any(piece.is_document for piece in row))
    assert all(sum(piece.num_positions for piece in row) == row_length for row in rows[:last])


def test_a_batch_written_out_by_hand():
    ids = np.array([1, 5, 6, 7], dtype=np.int32)
    chat = conversation_piece(ids, np.array([False, False, True, True]))
    batch = make_batch(
        [[document_piece([8, 9], BOS), chat], [document_piece([4], BOS)]], num_rows=3, row_length=7, pad_id=0
    )
    assert batch.input_ids.tolist() == [[1, 8, 9, 1, 5, 6, 0], [1, 4, 0, 0, 0, 0, 0], [0] * 7]
    assert batch.labels.tolist() == [[8, 9, 1, -100, 6, 7, -100], [4, 1] + [-100] * 5, [-100] * 7]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, -1], [0, 0, -1, -1, -1, -1, -1], [-1] * 7]
    assert (batch.num_tokens, batch.num_labels) == (8, 7)
    kinds = (batch.input_ids.dtype, batch.labels.dtype, batch.position_ids.dtype, batch.document_ids.dtype)
    assert kinds == (np.int64, np.int64, np.int64, np.int32)
