from pathlib import Path

import pytest

from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
from nanodag.tokenizer.train import SAMPLES


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe(iter(SAMPLES.values()), 600), folder)
    return folder
