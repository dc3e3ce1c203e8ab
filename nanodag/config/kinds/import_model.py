"""A stage that takes a model as it is."""

from typing import Literal

from nanodag.config.stage_base import StageBase


class ImportStage(StageBase):
    """A model that exists already, as a Hugging Face directory."""

    kind: Literal["import"]
    model: str
    """The Hugging Face model: `hub:owner/name[@revision]` or `file:FOLDER`."""
