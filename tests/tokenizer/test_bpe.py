import hashlib
import itertools
import json
import random
import re
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nanodag.errors import ConfigError
from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
from nanodag.tokenizer.encoding import Encoding
from nanodag.tokenizer.layout import SPECIAL_TOKENS
from nanodag.tokenizer.train import SAMPLES
from tests.tokenizer.byte_ids import encode_bytes


@pytest.fixture(scope="module")
def encoding(folder):
    return Encoding(folder)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
@example(data=bytes(range(256)))
@example(data=b"\xed\xa0\x80 lone surrogate \xf0\x9f\x99")
@example(data=b"<|end|><|bos|> it's 12345\r\n\n  \t x")
def test_any_bytes_come_back(encoding, data):
    ids = encode_bytes(encoding, data)
    assert encoding.decode_bytes(ids) == data
    assert not encoding.special_ids & set(ids)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=200))
@example(text="<|end|> é 日本語 🙂 \u200b\r\n \x00 a  b")
def test_any_text_comes_back(encoding, text):
    ids = encoding.encode(text)
    assert encoding.decode(ids) == text
    assert encoding.encode_batch([text, "x"])[0] == ids


def test_training_gives_the_same_bytes_every_time_and_with_any_number_of_threads(tmp_path):
    code = (
        "import sys; from pathlib import Path; from nanodag.tokenizer.bpe import *;"
        "from nanodag.tokenizer.train import SAMPLES;"
        "save_tokenizer(train_bpe(iter(SAMPLES.values()), 600), Path(sys.argv[1]))"
    )
    digests = set()
    for threads in ("1", "3"):
        folder = tmp_path / threads
        environment = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-c", code, str(folder)], env=environment, check=True)
        digests.add(hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.iterdir()))).hexdigest())
    assert len(digests) == 1


def test_the_vocabulary_is_bytes_then_merges_then_special_tokens(folder, encoding):
    layout = json.loads((folder / "tokenizer.json").read_text())
    assert encoding.size == 600
    assert len(layout["model"]["merges"]) == 600 - 256 - len(SPECIAL_TOKENS)
    assert [encoding.token_id(token) for token in SPECIAL_TOKENS] == list(range(590, 600))
    assert encoding.decode_bytes(range(256)) == bytes(range(256))


def plain_bpe(ranks, word):
    """Byte-pair encoding as it is defined: merge the pair of lowest rank until none is left."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        place = min(found)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_the_saved_tokenizer_encodes_as_byte_pair_encoding_is_defined(tmp_path):
    ranks = train_bpe(iter(SAMPLES.values()), 600)
    save_tokenizer(ranks, tmp_path)
    encoding = Encoding(tmp_path)
    draw = random.Random(0)
    words = {draw.choice(SAMPLES["english"].split())[: draw.randrange(1, 9)] for _ in range(200)} | {"zzzz", "élan"}
    letters = [word for word in words if word.isalpha()]
    assert len(letters) > 100
    for word in letters:
        assert encoding.encode(word) == plain_bpe(ranks, word.encode())


def test_numbers_are_split_into_groups_of_at_most_two_digits(tmp_path):
    save_tokenizer(train_bpe(iter(["1234567 99999 "] * 50), 270), tmp_path)
    encoding = Encoding(tmp_path)
    assert "|".join(encoding.decode([i]) for i in encoding.encode("1234567 99999")) == "12|34|56|7| |99|99|9"


def test_bytes_of_tokens_sum_up_to_the_bytes_of_the_text(encoding):
    for text in SAMPLES.values():
        assert encoding.token_bytes[encoding.encode(text)].sum() == len(text.encode())
    assert all(encoding.token_bytes[i] == 0 for i in encoding.special_ids)
    assert encoding.token_bytes.shape == (600,)


def test_too_little_text_for_the_vocabulary_is_an_error_with_the_number_that_would_do():
    with pytest.raises(ConfigError, match=r"vocabulary of 5,000 is asked for.*at most \d+") as caught:
        train_bpe(iter(["a few words only"]), 5000)
    largest = int(re.search(r"at most (\d+)", str(caught.value)).group(1))
    assert len(train_bpe(iter(["a few words only"]), largest)) == largest - len(SPECIAL_TOKENS)


def test_an_error_in_the_text_reaches_the_caller():
    def texts():
        yield "fine"
        raise KeyError("broken source")

    with pytest.raises(KeyError, match="broken source"):
        train_bpe(texts(), 300)


def test_transformers_loads_it_as_a_fast_tokenizer_beside_a_qwen3_config(folder, tmp_path, encoding):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "It's 12345 <- é 日本 !!\n\n  end"
    assert loaded(text)["input_ids"] == [encoding.bos_id, *encoding.encode(text)]
    assert loaded(text, add_special_tokens=False)["input_ids"] == encoding.encode(text)
    assert loaded.decode(encoding.encode(text)) == text
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<|bos|>", "<|end|>", "<|pad|>")
    loaded.save_pretrained(tmp_path / "again")
    assert Encoding(tmp_path / "again").encode(text) == encoding.encode(text)


def test_a_sentencepiece_vocabulary_has_bytes_too(tmp_path):
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocabulary = {"<unk>": 0, "<0x0A>": 1, "▁a": 2, "é": 3, "a": 4, "▁": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Encoding(tmp_path).token_bytes.tolist() == [0, 1, 2, 2, 1, 1]
