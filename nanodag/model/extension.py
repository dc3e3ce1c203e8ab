"""More positions for a model that goes on: its folder again, with another config.json."""

import json
import os
import shutil
from pathlib import Path
from typing import Literal

from nanodag.errors import ConfigError
from nanodag.model.architecture import read_checkpoint, read_json
from nanodag.store.atomic import temporary_name


def extended(source: Path, folder: Path, *, positions: int, by: Literal["yarn", "ntk"]) -> Path:
    """`folder`, with links to the files of a model's folder and a config.json that says so many positions.

    by: `yarn` stretches the slow angles (arXiv:2309.00071, section 3), `ntk` raises the base of all, so that the
    slowest one turns as far over the new positions as over the old ones (section 3.1). Ranks may make it at once.
    Raises ConfigError for positions that are no more than the model's, and for angles that are stretched already.
    """
    config, before = read_json(source / "config.json"), read_checkpoint(source).architecture.max_positions
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {})}
    kind, theta = rope.get("rope_type", rope.get("type", "default")), rope.get("rope_theta", config.get("rope_theta"))
    if positions <= before:
        raise ConfigError(f"shape.extend_to: {positions} is no more than the {before} positions of {source}.")
    if kind != "default" or theta is None:
        raise ConfigError(f"shape.extend_to: {source} has angles of kind {kind!r}, of base {theta}; plain ones extend.")
    factor, width = positions / before, read_checkpoint(source).architecture.head_dim
    if by == "ntk":
        theta *= factor ** (width / (width - 2))
        rope = {**rope, "rope_theta": theta}
    else:
        stretched = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": before}
        rope = {**rope, "rope_theta": theta, **stretched}
    config |= {"max_position_embeddings": positions, "rope_parameters": rope}
    config |= {"rope_theta": theta} if "rope_theta" in config else {}
    config.pop("rope_scaling", None)
    temporary = folder.with_name(f"{folder.name}.{temporary_name()}")
    temporary.mkdir(parents=True)
    for path in source.iterdir():
        (temporary / path.name).symlink_to(path.absolute())
    (temporary / "config.json").unlink()
    (temporary / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    try:
        os.rename(temporary, folder)
    except OSError:  # it is there: another rank made it, or an earlier try
        shutil.rmtree(temporary)
    return folder
