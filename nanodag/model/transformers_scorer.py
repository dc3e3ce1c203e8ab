"""A reward model over transformers' layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nanodag.errors import ConfigError
from nanodag.model.architecture import Architecture
from nanodag.model.scorer import ScalarHead
from nanodag.model.transformers_model import TransformersModel


class TransformersScorer(ScalarHead, TransformersModel):  # type: ignore[misc] # its forward needs places
    """Raises ConfigError as a TransformersModel does, and where transformers has no class of the type that scores."""

    def __init__(self, folder: Path, architecture: Architecture, **options: Any) -> None:
        from transformers import AutoModelForSequenceClassification

        super().__init__(folder, architecture, **options)
        config = self._loaded.whole.config
        if type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise ConfigError(f"{folder}: transformers has no class of type {config.model_type} with a scalar head.")
        width = self.lm_head.weight.shape[1]
        del self.lm_head
        self.put_head(width)

    def checkpoint(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """As of a TransformersModel; the class that scores does not scale hidden states, as that with logits may."""
        layers = {name: tensor for name, tensor in weights.items() if name != "score.weight"}
        kept = {name: tensor for name, tensor in super().checkpoint(layers).items() if name != "score.weight"}
        return {**kept, "score.weight": weights["score.weight"] * self._loaded.scale}
