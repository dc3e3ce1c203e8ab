"""Supervised fine-tuning."""

from typing import Literal

from nanodag.config.supervised import ChatStage


class SFTStage(ChatStage):
    """The last supervised stage."""

    kind: Literal["sft"]
