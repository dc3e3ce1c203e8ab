from pathlib import Path

import pytest

from tests.evaluation.tiny import save_tiny_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> Path:
    """A folder with a tiny random chat model."""
    folder = tmp_path_factory.mktemp("chat-model")
    save_tiny_model(folder, "qwen3")
    return folder
