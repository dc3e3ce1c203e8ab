"""Supervised fine-tuning."""

from nanodag.config.kind import MODEL
from nanodag.config.supervised import ChatStage, SupervisedKind


class SFTStage(ChatStage):
    """The last supervised stage."""


KIND = SupervisedKind(name="sft", config=SFTStage, needs={"model": MODEL}, label="SFT", order=50)
