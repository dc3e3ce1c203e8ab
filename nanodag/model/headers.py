"""The safetensors files of a Hugging Face directory and what their headers say. No torch, nothing is loaded."""

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nanodag.errors import BadRequest, ConfigError
from nanodag.model.architecture import active_share, read_json

INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # of a folder of adapters, in peft's format
EXPERTS = ".experts."  # in the name of a tensor that not every token meets
NUM_BLOCKS, BLOCK_BYTES = 1024, 4096  # of each file, by which weights are told apart


@contextmanager
def faults_of_config() -> Iterator[None]:
    """A folder that cannot be read, as ConfigError: a stage was given it, and no sampler has refused a request."""
    try:
        yield
    except BadRequest as error:
        raise ConfigError(str(error)) from error


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model: those of its index, else model.safetensors. Others beside them are not of the model.

    Raises BadRequest where there is neither, or where an index names a file that would lie elsewhere.
    """
    index = folder / INDEX
    if not os.path.exists(index):
        if not os.path.exists(folder / "model.safetensors"):
            raise BadRequest(f"{folder} holds neither model.safetensors nor {INDEX}; older formats are not read")
        return [folder / "model.safetensors"]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise BadRequest(f"{index} has no weight_map of tensors to files")
    for name in names.values():
        if Path(name).name != name or name in ("", ".."):
            raise BadRequest(f"{index} names {name[:80]!r}, which does not lie in its folder")
    return [folder / name for name in sorted(set(names.values()))]


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors by name. Raises BadRequest for files that are not there, or not whole."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "np") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise BadRequest(f"{path} cannot be read: {error}") from error
    return shapes


def weights_digest(folder: Path) -> str:
    """16 hex digits that name a model's weights, wherever they lie: of sizes and blocks spread over each file, so that
    4 MiB of it are read. Small files count whole, and so do settings of adapters."""
    digest = hashlib.sha256()
    if (settings := folder / ADAPTER_CONFIG).is_file():
        digest.update(settings.read_bytes())
    for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        num_bytes = path.stat().st_size
        digest.update(num_bytes.to_bytes(8, "little"))
        with path.open("rb") as stream:
            for place in range(0, num_bytes, max(num_bytes // NUM_BLOCKS, BLOCK_BYTES)):
                stream.seek(place)
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


def num_elements(shapes: dict[str, tuple[int, ...]]) -> int:
    """Number of elements of all these tensors."""
    return sum(math.prod(shape) for shape in shapes.values())


def head_parameters(folder: Path) -> int:
    """Parameters of the output head, tied or not: those of `matrix_parameters` that only tokens with logits are
    multiplied with."""
    shapes = tensor_shapes(folder)
    names = ("lm_head.weight",) if "lm_head.weight" in shapes else ("embed_tokens", "wte.", "embeddings.")
    return num_elements({tensor: shape for tensor, shape in shapes.items() if any(name in tensor for name in names)})


def matrix_parameters(folder: Path) -> int:
    """Parameters that every token is multiplied with: the matrices, the output head counted once, tied or not, the
    embedding not; of experts the share that a token meets. A token takes 2 FLOPs of each forward, 4 backward, beside
    attention (PaLM, arXiv:2204.02311, appendix B)."""
    matrices = {name: shape for name, shape in tensor_shapes(folder).items() if len(shape) > 1}
    is_tied = "lm_head.weight" not in matrices
    used = {name: shape for name, shape in matrices.items() if is_tied or "embed" not in name}
    experts = num_elements({name: shape for name, shape in used.items() if EXPERTS in name})
    idle = 1 - active_share(read_json(folder / "config.json")) if experts else 0.0
    return num_elements(used) - round(idle * experts)
