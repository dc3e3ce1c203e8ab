"""Midtraining."""

from nanodag.config.kind import CONVERSATIONS, MODEL
from nanodag.config.supervised import ChatStage, SupervisedKind


class MidtrainStage(ChatStage):
    """Chat format, multiple choice and tools, on a large mixture."""


KIND = SupervisedKind(
    name="midtrain",
    config=MidtrainStage,
    needs={"model": MODEL},
    may_take={"conversations": CONVERSATIONS},
    label="MID",
    order=40,
)
