"""Supervised fine-tuning."""

from nanodag.config.kind import CONVERSATIONS, MODEL
from nanodag.config.supervised import ChatStage, SupervisedKind


class SFTStage(ChatStage):
    """The last supervised stage."""


KIND = SupervisedKind(
    name="sft",
    config=SFTStage,
    needs={"model": MODEL},
    may_take={"conversations": CONVERSATIONS},
    label="SFT",
    order=50,
)
