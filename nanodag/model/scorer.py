"""A reward model: a decoder with a scalar head, as transformers' classes for sequence classification have it."""

from typing import Any

from torch import Tensor, nn

from nanodag.model.architecture import Architecture
from nanodag.model.decoder import Decoder


class Scorer(Decoder):
    """Scores of places in packed rows, linear in their last hidden states. The head begins at 0, so before its first
    update every score is 0, and nothing is drawn at random."""

    def __init__(self, of: Architecture, **options: Any) -> None:
        super().__init__(of, **options)
        del self.lm_head
        self.score = nn.Linear(of.hidden_size, 1, bias=False, device="cpu")
        nn.init.zeros_(self.score.weight)

    def forward(self, input_ids: Tensor, position_ids: Tensor, *, places: Tensor, **options: Any) -> Tensor:  # type: ignore[override]
        """(N,) float32, at places (N,) int64 of the flattened rows. Otherwise as of a decoder."""
        hidden = super().forward(input_ids, position_ids, want="hidden", **options)
        assert isinstance(hidden, Tensor)
        return self.score(hidden.flatten(0, 1).index_select(0, places)).squeeze(1).float()

    def labelled(self, config: dict[str, Any], generation: dict[str, Any]) -> dict[str, Any]:
        """A model's config.json as that of a classifier with one label. generation: its generation_config.json. Padding
        that is also what ends an answer is left out: transformers scores the last token that is not padding."""
        pad_id = generation.get("pad_token_id")
        pad_id = None if pad_id in generation.get("eos_token_id", ()) else pad_id
        names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
        labels = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
        return {**config, "architectures": names, **labels, "pad_token_id": pad_id}
