"""A model's shape, which decides memory and work before any of it was built; and shapes of models on the hub, by name.

`auto` follows from the pipeline and the machine alone, so it cannot look into files that may not be there yet.
"""

import re
from dataclasses import dataclass

from nanodag.config.dial import Shape, flops_per_token, num_parameters
from nanodag.inference.cache_size import token_bytes


@dataclass(frozen=True)
class ModelSize:
    """A model's shape. max_positions: tokens of the longest sequence that it is declared for. window: tokens that one
    sees in layers with a sliding window, None where no layer has one."""

    shape: Shape
    vocabulary: int
    max_positions: int
    window: int | None = None

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters by part, as nanodag.config.dial counts them."""
        return num_parameters(self.shape, self.vocabulary)

    @property
    def total(self) -> int:
        return self.parameters["total"]

    def token_bytes(self, element_bytes: int) -> int:
        """Bytes of one token's keys and values in a sampler's cache."""
        return token_bytes(
            num_layers=self.shape.depth,
            num_kv_heads=self.shape.num_kv_heads,
            head_width=self.shape.head_width,
            element_bytes=element_bytes,
        )

    def training_flops(self, length: int) -> int:
        """FLOPs of forward and backward for a token of rows of a length."""
        return flops_per_token(self.shape, self.vocabulary, length)

    def forward_flops(self, length: int) -> float:
        """FLOPs of a forward pass for a token that sees so many before it on average."""
        return self.training_flops(length) / 3


# From each model's config.json: layers, width, heads, key-value heads, head width, inner width, tied; vocabulary.
_QWEN = 151_936
KNOWN: dict[str, tuple[Shape, int]] = {
    "Qwen/Qwen2.5-0.5B": (Shape(24, 896, 14, 2, 64, 4864, tied_embeddings=True), _QWEN),
    "Qwen/Qwen2.5-1.5B": (Shape(28, 1536, 12, 2, 128, 8960, tied_embeddings=True), _QWEN),
    "Qwen/Qwen2.5-3B": (Shape(36, 2048, 16, 2, 128, 11008, tied_embeddings=True), _QWEN),
    "Qwen/Qwen2.5-7B": (Shape(28, 3584, 28, 4, 128, 18944, tied_embeddings=False), 152_064),
    "Qwen/Qwen3-0.6B": (Shape(28, 1024, 16, 8, 128, 3072, tied_embeddings=True), _QWEN),
    "Qwen/Qwen3-1.7B": (Shape(28, 2048, 16, 8, 128, 6144, tied_embeddings=True), _QWEN),
    "Qwen/Qwen3-4B": (Shape(36, 2560, 32, 8, 128, 9728, tied_embeddings=True), _QWEN),
    "Qwen/Qwen3-8B": (Shape(36, 4096, 32, 8, 128, 12288, tied_embeddings=False), _QWEN),
    "HuggingFaceTB/SmolLM2-135M": (Shape(30, 576, 9, 3, 64, 1536, tied_embeddings=True), 49_152),
    "HuggingFaceTB/SmolLM2-360M": (Shape(32, 960, 15, 5, 64, 2560, tied_embeddings=True), 49_152),
    "HuggingFaceTB/SmolLM2-1.7B": (Shape(24, 2048, 32, 32, 64, 8192, tied_embeddings=True), 49_152),
    "meta-llama/Llama-3.2-1B": (Shape(16, 2048, 32, 8, 64, 8192, tied_embeddings=True), 128_256),
    "meta-llama/Llama-3.2-3B": (Shape(28, 3072, 24, 8, 128, 8192, tied_embeddings=True), 128_256),
}

# By how their names begin: positions that all models of a family have at least.
POSITIONS = {
    "Qwen/Qwen2.5-": 32_768,
    "Qwen/Qwen3-": 32_768,
    "HuggingFaceTB/SmolLM2-": 8_192,
    "meta-llama/Llama-3.2-": 131_072,
}


def known_model(model: str) -> ModelSize | None:
    """The size of an import's `model`; None of one that is not known, which gets the careful value of each rule.

    A chat model is its base model's size: `-Instruct` and `-Base` do not matter, nor does a revision."""
    if not model.startswith("hub:"):
        return None
    name = model.removeprefix("hub:").partition("@")[0]
    if (known := KNOWN.get(re.sub(r"-(Instruct|Base)$", "", name))) is None:
        return None
    return ModelSize(*known, next(number for family, number in POSITIONS.items() if name.startswith(family)))
