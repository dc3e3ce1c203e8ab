"""A stage that takes a model as it is."""

from nanodag.config.kind import MODEL, Kind
from nanodag.config.stage_base import StageBase


class ImportStage(StageBase):
    """A model that exists already, as a Hugging Face directory."""

    model: str
    """The Hugging Face model: `hub:owner/name[@revision]` or `file:FOLDER`."""


KIND = Kind(
    name="import",
    config=ImportStage,
    module="nanodag.model.import_model",
    makes=MODEL,
    code_version=2,
    is_on_cpu=True,
    label="START",
    order=20,
)
