"""A stage that takes a model as it is."""

from typing import Literal

from nanodag.config.stage_base import StageBase


class ImportStage(StageBase):
    """A model that exists already, as a Hugging Face directory. model: `hub:owner/name[@revision]` or `file:folder`."""

    kind: Literal["import"]
    model: str
