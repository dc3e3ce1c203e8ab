"""Trackers that get the metrics of stages, beside metrics.jsonl."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from nanodag.config.section import Section
from nanodag.errors.words import listed

# Trackers with a process of their own (nanodag.worker.tracker); TensorBoard only writes files.
SERVICES = ("wandb", "trackio")
PLACES = ("run", "stage", "kind", "preset", "build")
_PLACE = re.compile(r"\{([^{}]*)\}")

Template = Annotated[str, Field(min_length=1, max_length=200)]


class TrackingConfig(Section):
    """Trackers that get the metrics, beside metrics.jsonl. Each stage is one run of a tracker. In group, name and id
    `{run}`, `{stage}`, `{kind}`, `{preset}` and `{build}` are filled in."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """`tensorboard` writes files beside the metrics, `wandb` is Weights & Biases, `trackio` Hugging Face's. The last
    two are packages of their own."""
    project: str = Field("nanodag", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")
    """The tracker's project."""
    entity: str = Field("none", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """The team or user of W&B; `none`: that of the login."""
    group: Template = "{run}"
    """What the stages of one run have in common."""
    name: Template = "{run}/{stage}"
    """The name of a stage's run in W&B. Trackio tells runs apart by their names, so there it is the id."""
    id: str = Field("{run}-{stage}-{build}", pattern=r"^[A-Za-z0-9_.{}-]{1,100}$")
    """What a stage's run is known by, and continued under after a retry. `{build}` is new for each build; without it
    every build of the stage writes into one run."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Tags of every stage's run."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: W&B writes files under the store's local folder and sends nothing; `wandb sync` does that later."""

    @field_validator("group", "name", "id")
    @classmethod
    def _fills_what_there_is(cls, text: str) -> str:
        if unknown := [place for place in _PLACE.findall(text) if place not in PLACES]:
            places = listed(f"{{{place}}}" for place in PLACES)
            raise ValueError(f"{text!r} has {{{unknown[0]}}}, which nothing fills in; there are {places}")
        return text

    @field_validator("id")
    @classmethod
    def _differs_between_stages(cls, text: str) -> str:
        if "{stage}" not in text:
            raise ValueError(f"{text!r} is one id for all stages, which would write into one run; put {{stage}} in it")
        return text


def filled(template: str, **places: str) -> str:
    """A template with its places filled in."""
    return _PLACE.sub(lambda match: places[match[1]], template)
