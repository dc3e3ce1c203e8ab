"""Facts about a stage's services before they start: the model, where its samplers run, where weights pass. No torch."""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanodag.model.architecture import vocabulary_and_positions
from nanodag.model.headers import faults_of_config, head_parameters, matrix_parameters, weight_files

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about the model of a Hugging Face directory, without loading it."""

    sizes: Mapping[str, int]
    """num_parameters: of the matrices but the head; num_head_parameters."""
    num_bytes: int
    max_positions: int
    vocab_size: int

    @classmethod
    @faults_of_config()
    def read(cls, folder: Path) -> "ModelFacts":
        """From config.json and the headers of the safetensors files. Raises ConfigError where there are none."""
        (vocab_size, max_positions), head = vocabulary_and_positions(folder), head_parameters(folder)
        return cls(
            sizes={"num_parameters": matrix_parameters(folder) - head, "num_head_parameters": head},
            num_bytes=sum(file.stat().st_size for file in weight_files(folder)),
            max_positions=max_positions,
            vocab_size=vocab_size,
        )


def sync_folder(workspace: Path, model_bytes: int, *, num_copies: int, is_shared: bool = False) -> Path:
    """Folder by which weights pass from trainer to sampler: in memory where there is room for the copies in float32,
    else in the workspace, also where other machines must see it (is_shared). num_copies: what samplers have, and what
    waits for them.

    The name depends on the workspace alone, so a restart finds and removes what a killed process left.
    """
    name = "nanodag-" + hashlib.blake2b(str(workspace.resolve()).encode(), digest_size=8).hexdigest()
    if is_shared or not SHARED_MEMORY.is_dir():
        return workspace / "sync"
    has_room = shutil.disk_usage(SHARED_MEMORY).free > 2 * num_copies * model_bytes
    return SHARED_MEMORY / name if has_room else workspace / "sync"
