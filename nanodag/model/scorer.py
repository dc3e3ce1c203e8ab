"""A reward model: a scalar head in the place of a language model's, as transformers' classes for sequence
classification have it; over our own decoder, or over transformers' layers (nanodag.model.transformers_model)."""

from typing import Any

from torch import Tensor, nn

from nanodag.model.architecture import Architecture
from nanodag.model.decoder import Decoder
from nanodag.tokenizer.steps import SEPARATOR


class ScalarHead:
    """A mixin that makes a scorer of a language model, before which it stands. Scores of places in packed rows are
    linear in their last hidden states. The head begins at 0, so before its first update every score is 0, and nothing
    is drawn at random."""

    score: nn.Linear
    step_separator = ""  # of a model that judges the steps of an answer

    def put_head(self, width: int) -> None:
        self.score = _Rows(width, 1, bias=False, device="cpu")
        nn.init.zeros_(self.score.weight)

    def forward(self, input_ids: Tensor, position_ids: Tensor, *, places: Tensor, **options: Any) -> Tensor:
        """(N,) float32, at places (N,) int64 of the flattened rows. Otherwise as of the language model."""
        hidden = super().forward(input_ids, position_ids, want="hidden", **options)  # type: ignore[misc]
        assert isinstance(hidden, Tensor)
        scores: Tensor = self.score(hidden.flatten(0, 1).index_select(0, places))
        return scores

    def labelled(self, config: dict[str, Any], generation: dict[str, Any]) -> dict[str, Any]:
        """A model's config.json as that of a classifier with one label. generation: its generation_config.json. Padding
        that is also what ends an answer is left out: transformers scores the last token that is not padding."""
        pad_id = generation.get("pad_token_id")
        pad_id = None if pad_id in generation.get("eos_token_id", ()) else pad_id
        names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
        labels: dict[str, Any] = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
        labels |= {SEPARATOR: self.step_separator} if self.step_separator else {}
        return {**config, "architectures": names, **labels, "pad_token_id": pad_id}


class _Rows(nn.Linear):
    """One number for each row, computed alone: a matrix product rounds a row by how many there are."""

    def forward(self, rows: Tensor) -> Tensor:
        return (rows.float() * self.weight.float()).sum(1)


class Scorer(ScalarHead, Decoder):  # type: ignore[misc] # its forward needs places
    """Over our own decoder."""

    def __init__(self, of: Architecture, **options: Any) -> None:
        super().__init__(of, **options)
        del self.lm_head
        self.put_head(of.hidden_size)
