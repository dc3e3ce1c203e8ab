"""A stage that takes a model as it is."""

from collections.abc import Iterator
from typing import ClassVar

from nanodag.config.kind import MODEL, Kind
from nanodag.config.stage_base import ExternalInput, StageBase


class ImportStage(StageBase):
    """A model that exists already, as a Hugging Face directory."""

    plan_formula: ClassVar[str] = "nanodag.plan.small_stages:IMPORT"

    model: str
    """The Hugging Face model: `hub:owner/name[@revision]` or `file:FOLDER`."""

    @property
    def known_model(self) -> str:
        return self.model

    def external_inputs(self) -> Iterator[ExternalInput]:
        yield ExternalInput("model", "model", self.model)


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
