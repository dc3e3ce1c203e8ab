"""How often each row of a source is trained, counted from the batches alone."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from nanodag.tokenizer.encoding import Encoding
from nanodag.train.batches import TokenBatches
from tests.data.rows import source_of, unpack

LENGTH = 64


def rows(path, name, count):
    """Conversations of many lengths, each with its number in it."""
    draw = random.Random(count)
    chats = [[("user", f"{name}{i};"), ("assistant", "of " * draw.choice((1, 2, 3, 5, 9, 20)))] for i in range(count)]
    records = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    return source_of(path, records)


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


def least_trained(path, sizes, passes, tokenizer_path, encoding, *, world, steps, micro_batches, **options):
    """Train rows of sources of these sizes. After every step each of a source was trained equally often or once more.
    Returns the least that one of each source was."""
    given = zip(sizes.items(), passes)
    sources = [rows(path / f"{name}.jsonl", name, size).model_copy(update=update) for (name, size), update in given]
    ranks = ranks_of(sources, tokenizer_path, world, **options)
    trained = {name: Counter({f"{name}{i}": 0 for i in range(size)}) for name, size in sizes.items()}
    for _ in range(steps):
        for row in rows_in(step(ranks, micro_batches), encoding):
            trained[row[0]][row] += 1
        for counts in trained.values():
            assert max(counts.values()) - min(counts.values()) <= 1
    return {name: min(counts.values()) for name, counts in trained.items()}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("epochs", [(None, None), (3, 1), (2, 4), (1.5, 2.5)])
def test_after_every_step_rows_were_trained_equally_often_or_once_more(
    tmp_path, tokenizer_path, encoding, world, epochs
):
    passes = [{"epochs": number} for number in epochs]
    settings = {"world": world, "steps": 60, "micro_batches": 3, "repeat": True}
    least = least_trained(tmp_path, {"a": 90, "b": 41}, passes, tokenizer_path, encoding, **settings)
    assert min(least.values()) > 1


def test_a_mixture_by_weights_trains_rows_equally_often_or_once_more(tmp_path, tokenizer_path, encoding):
    settings = {"world": 1, "steps": 150, "micro_batches": 1}
    least = least_trained(tmp_path, {"a": 300, "b": 11}, [{"weight": 0.5}] * 2, tokenizer_path, encoding, **settings)
    assert least["b"] > 5


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
