from pathlib import Path

import pytest

from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
from nanodag.tokenizer.train import SAMPLES


@pytest.fixture(autouse=True)
def _digests_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NANODAG_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe(iter(SAMPLES.values()), 512), folder)
    return folder
