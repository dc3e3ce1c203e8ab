import json
import random
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from nanodag.data.config import SourceConfig
from nanodag.errors import ConfigError
from nanodag.tokenizer.encoding import Encoding
from nanodag.train.batches import TokenBatches, tokenising_threads
from tests.data.rows import source_of, unpack

WORDS = ("the", "sea", "was", "cold", "and", "boats", "lay", "on", "sand", "while", "rain", "fell", "every", "roof")


def read(source):
    return [json.loads(line) for line in Path(source.url.removeprefix("file:")).read_text().splitlines()]


@pytest.fixture
def documents(tmp_path):
    draw = random.Random(0)
    return source_of(
        tmp_path / "documents.jsonl",
        [{"text": f"{i} " + " ".join(draw.choices(WORDS, k=draw.randrange(1, 60)))} for i in range(150)],
    )


@pytest.fixture
def chats(tmp_path):
    draw = random.Random(1)

    def turns(i):
        for turn in range(draw.randrange(1, 4)):
            yield {"role": "user", "content": f"{i} {turn} " + " ".join(draw.choices(WORDS, k=draw.randrange(1, 9)))}
            yield {"role": "assistant", "content": " ".join(draw.choices(WORDS, k=draw.randrange(1, 9)))}

    return source_of(tmp_path / "chats.jsonl", [{"messages": list(turns(i))} for i in range(120)])


def make(source, tokenizer_path, kind="document", **options):
    settings = {"batch_rows": 2, "sequence_length": 64, "seed": 3, "window_pieces": 16, "window_rows": 4, **options}
    sources = [source] if isinstance(source, SourceConfig) else source
    return TokenBatches(sources, tokenizer_path=tokenizer_path, kind=kind, **settings)


def flat(batch):
    return np.concatenate([batch.input_ids, batch.labels, batch.position_ids, batch.document_ids], axis=1).tolist()


def assert_isolated(batch):
    for positions, owners in zip(batch.position_ids, batch.document_ids):
        for owner in range(owners.max(initial=-1) + 1):
            assert positions[owners == owner].tolist() == list(range((owners == owner).sum()))


def predictions(batches):
    """How often each (input, label) with a loss is trained, checking isolation on the way."""
    trained = Counter()
    for batch in batches:
        assert_isolated(batch)
        trained.update(
            pair for i, labels in unpack(batch) for pair in zip(i.tolist(), labels.tolist()) if pair[1] != -100
        )
    return trained


def test_documents_come_out_of_the_rows_as_they_went_in(documents, tokenizer_path):
    encoding = Encoding(tokenizer_path)
    batches = make(documents, tokenizer_path, sequence_length=512)
    found = []
    for batch in batches:
        for input_ids, labels in unpack(batch):
            assert input_ids[0] == encoding.bos_id
            assert (input_ids[1:] == labels[:-1])[labels[:-1] != -100].all()
            found.append(encoding.decode_bytes(input_ids))
    assert batches.stats()["records"] == 150
    whole = [row["text"] for row in read(documents)]
    assert sorted("".join(t.decode() for t in found)) == sorted("".join(whole))
    assert len(set(whole) & {t.decode() for t in found}) >= 150 - batches.stats()["cut_documents"]


def test_conversations_are_whole_isolated_and_trained_on_the_answers_only(chats, tokenizer_path):
    encoding = Encoding(tokenizer_path)
    wanted = set()
    for row in read(chats):
        turns = row["messages"]
        spoken = "".join(turn["content"] + "<|end|>" for turn in turns if turn["role"] == "assistant")
        text = "".join(f"<|{turn['role']}|>{turn['content']}<|end|>" for turn in turns)
        wanted.add(("<|bos|>" + text.removesuffix("<|end|>"), spoken))
    found = set()
    batches = make(chats, tokenizer_path, "chat", sequence_length=256)
    for batch in batches:
        assert_isolated(batch)
        found |= {(encoding.decode(i), encoding.decode(labels[labels != -100])) for i, labels in unpack(batch)}
    assert found == wanted
    assert batches.stats()["padding"] > 0
    assert batches.stats()["dropped_tokens"] == batches.stats()["truncated_tokens"] == 0


@pytest.fixture
def mixed(documents, chats):
    return [documents.model_copy(update={"adapter": "text"}), chats]


def test_documents_beside_conversations_are_trained_whole_isolated_and_counted(mixed, documents, chats, tokenizer_path):
    batches = make(mixed, tokenizer_path, "chat")
    alone = [make(mixed[0], tokenizer_path), make(chats, tokenizer_path, "chat")]
    # every prediction of the documents, and of the answers, and no other
    assert predictions(batches) == predictions(alone[0]) + predictions(alone[1])
    stats = batches.stats()
    encoding = Encoding(tokenizer_path)
    num_positions = sum(len(ids) + 1 for ids in encoding.encode_batch([row["text"] for row in read(documents)]))
    assert stats["document_tokens"] == num_positions + stats["cut_documents"]  # a rest begins with bos again
    assert stats["tokens"] - stats["document_tokens"] == alone[1].stats()["tokens"]
    assert stats["padding"] < alone[1].stats()["padding"]
    assert alone[1].stats()["document_tokens"] == 0


def test_bytes_of_labels_are_those_of_the_text_whatever_the_tokenizer_puts_before_it(tmp_path):
    # As Llama's: a blank in front of each text, byte tokens for what it does not know.
    known = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(97, 123)), "▁a", "at"]
    vocabulary = {token: number for number, token in enumerate(known)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("a", "t")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    texts = ["a cat at sea", " begins with a blank", "é 日 🙂", "", "the end " * 12]
    source = source_of(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    token_bytes = Encoding(tmp_path).token_bytes
    for length in (16, 64, 256):
        batches = list(make(source, tmp_path, sequence_length=length))
        counted = sum(int(token_bytes[b.labels[b.labels >= 0]].sum()) - b.surplus_bytes for b in batches)
        assert counted == sum(len(text.encode()) for text in texts), length


CASES = {
    "documents": ("document", {}),
    "documents in short rows": ("document", {"sequence_length": 32}),
    "documents repeated, of rank 1": ("document", {"repeat": True, "rank": 1, "world": 2}),
    "chats": ("chat", {}),
    "chats prefetched": ("chat", {"prefetch": 2}),
    "documents prefetched": ("document", {"prefetch": 2}),
    "documents tokenised by three threads": ("document", {"prefetch": 3, "tokenising_threads": 3}),
    "documents beside chats": ("mixed", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_batches_go_on_from_any_point_to_the_byte(documents, chats, mixed, tokenizer_path, case):
    kind, options = CASES[case]
    source = {"document": documents, "chat": chats, "mixed": mixed}[kind]
    kind = "document" if kind == "document" else "chat"
    plain = {**options, "prefetch": 0, "tokenising_threads": 0}
    whole = [flat(batch) for batch in islice(make(source, tokenizer_path, kind, **plain), 40)]
    end = make(source, tokenizer_path, kind, **plain)
    list(islice(end, 40))
    assert len(whole) > 10
    for stop in sorted({0, 1, len(whole), *random.Random(case).sample(range(len(whole)), 4)}):
        first = make(source, tokenizer_path, kind, **options)
        assert [flat(batch) for batch in islice(first, stop)] == whole[:stop]
        state = json.loads(json.dumps(first.state_dict()))
        first.close()
        second = make(source, tokenizer_path, kind, **options)
        second.load_state_dict(state)
        assert second.stats() == first.stats()
        assert [flat(batch) for batch in islice(second, len(whole) - stop)] == whole[stop:]
        assert second.stats() == end.stats()
        second.close()


def test_a_rank_beside_a_gpu_tokenises_with_the_cores_that_training_leaves():
    for (cores, ranks), threads in {(208, 8): 4, (40, 8): 3, (16, 8): 0, (3, 1): 1}.items():
        assert tokenising_threads("cuda", cores=cores, ranks=ranks) == threads
    assert tokenising_threads("cpu", cores=64, ranks=1) == 0


@pytest.mark.parametrize("tokenising_threads", [0, 3])
def test_a_position_can_be_taken_back(documents, tokenizer_path, tokenising_threads):
    batches = make(documents, tokenizer_path, repeat=True, prefetch=2, tokenising_threads=tokenising_threads)
    next(batches)
    state, expected = batches.state_dict(), [flat(batch) for batch in islice(batches, 40)]
    next(batches)
    batches.load_state_dict(state)
    assert [flat(batch) for batch in islice(batches, 40)] == expected
    batches.close()


def test_taking_a_position_back_waits_for_what_the_thread_is_doing(tmp_path, tokenizer_path, monkeypatch):
    rows = "for i in range(900): time.sleep(0.0005); yield {'text': f'{i} ' * 20}"
    (tmp_path / "slow_rows.py").write_text(f"import time\ndef rows():\n    {rows}\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = SourceConfig(url="python:slow_rows:rows")
    batches = make(source, tokenizer_path, prefetch=2, window_pieces=8, batch_rows=64)
    state = batches.state_dict()
    first = [flat(next(batches)) for _ in range(3)]
    batches.load_state_dict(state)
    assert [flat(next(batches)) for _ in range(3)] == first
    batches.close()


def test_an_error_in_the_thread_reaches_the_loop(tmp_path, tokenizer_path):
    source = source_of(tmp_path / "bad.jsonl", [{"text": "x y z " * 40} for _ in range(64)] + [{"body": "?"}])
    batches = make(source, tokenizer_path, prefetch=2, shuffle=False, window_pieces=16)
    with pytest.raises(ValueError, match=r"row 64 of .*bad\.jsonl: no column 'text'"):
        list(batches)
    batches.close()


def test_too_long_conversations_are_truncated_or_dropped_and_counted(tmp_path, tokenizer_path):
    def chat(question, answer):
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    records = [chat("a", "b"), chat("a", "b " * 100), chat("a " * 100, "b"), chat("", "")]
    source = source_of(tmp_path / "chats.jsonl", records)
    cut, dropped = (make(source, tokenizer_path, "chat", too_long=how) for how in ("truncate", "drop"))
    list(cut), list(dropped)
    encoding = Encoding(tokenizer_path)
    long_answer = 4 + len(encoding.encode("a")) + len(encoding.encode("b " * 100)) - 1  # predictions of it
    long_question = 4 + len(encoding.encode("a " * 100)) + len(encoding.encode("b")) - 1
    found = {name: cut.stats()[name] for name in ("truncated_records", "truncated_tokens", "dropped_records")}
    assert found == {
        "truncated_records": 2,
        "truncated_tokens": long_answer + 1 + long_question + 1 - 2 * 64,
        "dropped_records": 1,  # the long question: what is left of it holds no answer
    }
    assert dropped.stats()["dropped_records"] == 2
    assert dropped.stats()["dropped_tokens"] == long_answer + 1 + long_question + 1
    assert dropped.stats()["label_tokens"] == 2 + 1  # "b" and its end, and the end of an empty answer


def test_the_number_of_batches_is_known_before_they_are_made(documents, chats, tokenizer_path):
    for source, kind in ((documents, "document"), (chats, "chat")):
        batches = make(source, tokenizer_path, kind)
        next(batches)
        assert batches.count() == [1 + sum(1 for _ in batches)]
    with pytest.raises(ConfigError, match="have no end"):
        make(documents, tokenizer_path, repeat=True).count()
    with pytest.raises(ConfigError, match="have no end"):
        make(SourceConfig(url=documents.url, weight=1), tokenizer_path).count()


def test_the_last_batch_is_filled_up_and_progress_is_whole(documents, tokenizer_path):
    batches = make(documents, tokenizer_path, batch_rows=7)
    for batch in batches:
        assert batch.input_ids.shape == (7, 64)
    stats = batches.stats()
    assert stats["progress"] == 1
    assert stats["tokens"] + stats["padding"] == stats["batches"] * 7 * 64
    assert [batch.num_tokens for batch in batches.take(2)] == [0, 0]  # beside ranks that have more
    assert batches.stats()["padding"] == stats["padding"] + 2 * 7 * 64


def test_tokenising_and_packing_keep_far_ahead_of_training(documents, tokenizer_path):
    batches = make(documents, tokenizer_path, repeat=True, batch_rows=8, sequence_length=256, window_pieces=256)
    next(batches)
    start, tokens = time.thread_time(), 0
    while tokens < 150_000:
        tokens += next(batches).num_tokens
    assert tokens / (time.thread_time() - start) > 100_000  # measured: several times that; see docs/reference/data.md
