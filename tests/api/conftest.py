from pathlib import Path

import pytest

from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
from nanodag.tokenizer.encoding import Encoding
from nanodag.tokenizer.samples import SAMPLES


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and chat template of ours."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe(iter(SAMPLES.values()), 600), folder)
    return folder


@pytest.fixture(scope="session")
def encoding(folder: Path) -> Encoding:
    return Encoding(folder)


@pytest.fixture(scope="session")
def ids_of(encoding):
    """ids_of("text", "<|end|>"): token ids, special tokens by their names."""

    def ids(*pieces):
        found = []
        for piece in pieces:
            is_special = piece.startswith("<|") and piece.endswith("|>")
            found += [encoding.token_id(piece)] if is_special else encoding.encode(piece)
        return found

    return ids
