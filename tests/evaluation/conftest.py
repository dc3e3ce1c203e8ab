from pathlib import Path

import pytest

from nanodag.inference.sampler_process import SamplerProcess
from tests.evaluation.tiny import CLASSES, save_tiny_model
from tests.forks import spawn_server


@pytest.fixture(scope="module", autouse=True)
def samplers_are_forks():
    """A second of imports each, else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplerProcess, "spawn", classmethod(spawn_server))
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Folders of tiny random models by model type."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in CLASSES}
    for kind, folder in folders.items():
        save_tiny_model(folder, kind)
    return folders


@pytest.fixture
def model_folder(models) -> Path:
    return models["qwen3"]
