"""Midtraining."""

from typing import Literal

from nanodag.config.supervised import ChatStage


class MidtrainStage(ChatStage):
    """Chat format, multiple choice and tools, on a large mixture."""

    kind: Literal["midtrain"]
