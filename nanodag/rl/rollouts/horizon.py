"""How many steps a stage has whose horizon is a number of passes over its prompts. No torch here."""

import logging
import math
from pathlib import Path

from nanodag.config.kinds.rl import RLStage
from nanodag.data.mixture import Mixture
from nanodag.errors import ConfigError
from nanodag.errors.words import counted

log = logging.getLogger(__name__)


def with_num_steps(config: RLStage, mirror: Path | None = None) -> RLStage:
    """The stage with num_steps in the place of num_epochs: num_epochs times the training prompts, divided by those that
    a step generates, rounded up.

    Each prompt counts once, also one that is too long. With over_sampling a step may use up more prompts than it trains
    on, so the data are then passed over more often. Every prompt is read once for it. Raises ConfigError for a mixture
    by weights, which has no end, and for settings that do not fit the steps.
    """
    if not config.num_epochs:
        return config
    num_prompts = sum(1 for _ in Mixture(config.data, kind="prompt", seed=int(config.seed), mirror=mirror))
    num_steps = max(1, math.ceil(config.num_epochs * num_prompts / config.rollout.num_fresh))
    log.info("%s make %g epochs of %s.", counted(num_steps, "step"), config.num_epochs, counted(num_prompts, "prompt"))
    try:
        return type(config).model_validate({**config.model_dump(), "num_steps": num_steps, "num_epochs": 0.0})
    except ValueError as error:
        raise ConfigError(f"num_epochs {config.num_epochs:g} of {num_prompts} prompts: {error}") from error
