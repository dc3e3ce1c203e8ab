"""What the headers of a Hugging Face directory's safetensors files say. No torch, nothing is loaded."""

import json
import math
import struct
from pathlib import Path


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape by name. A safetensors file begins with the length of its JSON header, as 8 bytes."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        found |= {name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
    return found


def num_elements(shapes: dict[str, tuple[int, ...]]) -> int:
    """Of all these tensors."""
    return sum(math.prod(shape) for shape in shapes.values())


def matrix_parameters(folder: Path) -> int:
    """Parameters that every token is multiplied with: the matrices, the output head counted once, tied or not, the
    embedding not. A token takes 2 FLOPs of each forward, 4 backward, beside attention (PaLM, arXiv:2204.02311,
    appendix B)."""
    matrices = {name: shape for name, shape in tensor_shapes(folder).items() if len(shape) == 2}
    is_tied = "lm_head.weight" not in matrices
    return num_elements({name: shape for name, shape in matrices.items() if is_tied or "embed_tokens" not in name})
