from pathlib import Path

import pytest

from nanodag.config.kinds.evaluation import EvalStage
from nanodag.worker.job import Job
from tests.data.rows import write_rows
from tests.engines.conftest import samplers_are_forks  # noqa: F401 - for each module of this folder
from tests.evaluation.tiny import CLASSES, save_tiny_model


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


@pytest.fixture
def make_job(tmp_path, model_folder):
    """Makes an eval stage's job of two benchmarks of likelihoods and one of written answers. changes: of its config."""
    lines = [
        {"question": f"{word} the cat", "answer": "sat", "text": f"{word} on the mat " * 12} for word in "abcdefgh"
    ]
    source = write_rows(tmp_path / "problems.jsonl", lines)
    problems, documents = ({"url": source, "adapter": adapter} for adapter in ("problem", "text"))
    config = EvalStage(
        kind="eval", seed=0,
        benchmarks=({"name": "words", "form": "problems", "source": problems, "limit": 5},
                    {"name": "bits_per_byte", "source": documents}, {"name": "continuation", "source": documents}),
        precision="fp32", max_new_tokens=6, sample_prompts=("the cat",),
        resources={"num_ranks": 1, "threads": 1, "device": "cpu"}, micro_batch_tokens=1024,
        sampler={"engine": "embedded", "replicas": 1, "max_batch": 8, "cache_bytes": 1 << 24},
    )  # fmt: skip

    def made(name: str, **changes) -> Job:
        (tmp_path / name).mkdir()
        changed = config.model_copy(update=changes)
        return Job(
            name="eval_sft", run="r", config=changed, inputs={"model": model_folder}, workspace=tmp_path / name,
            context={"mirror": "none"},
        )  # fmt: skip

    return made
