"""What of a model decides its memory and work: known before any of it was built."""

from dataclasses import dataclass

from nanodag.config.dial import Shape, flops_per_token, num_parameters
from nanodag.inference.cache_size import token_bytes


@dataclass(frozen=True)
class ModelSize:
    """A model's shape. max_positions: tokens of the longest sequence that it is declared for."""

    shape: Shape
    vocabulary: int
    max_positions: int

    @property
    def parameters(self) -> dict[str, int]:
        """By part, as nanodag.config.dial counts them."""
        return num_parameters(self.shape, self.vocabulary)

    @property
    def total(self) -> int:
        """All parameters."""
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
