"""How often each row of a source is trained, counted from the batches alone."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from nanodag.data.config import SourceConfig
from nanodag.tokenizer.encoding import Encoding
from nanodag.train.batches import TokenBatches
from nanodag.train.packing import unpack

LENGTH = 64


def rows(path, name, count):
    """Conversations of many lengths, each with its number in it."""
    draw = random.Random(count)
    chats = [[("user", f"{name}{i};"), ("assistant", "of " * draw.choice((1, 2, 3, 5, 9, 20)))] for i in range(count)]
    records = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return SourceConfig(url=f"file:{path}")


def ranks_of(sources, tokenizer_path, world, **options):
    settings = {"kind": "chat", "batch_rows": 2, "sequence_length": LENGTH, "seed": 3, **options}
    return [
        TokenBatches(sources, tokenizer_path=tokenizer_path, rank=rank, world=world, **settings)
        for rank in range(world)
    ]


def step(ranks, micro_batches):
    """What the loop does in a step, on all ranks."""
    taken = [batch for rank in ranks for batch in rank.take(micro_batches)]
    if all(rank.is_waiting for rank in ranks):
        following = min(rank.next_stretch for rank in ranks)
        for rank in ranks:
            rank.open(following)
    return taken


def rows_in(batches, encoding):
    return [encoding.decode(ids).split(";")[0].split(">")[-1] for batch in batches for ids, _ in unpack(batch)]


@pytest.fixture
def encoding(tokenizer_path):
    return Encoding(tokenizer_path)


def steps_of(ranks, micro_batches):
    """Steps that setup would plan."""
    counts = [rank.count() for rank in ranks]
    num_stretches = max(map(len, counts))
    padded = [count + [0] * (num_stretches - len(count)) for count in counts]
    return sum(max(-(-rank[stretch] // micro_batches) for rank in padded) for stretch in range(num_stretches))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 7, 60, 700, 2000])
@pytest.mark.parametrize("num_epochs", [1, 3])
def test_an_epoch_trains_each_row_exactly_once(tmp_path, tokenizer_path, encoding, size, world, num_epochs):
    ranks = ranks_of([rows(tmp_path / "a.jsonl", "a", size)], tokenizer_path, world, num_epochs=num_epochs)
    num_steps = steps_of(ranks, 2)
    trained = Counter()
    for _ in range(num_steps):
        trained.update(rows_in(step(ranks, 2), encoding))
    assert trained == {f"a{i}": num_epochs for i in range(size)}
    assert all(batch.num_tokens == 0 for batch in step(ranks, 2))
    stats = [rank.stats()["sources"][0] for rank in ranks]
    assert sum(s["rows"] for s in stats) == size
    assert sum(s["trained"] for s in stats) == size * num_epochs


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("epochs", [(None, None), (3, 1), (2, 4), (1.5, 2.5)])
def test_after_every_step_two_rows_of_a_source_were_trained_equally_often_or_once_more(
    tmp_path, tokenizer_path, encoding, world, epochs
):
    sizes = {"a": 90, "b": 41}
    sources = [
        rows(tmp_path / f"{name}.jsonl", name, size).model_copy(update={"epochs": passes})
        for (name, size), passes in zip(sizes.items(), epochs)
    ]
    ranks = ranks_of(sources, tokenizer_path, world, repeat=True)
    trained = Counter({f"{name}{i}": 0 for name, size in sizes.items() for i in range(size)})
    for _ in range(60):
        trained.update(rows_in(step(ranks, 3), encoding))
        for name in sizes:
            counts = [count for row, count in trained.items() if row.startswith(name)]
            assert max(counts) - min(counts) <= 1
    assert min(trained.values()) > 1


def test_a_mixture_by_weights_trains_the_rows_of_a_source_equally_often_or_once_more(
    tmp_path, tokenizer_path, encoding
):
    sizes = {"a": 300, "b": 11}
    sources = [
        rows(tmp_path / f"{name}.jsonl", name, size).model_copy(update={"weight": 0.5}) for name, size in sizes.items()
    ]
    [batches] = ranks_of(sources, tokenizer_path, 1)
    trained = Counter({f"{name}{i}": 0 for name, size in sizes.items() for i in range(size)})
    for _ in range(150):
        trained.update(rows_in(batches.take(1), encoding))
        for name in sizes:
            counts = [count for row, count in trained.items() if row.startswith(name)]
            assert max(counts) - min(counts) <= 1
    assert min(count for row, count in trained.items() if row.startswith("b")) > 5


def test_rows_do_not_run_from_long_to_short(tmp_path, tokenizer_path):
    [batches] = ranks_of([rows(tmp_path / "a.jsonl", "a", 400)], tokenizer_path, 1)
    longest = [max(len(ids) for ids, _ in unpack(batch)) for batch in batches]
    correlation = np.corrcoef(np.arange(len(longest)), longest)[0, 1]
    assert abs(correlation) < 0.2  # sorted, it is -0.8


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_wait_for_others_go_on_to_the_byte(tmp_path, tokenizer_path, world):
    sources = [rows(tmp_path / "a.jsonl", "a", 50), rows(tmp_path / "b.jsonl", "b", 9)]
    sources[1] = sources[1].model_copy(update={"epochs": 2})
    whole = ranks_of(sources, tokenizer_path, world, repeat=True)
    expected, states = [], []
    for _ in range(24):
        states.append(json.dumps([rank.state_dict() for rank in whole]))
        expected.append([batch.input_ids.tolist() for batch in step(whole, 2)])
    assert any(batch.num_tokens == 0 for rank in ranks_of(sources, tokenizer_path, world) for batch in rank.take(40))
    for stop in (0, 1, 5, 11, 17, 23):
        ranks = ranks_of(sources, tokenizer_path, world, repeat=True, prefetch=2)
        for rank, state in zip(ranks, json.loads(states[stop])):
            rank.load_state_dict(state)
        assert [[b.input_ids.tolist() for b in step(ranks, 2)] for _ in expected[stop:]] == expected[stop:]
        assert [rank.stats() for rank in ranks] == [rank.stats() for rank in whole]
        for rank in ranks:
            rank.close()
