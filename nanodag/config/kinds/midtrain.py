"""Midtraining."""

from nanodag.config.kind import MODEL
from nanodag.config.supervised import ChatStage, SupervisedKind


class MidtrainStage(ChatStage):
    """Chat format, multiple choice and tools, on a large mixture."""


KIND = SupervisedKind(name="midtrain", config=MidtrainStage, needs={"model": MODEL}, label="MID", order=40)
